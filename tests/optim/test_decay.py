"""Weight decay shrinks matrices and spares norms, biases and vectors: in every type and strategy, and by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kinds import DIFFERENT_IN_KIND
from support.managers import manager_of
from support.tiers import mostly_slow
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.pytorch_utils import Conv1D

from meshwright import OptimizerConfig, optimizer_factory
from meshwright.base.errors import ConfigError
from meshwright.optim.groups import known_without_model, what_is_trained
from meshwright.testing.models import tiny_model
from meshwright.testing.pool import pool
from meshwright.testing.zoo import zoo_config, zoo_reason, zoo_types

TRAINABLE = [name for name in zoo_types() if zoo_reason(name) is None]
# Where patterns over whole paths went wrong, and those that keep vectors in two dims.
KINDS = [*DIFFERENT_IN_KIND, "dbrx", "roberta-prelayernorm", "bert", "rwkv", "gpt_oss", "zamba", "kimi_linear", "xlnet"]


def decayed(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> set[str]:
    names = {id(parameter): name for name, parameter in named.items()}
    return {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in KINDS else pytest.mark.zoo) for name in TRAINABLE]
)
def test_matrices_are_decayed_and_norms_biases_and_vectors_are_not(model_type: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(zoo_config(model_type))
    named = dict(model.named_parameters())
    layout: Any = SimpleNamespace(blocks=())
    known = what_is_trained(model, layout, list(named.items()), lambda parameter: parameter.shape)
    found = {name for name, each in known.items() if each.is_decayed}
    maps = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, Conv1D)
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in named}
    matrices = {name for name, owner in owners.items() if isinstance(owner, maps) and name.endswith(".weight")}
    experts = {name for name in named if named[name].dim() == 3 and name.rpartition(".")[2].endswith("_proj")}
    is_bias = {name for name in named if "bias" in name.rpartition(".")[2] or "bias_values" in name}
    norms = {name for name, owner in owners.items() if type(owner).__name__.lower().endswith(("norm", "normgated"))}
    vectors = {name for name in named if named[name].dim() < 2 or name.endswith((".A_log", ".D", ".sinks"))}
    assert (matrices | experts) - is_bias - found == set()
    assert (is_bias | norms | vectors) & found == set()
    # Called by hand, a factory knows names and shapes alone.
    assert {name for name, each in known_without_model(named.items()).items() if each.is_decayed} == found


class Heads(nn.Module):
    """A norm with a scale for each head, in two dims, whose name does not say what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, 9, dtype=torch.float64))

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        return hidden_BSD * self.gain.view(-1)


class HeadsNorm(Heads):
    """The same, and its class does."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_proj = nn.Linear(36, 36, dtype=torch.float64)
        self.before, self.scale_of_heads = HeadsNorm(), Heads()
        self.A_log = nn.Parameter(torch.zeros(4, 9, dtype=torch.float64))
        self.mix = nn.Parameter(torch.ones(1, 1, 36, dtype=torch.float64))

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        read_BSD = self.scale_of_heads(self.before(hidden_BSD)) * self.A_log.exp().view(-1) * self.mix
        return hidden_BSD + self.norm_proj(read_BSD).tanh()


class Model(nn.Module):
    """A causal LM of a user's own, with a vector in each of the shapes in which it may be kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(131, 36, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(36, 131, bias=False, dtype=torch.float64)

    def forward(self, input_ids: Tensor) -> CausalLMOutput:
        hidden_BSD = self.embed(input_ids)
        for block in self.blocks:
            hidden_BSD = block(hidden_BSD)
        return CausalLMOutput(logits=self.head(hidden_BSD))


OWN = {"embed.weight", "head.weight"} | {
    f"blocks.{index}.{name}" for index in range(2) for name in ("norm_proj.weight", "scale_of_heads.gain")
}


def decayed_under(strategy: str, config: dict[str, Any], sizes: dict[str, int], own: bool) -> set[str]:
    """What the groups of this rank's optimizer decay, under the names of the unwrapped model."""
    manager = manager_of(Model() if own else tiny_model(), strategy, config, sizes)
    named: dict[str, nn.Parameter] = {}

    def factory(given: Any) -> torch.optim.Optimizer:
        pairs = list(given)
        named.update(pairs)
        return made(pairs)

    configured: Any = optimizer_factory(OptimizerConfig(weight_decay=0.1))

    class Noting:
        def for_model(self, trained: Any) -> Any:
            nonlocal made
            made = configured.for_model(trained)
            return factory

    made: Any = None
    optimizer = manager.build_optimizer(Noting())  # type: ignore[arg-type]
    return decayed(optimizer, named)


LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, int]]] = {
    "single": (1, "single", {}, {}),
    "ddp": (2, "ddp", {}, {}),
    "distributed optimizer": (2, "ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}),
    "fsdp2, recomputation": (2, "fsdp2", {"activation_checkpointing": "full"}, {}),
    "megatron_fsdp": (2, "megatron_fsdp", {}, {}),
}


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS, "ddp"))
def test_every_strategy_decays_the_same_parameters_of_a_model_of_ones_own(layout: str) -> None:
    ranks, *how = LAYOUTS[layout]
    found = pool(ranks).run(decayed_under, *how, True)
    assert set.union(*found) == OWN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sizes"), [("fsdp2", {"tp_size": 2}), ("ddp", {"pp_size": 2}), ("fsdp2", {"pp_size": 2})]
)
def test_shards_and_stages_decay_the_same_parameters_as_one_process(strategy: str, sizes: dict[str, int]) -> None:
    (expected,) = pool(1).run(decayed_under, "single", {}, {}, False)
    assert expected == {name for name, parameter in tiny_model().named_parameters() if parameter.dim() == 2}
    assert set.union(*pool(2).run(decayed_under, strategy, {}, sizes, False)) == expected


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0._checkpoint_wrapped_module.q_norm.weight", (4, 8), False),
        ("q_norm._orig_mod.weight", (4, 8), False),
        ("base_model.model.q_proj.lora_A.default.weight", (1, 32), True),
        ("q_proj.ia3_l.default", (32, 1), False),
        ("shared_expert_gate.weight", (1, 32), True),
        ("norms.0.weight", (4, 8), False),
        ("norm_attn_norm.attn.Wqkv.weight", (4, 8), True),
    ],
)
def test_names_of_wrappers_and_adapters_say_nothing(name: str, shape: tuple[int, ...], expected: bool) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    optimizer = optimizer_factory(OptimizerConfig(weight_decay=0.1))([(name, parameter)])
    assert bool(optimizer.param_groups[0]["weight_decay"]) is expected


def test_a_pattern_that_matches_nothing_is_an_error_that_names_the_rule() -> None:
    named = list(tiny_model().named_parameters())
    with pytest.raises(ConfigError) as caught:
        optimizer_factory(OptimizerConfig(weight_decay=0.1, no_decay=["*Norm*"]))(named)
    for text in ("'*Norm*' matches no parameter", "last component", "such as 'model.layers.0.input_layernorm.weight'"):
        assert text in str(caught.value)
