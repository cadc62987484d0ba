"""megatron_fsdp with tensor and sequence parallelism: what a rank holds, parity, precision, whole weights, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.steps import build_and_train, catch_refusal
from support.training import prepare_training_step
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import PrepareModuleOutput

from meshwright import OptimizerConfig
from meshwright.testing import Case, assert_parity
from meshwright.tracing.collectives import record_collectives
from meshwright_testing import pool
from meshwright_testing.cells import Cell

TP2 = {"tp_size": 2}
WHOLE = Replicate()
HSDP = {"tp_size": 2, "dp_replicate_size": 2}
SP = {"sequence_parallel": True}
HARD = Case(tied=True, microbatches=2, sequences=24, eval_after=True, unshard_after=True)
slow = pytest.mark.slow
FUSED = OptimizerConfig(lr=1e-2, weight_decay=0.1, options={"fused": True})
PACKED = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}


def _model(model_type: str) -> Case:
    return Case(model_type=model_type, tied=None, microbatches=2, sequences=8)


LAYOUTS: list[tuple[dict[str, int], dict[str, Any], Case]] = [
    # Tied, accumulating; a part of the vocabulary that two ranks do not divide, so that shards differ along tp.
    *((TP2, SP | {"zero_dp_strategy": stage}, HARD) for stage in (0, 1, 2)),
    (TP2, SP | {"activation_checkpointing": "selective"}, HARD),
    (TP2, SP, Case(frozen=("*embed*", "*layers.1.*"), optimizer=FUSED)),
    (TP2, {}, Case(model_type="routed", route="ranks")),
    (TP2, {"zero_dp_strategy": 1, "average_in_collective": True}, Case(microbatches=4, sequences=48)),
    (HSDP, {"outer_dp_sharding_strategy": 1}, HARD),
    # 2 key and value heads for 4 ranks.
    ({"tp_size": 4}, SP, HARD),
    ({"cp_size": 2}, {"zero_dp_strategy": 1, "cp_attention": "ulysses"}, HARD),
    ({"cp_size": 2, "tp_size": 2}, SP | {"activation_checkpointing": "full"}, HARD),
    # Experts, packed experts, an activation function with a parameter, and packed layers.
    (TP2, {}, _model("llama4_text")),
    (TP2, SP, _model("apertus")),
    (TP2, {"tp_plan": PACKED}, _model("phi3")),
]


@pytest.mark.parametrize(
    ("ranks", "sizes", "config", "case"),
    [
        pytest.param(2, TP2, SP | {"activation_checkpointing": "full"}, HARD, id="positions-divided"),
        pytest.param(2, {"cp_size": 2}, {"zero_dp_strategy": 2, "average_in_collective": True}, HARD, marks=slow),
        *(pytest.param(4, *each, marks=slow) for each in LAYOUTS),
        pytest.param(8, HSDP, SP, Case(microbatches=2, sequences=16, tied=True), marks=slow),
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
    manager = build_and_train("megatron_fsdp", config, sizes, case)
    groups = {"shard": manager.mesh.group("dp_shard"), "tp": manager.mesh.group("tp")}
    seen = record_collectives(prepare_training_step(manager, case, 1), groups).filter(group="shard")
    return {kind: seen.filter(kind).nbytes for kind in ("all_gather", "reduce_scatter")}


@slow
def test_what_is_sharded_along_tp_is_not_sent_along_dp() -> None:
    (alone, *_), (parts, *_) = pool(2).run(_traffic, {}), pool(4).run(_traffic, {})
    for kind, size in alone.items():
        # Norms are whole on every rank, and buckets are padded.
        assert size / 2 < parts[kind] < size * 0.56


def _along(axis: str, config: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Reductions and exchanges of a step along an axis of two ranks, and the weights of a block that it divides."""
    case = Case(ragged=False)
    manager = build_and_train("megatron_fsdp", config, {f"{axis}_size": 2}, case)
    seen = record_collectives(prepare_training_step(manager, case, 1), {axis: manager.mesh.group(axis)}).filter(
        group=axis
    )
    parallel = manager.tensor_parallel
    divided = {name for name, each in parallel.shardings.items() if each.is_sharded} if parallel else set()
    inside = sorted({name.split(".")[-2] for name in divided if ".layers.0." in name})
    return len(seen.filter("reduce_scatter")), len(seen.filter("all_to_all")), inside


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


# -- refusals


MLP = {"up_proj": "colwise", "down_proj": "rowwise", "act_fn": "replicate"}


@pytest.mark.parametrize(
    ("plan", "model_type", "reported"),
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
def test_what_is_refused_on_all_ranks(plan: dict[str, Any], model_type: str, reported: str) -> None:
    case = Case(model_type=model_type, tied=None)
    first, second = pool(2).run(catch_refusal, "megatron_fsdp", {"tp_plan": plan}, TP2, case, 1)
    assert first == second
    assert reported in first
