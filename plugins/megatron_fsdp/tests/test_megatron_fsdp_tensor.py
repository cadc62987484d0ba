"""megatron_fsdp with tensor and sequence parallelism: what a rank holds, parity, precision, whole weights, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.steps import built, refusal
from support.training import training_step, unshard_between_steps
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import PrepareModuleOutput

from meshwright import OptimizerConfig
from meshwright.testing import Case, assert_parity
from meshwright.tracing.collectives import measure_collectives
from meshwright_testing import pool
from meshwright_testing.cells import Cell
from meshwright_testing.models import tiny_model
from meshwright_testing.parity import build_manager, train_steps

TP2 = {"tp_size": 2}
WHOLE = Replicate()
HSDP = {"tp_size": 2, "dp_replicate_size": 2}
SP = {"sequence_parallel": True}
HARD = Case(tied=True, microbatches=2, sequences=24, eval_after=True, unshard_after=True)
slow, zoo = pytest.mark.slow, pytest.mark.zoo
FUSED = OptimizerConfig(lr=1e-2, weight_decay=0.1, options={"fused": True})
PACKED = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}


def _held() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each parameter, what this rank of `tp` shares with its data-parallel group, and the whole."""
    manager = build_manager("megatron_fsdp", {}, TP2, Case())
    return {
        name: (tuple(p.shape), tuple(manager.parts.shape(p, p)))
        for name, p in manager.model_parts[0].named_parameters()
    }


@slow
def test_each_rank_of_tp_trains_its_parts_and_no_more() -> None:
    whole = {name: tuple(p.shape) for name, p in tiny_model().named_parameters()}
    for rank, found in enumerate(pool(2).run(_held)):
        assert {name: shape for name, (_, shape) in found.items()} == whole
        part = {name.removeprefix("model.layers.0."): shape for name, (shape, _) in found.items()}
        assert part["model.embed_tokens.weight"] == ((66, 65)[rank % 2], 36)
        assert part["mlp.down_proj.weight"] == (36, 26)
        assert part["input_layernorm.weight"] == (36,)


def _model(model_type: str) -> Case:
    return Case(model_type=model_type, tied=None, microbatches=2, sequences=8)


LAYOUTS: list[tuple[dict[str, int], dict[str, Any], Case]] = [
    # Tied, accumulating; a part of the vocabulary that two ranks do not divide, so that shards differ along tp.
    *((TP2, SP | {"zero_dp_strategy": stage}, HARD) for stage in (0, 1, 2)),
    (TP2, SP | {"activation_checkpointing": "selective"}, HARD),
    (TP2, SP | {"megatron_fsdp_unit_modules": ["LlamaMLP"], "fsdp_double_buffer": True}, Case(microbatches=2)),
    (TP2, SP, Case(frozen=("*embed*", "*layers.1.*"), optimizer=FUSED)),
    (TP2, SP, Case(frozen=("*proj*", "*embed*", "lm_head*"))),
    (TP2, {}, Case(model_type="routed", route="ranks")),
    (TP2, {"zero_dp_strategy": 1, "average_in_collective": True}, Case(microbatches=4, sequences=48)),
    (HSDP, {"outer_dp_sharding_strategy": 1}, HARD),
    (HSDP, {"zero_dp_strategy": 2}, Case()),
    # 2 key and value heads for 4 ranks.
    ({"tp_size": 4}, SP, HARD),
    ({"cp_size": 4}, {}, HARD),
    ({"cp_size": 2}, {"zero_dp_strategy": 1, "cp_attention": "ulysses"}, HARD),
    ({"cp_size": 2, "dp_replicate_size": 2}, {"outer_dp_sharding_strategy": 1}, HARD),
    ({"cp_size": 2, "tp_size": 2}, SP | {"activation_checkpointing": "full"}, HARD),
    # Experts, packed experts, an activation function with a parameter, and packed layers.
    (TP2, {}, _model("mixtral")),
    (TP2, {}, _model("llama4_text")),
    (TP2, SP, _model("apertus")),
    (TP2, {"tp_plan": PACKED}, _model("phi3")),
]


@pytest.mark.parametrize(
    ("ranks", "sizes", "config", "case"),
    [
        pytest.param(2, TP2, SP | {"activation_checkpointing": "full"}, HARD, id="positions-divided"),
        pytest.param(2, {"cp_size": 2}, {"zero_dp_strategy": 2, "average_in_collective": True}, HARD, marks=slow),
        pytest.param(2, TP2, {}, Case(norm_type=1.0, max_norm=5.0), marks=slow),
        *(pytest.param(4, *each, marks=slow) for each in LAYOUTS),
        pytest.param(8, HSDP, SP, Case(microbatches=2, sequences=16, tied=True), marks=slow),
        pytest.param(4, TP2, {}, _model("gpt2"), marks=zoo),
        *(pytest.param(8, HSDP, {"zero_dp_strategy": stage}, HARD, marks=zoo) for stage in (1, 2, 3)),
    ],
    ids=str,
)
def test_parity(ranks: int, sizes: dict[str, int], config: dict[str, Any], case: Case) -> None:
    assert_parity("megatron_fsdp", case, world_size=ranks, config=config, sizes=sizes)


