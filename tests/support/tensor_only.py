"""A strategy that shards along `tp` and nothing else: core's tensor parallelism without a data-parallel strategy.

And models that show what the tiny Llama does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from meshwright import StrategySpec, hookimpl
from meshwright.manager.data_parallel import DataParallelManager
from meshwright.parallel.tensor import ParameterSharding, TensorParallel
from meshwright.strategy.contract import StrategyConfig
from meshwright.strategy.registry import get_registry
from meshwright.tensors.chunks import LocalChunk
from meshwright.tensors.norms import ShardGroups
from meshwright.tensors.state import ShardLayout
from meshwright_testing.case import Case, Outcome
from meshwright_testing.models import TINY
from meshwright_testing.parity import find_max_difference, train_case
from meshwright_testing.workers import pool


class TensorOnlyConfig(StrategyConfig):
    sequence_parallel: bool = False
    tp_plan: Any = None
    plain: bool = False


class PlainShardLayout(ShardLayout):
    """Plain parameters, by how tensor parallelism has divided them."""

    def __init__(self, divisions: Mapping[Tensor, ParameterSharding]) -> None:
        self._divisions = divisions

    def _find_division(self, value: Tensor, parameter: Tensor) -> ParameterSharding | None:
        return self._divisions.get(parameter) if value.shape == parameter.shape else None

    def gather(self, value: Tensor, parameter: Tensor) -> Tensor:
        return value if (division := self._find_division(value, parameter)) is None else division.gather(value)

    def shard(self, full: Tensor, parameter: Tensor) -> Tensor:
        division = self._divisions.get(parameter)
        return full if division is None or full.shape != division.shape else division.shard(full)

    def get_full_shape(self, value: Tensor, parameter: Tensor) -> torch.Size:
        return value.shape if (division := self._find_division(value, parameter)) is None else division.shape

    def get_local_chunks(self, value: Tensor, parameter: Tensor) -> list[LocalChunk]:
        own = super().get_local_chunks(value, parameter)
        return (
            own
            if (division := self._find_division(value, parameter)) is None
            else division.to_global_chunks(own, value.shape)
        )

    def get_shard_groups(self, parameter: Tensor) -> ShardGroups:
        division = self._divisions[parameter]
        return (division.mesh.get_group(),) if division.is_sharded else ()


class TensorOnlyManager(DataParallelManager):
    config: TensorOnlyConfig

    def shard(self, model: nn.Module) -> nn.Module:
        options = {"sequence_parallel": self.config.sequence_parallel, "use_plain_tensors": self.config.plain}
        parallel = TensorParallel(model, self.layout, self.mesh["tp"], plan=self.config.tp_plan, **options)
        parallel.apply()
        self.axes.append(parallel)
        if self.config.plain:
            divisions = parallel.shardings
            self.shard_layout = PlainShardLayout({p: divisions[name] for name, p in model.named_parameters()})
        return model


@hookimpl
def register_strategies() -> list[StrategySpec]:
    return [StrategySpec("tensor_only", "tp alone", frozenset({"tp"}), TensorOnlyConfig, TensorOnlyManager)]


# -- models, as variants of the tiny Llama


def _first_entry_masked(logits_BSV: Tensor) -> Tensor:
    logits_BSV = logits_BSV.clone()
    logits_BSV[..., 0] = -3.0
    return logits_BSV


_SIX_HEADS = {"num_attention_heads": 6, "head_dim": 6}
MODEL_VARIANTS: Mapping[str, tuple[Mapping[str, Any], Callable[[Tensor], Tensor] | None]] = {
    "six_heads": ({**_SIX_HEADS, "num_key_value_heads": 2}, None),
    "three_kv_heads": ({**_SIX_HEADS, "num_key_value_heads": 3}, None),
    "one_kv_head": ({**_SIX_HEADS, "num_key_value_heads": 1}, None),
    "eager": ({"attn_implementation": "eager"}, None),
    "soft_capped": ({}, lambda logits: torch.tanh(logits.float().to(logits.dtype) / 3.0) * 3.0),
    "flipped": ({}, lambda logits: logits.flip(-1)),
    "first_entry_masked": ({}, _first_entry_masked),
    "of_unit_length": ({}, lambda logits: logits / logits.norm(dim=-1, keepdim=True)),
}  # By name: what differs in the configuration, and what is done to the logits


class _Variant(LlamaForCausalLM):
    change: Callable[[Tensor], Tensor] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if self.change is not None:
            output.logits = type(self).change(output.logits)
        return output


def register_strategy_and_models() -> None:
    """Make strategy and models known to this process, a worker."""
    registry = get_registry()
    if "tensor_only" not in registry.strategies:
        registry.register(sys.modules[__name__], name="tensor_only")
    if "flipped" in TINY:
        return
    for name, (values, change) in MODEL_VARIANTS.items():
        config_cls = type(f"{name}_config", (LlamaConfig,), {"model_type": name})
        own = {"config_class": config_cls, "change": staticmethod(change) if change else None}
        AutoConfig.register(name, config_cls)
        AutoModelForCausalLM.register(config_cls, type(name, (_Variant,), own))
        TINY[name] = {**TINY["llama"], **values}


# -- parity


def train_registered_case(strategy: str, config: Mapping[str, Any], sizes: Mapping[str, Any], case: Case) -> Outcome:
    """`train_case`, for pools whose workers do not know this module."""
    register_strategy_and_models()
    return train_case(strategy, config, sizes, case)


@functools.cache
def run_expected(case: Case) -> Outcome:
    """The outcome under `single`."""
    return pool(1).run(train_registered_case, "single", {}, {}, case)[0]


def assert_equal_to_single(case: Case, ranks: int = 2, **config: Any) -> None:
    """Fail unless training under tensor parallelism gives what `single` gives, on every rank."""
    found = find_max_difference(
        pool(ranks).run(train_registered_case, "tensor_only", config, {"tp_size": ranks}, case), run_expected(case)
    )
    # A NaN is not within any tolerance.
    assert found.worst <= 1e-9, found
