"""Plans against what happens: the same step on ranks of a world that is nowhere, and on real ones."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.mesh.sizes import MeshSizes
from meshwright.mesh.world import open_world
from meshwright.plan.trace import Job, Trace, trace
from meshwright.plan.world import planned_world
from meshwright.strategy.stack import resolve
from meshwright.testing.pool import pool
from meshwright.train.optim import optimizer_factory
from meshwright.train.optimizer_config import OptimizerConfig

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 160,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Layout:
    """What is planned and then done: a strategy, on so many ranks."""

    strategy: str
    ranks: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    wrapper: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    model: str = "llama"

    def __str__(self) -> str:
        parts = [self.strategy, *(f"{k}={v}" for k, v in {**self.sizes, **self.config, **self.wrapper}.items())]
        return "-".join([*parts, f"{self.ranks}ranks", *({self.dtype, self.model} - {"float64", "llama"})])

    def job(self) -> Job:
        wrapper = {"pipeline": dict(self.wrapper)} if self.wrapper else None
        stack, degrees = resolve(
            self.strategy, MeshSizes(**self.sizes), self.ranks, config=dict(self.config), wrapper_config=wrapper
        )
        return Job(
            stack,
            degrees,
            functools.partial(_model, self.model, self.dtype),
            optimizer_factory(OptimizerConfig(lr=1e-2)),
            microbatches=2,
            rows=2,
        )


EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 4}
"""Each token goes to all of them, so routing is even whatever the weights."""


def _model(model_type: str, dtype: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = AutoConfig.for_model(model_type, **SIZES, **(EXPERTS if model_type != "llama" else {}), **tokens)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def _done(layout: Layout) -> Trace:
    return trace(layout.job(), open_world("cpu"))


def _planned(layout: Layout, rank: int) -> Trace:
    with planned_world(rank, layout.ranks) as world:
        return trace(layout.job(), world)


EXACT = [
    Layout("fsdp2", 2),
    Layout("fsdp2", 4, {"dp_replicate_size": 2}),
    Layout("fsdp2", 2, {"tp_size": 2}),
    Layout("fsdp2", 4, {"tp_size": 2}, {"sequence_parallel": True}),
    Layout("fsdp2", 2, {"cp_size": 2}),
    Layout("fsdp2", 2, {}, {"activation_checkpointing": "full"}),
    Layout("ddp", 2),
    Layout("ddp", 2, {}, {"engine": "bucketed"}),
    Layout("fsdp2", 2, {"pp_size": 2}),
    Layout("ddp", 4, {"pp_size": 2}),
    Layout("fsdp2", 2, {}, model="qwen3_moe"),
    Layout("fsdp2", 2, {"ep_size": 2}, model="qwen3_moe"),
]


@pytest.mark.parametrize("layout", EXACT, ids=str)
def test_a_plan_is_what_real_ranks_do(layout):
    everywhere = pool(layout.ranks).run(_done, layout)
    for rank in (0, layout.ranks - 1):
        done = everywhere[rank]
        planned = _planned(layout, rank)
        assert planned.collectives == done.collectives
        assert planned.peak == done.peak
        assert planned.after == done.after
        assert _products(planned) == _products(done)


def _products(found: Trace) -> list[tuple[str, Any, int]]:
    """What a step computes in the main; gloo itself runs further operators."""
    return [(each.name, each.shapes, each.flops) for each in found.operations if each.flops]