@slow
def test_state_moves_to_single_and_back() -> None:
    case = Case(model_type="phi3", tied=None, steps=4)
    config = {"zero_dp_strategy": 0, "tp_plan": PACKED}
    Cell("megatron_fsdp", "", 4, TP2, "state", case, config, kind="state").check()


# -- communication


def _traffic(config: dict[str, Any]) -> dict[str, int]:
    """Bytes that a step gathers and reduces over dp_shard, parameters and gradients alone."""
    case = Case(ragged=False)
    sizes = TP2 if torch.distributed.get_world_size() == 4 else {}
    manager = built("megatron_fsdp", config, sizes, case)
    groups = {"shard": manager.mesh.group("dp_shard"), "tp": manager.mesh.group("tp")}
    seen = measure_collectives(training_step(manager, case, 1), groups).of(group="shard")
    return {kind: seen.of(kind).bytes for kind in ("all_gather", "reduce_scatter")}


@slow
def test_what_is_sharded_along_tp_is_not_sent_along_dp() -> None:
    (alone, *_), (parts, *_) = pool(2).run(_traffic, {}), pool(4).run(_traffic, {})
    for kind, size in alone.items():
        # Norms are whole on every rank, and buckets are padded.
        assert size / 2 < parts[kind] < size * 0.56


def _along(axis: str, config: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Reductions and exchanges of a step along an axis of two ranks, and the weights of a block that it divides."""
    case = Case(ragged=False)
    manager = built("megatron_fsdp", config, {f"{axis}_size": 2}, case)
    seen = measure_collectives(training_step(manager, case, 1), {axis: manager.mesh.group(axis)}).of(group=axis)
    parallel = manager.tensor_parallel
    divided = {name for name, each in parallel.divisions.items() if each.is_sharded} if parallel else set()
    inside = sorted({name.split(".")[-2] for name in divided if ".layers.0." in name})
    return len(seen.of("reduce_scatter")), len(seen.of("all_to_all")), inside


GATHERED = {"model.layers.*.mlp.up_proj": "colwise_gather_output"}
ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@slow
@pytest.mark.parametrize(
    ("axis", "config", "expected"),
    [
        ("tp", {}, (0, 0, ALL)),
        # Into and out of attention and the feed-forward of each of three blocks, in forward and backward.
        ("tp", SP, (12, 0, ALL)),
        ("tp", {"tp_plan": GATHERED}, (0, 0, ["up_proj"])),
        # Four units are scattered over these ranks; and keys and values of each block, or else query, key, value and
        # output of each are exchanged, in forward and backward.
        ("cp", {}, (4 + 3, 0, [])),
        ("cp", {"cp_attention": "ulysses"}, (4, 24, [])),
    ],
    ids=str,
)
def test_tensors_and_positions_are_divided_as_the_options_say(axis: str, config: dict[str, Any], expected: Any) -> None:
    assert pool(2).run(_along, axis, config) == [expected] * 2


# -- precision


def _bf16(config: dict[str, Any], sizes: dict[str, int], case: Case) -> tuple[list[float], set[str]]:
    manager = build_manager("megatron_fsdp", config, sizes, case)
    losses, _, _ = train_steps(manager, case, range(case.steps))
    return losses, {str(p.dtype) for p in manager.trainable()}


@slow
def test_bf16_with_float32_weights_follows_one_rank_of_the_same_precision() -> None:
    case = Case(dtype="bfloat16", ragged=False)
    config = {"preserve_fp32_weights": True, "grad_reduce_in_fp32": True}
    alone, _ = pool(1).run(_bf16, config, {}, case)[0]
    for losses, trained in pool(4).run(_bf16, config | SP, TP2, case):
        assert trained == {"torch.float32"}
        assert losses == pytest.approx(alone, rel=5e-3)


# -- whole weights


@slow
@pytest.mark.parametrize("config", [{}, SP | {"zero_dp_strategy": 1}], ids=str)
def test_unshard_gives_a_plain_model_and_changes_nothing(config: dict[str, Any]) -> None:
    for plain, apart, same, is_same in pool(4).run(unshard_between_steps, "megatron_fsdp", config, TP2, Case()):
        assert plain
        assert apart < 1e-12
        assert same
        assert is_same


# -- refusals


MLP = {"up_proj": "colwise", "down_proj": "rowwise", "act_fn": "replicate"}


@pytest.mark.parametrize(
    ("plan", "model_type", "told"),
    [
        ({"lm_hed": "colwise"}, "llama", "ConfigError: tp_plan names 'lm_hed'"),
        (
            {"model.norm": PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=WHOLE)},
            "llama",
            "of torch, which no style of meshwright is equal to",
        ),
        # A parameter of the activation function that meets this rank's features only.
        (
            {f"model.layers.*.mlp.{name}": style for name, style in MLP.items()},
            "apertus",
            "StrategyError: the tensor-parallel plan replicates model.layers.0.mlp.act_fn",
        ),
    ],
    ids=["name", "torch", "unsummed"],
)
def test_what_is_refused_on_all_ranks(plan: dict[str, Any], model_type: str, told: str) -> None:
    case = Case(model_type=model_type, tied=None)
    first, second = pool(2).run(refusal, "megatron_fsdp", {"tp_plan": plan}, TP2, case, 1)
    assert first == second
    assert told in first
