"""megatron_fsdp with tensor and sequence parallelism: what a rank holds, parity, precision, whole weights, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import PrepareModuleOutput

from meshwright import MeshwrightError, OptimizerConfig
from meshwright.testing import Case, assert_parity, pool
from meshwright.testing.cells import Cell
from meshwright.testing.collectives import measure_collectives
from meshwright.testing.models import tiny_model
from meshwright.testing.parity import build_manager, train_steps, training_step, unshard_between_steps

TP2 = {"tp_size": 2}
WHOLE = Replicate()
HSDP = {"tp_size": 2, "dp_replicate_size": 2}
SP = {"sequence_parallel": True}
HARD = Case(tied=True, microbatches=2, sequences=24, eval_after=True, unshard_after=True)
STAGES = [{"zero_dp_strategy": stage} for stage in range(4)]
PACKED = {
    "model.layers.*.mlp.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


def _held() -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each parameter, what this rank of `tp` shares with its data-parallel group, and the whole."""
    manager = build_manager("megatron_fsdp", {}, TP2, Case())
    return {
        name: (tuple(p.shape), tuple(manager.parts.shape(p, p)))
        for name, p in manager.model_parts[0].named_parameters()
    }


def test_each_rank_of_tp_trains_its_parts_and_no_more() -> None:
    whole = {name: tuple(p.shape) for name, p in tiny_model().named_parameters()}
    for rank, found in enumerate(pool(4).run(_held)):
        assert {name: shape for name, (_, shape) in found.items()} == whole
        part = {name.removeprefix("model.layers.0."): shape for name, (shape, _) in found.items()}
        assert part["model.embed_tokens.weight"] == ((66, 65)[rank % 2], 36)
        assert part["mlp.down_proj.weight"] == (36, 26)
        assert part["input_layernorm.weight"] == (36,)


@pytest.mark.parametrize("config", [SP | stage for stage in STAGES], ids=str)
def test_parity_of_every_stage_with_the_sequence_sharded(config: dict[str, Any]) -> None:
    """Tied, accumulating; a part of the vocabulary that two ranks do not divide, so that shards differ along tp."""
    assert_parity("megatron_fsdp", HARD, world_size=4, config=config, sizes=TP2)


@pytest.mark.parametrize("stage", STAGES, ids=str)
def test_parity_without_data_parallel_ranks(stage: dict[str, Any]) -> None:
    assert_parity("megatron_fsdp", Case(norm_type=1.0, max_norm=5.0), world_size=2, config=stage, sizes=TP2)


@pytest.mark.parametrize(
    ("config", "sizes", "case"),
    [
        ({}, TP2, HARD),
        (SP | {"activation_checkpointing": "full"}, TP2, HARD),
        (SP | {"activation_checkpointing": "selective"}, TP2, HARD),
        (SP | {"megatron_fsdp_unit_modules": ["LlamaMLP"]}, TP2, Case(microbatches=2)),
        (SP | {"fsdp_double_buffer": True}, TP2, Case(microbatches=2)),
        (SP, TP2, Case(frozen=("*embed*", "*layers.1.*"))),
        (SP, TP2, Case(frozen=("*proj*", "*embed*", "lm_head*"))),
        ({}, TP2, Case(model_type="routed", route="ranks")),
        ({}, TP2, Case(optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, options={"fused": True}))),
        ({"zero_dp_strategy": 1, "average_in_collective": True}, TP2, Case(microbatches=4, sequences=48)),
        ({"outer_dp_sharding_strategy": 1}, HSDP, HARD),
        ({"zero_dp_strategy": 2}, HSDP, Case()),
    ],
    ids=str,
)
def test_parity(config: dict[str, Any], sizes: dict[str, int], case: Case) -> None:
    assert_parity("megatron_fsdp", case, world_size=4, config=config, sizes=sizes)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, {"cp_size": 4}),
        ({"zero_dp_strategy": 1, "cp_attention": "ulysses"}, {"cp_size": 2}),
        ({"zero_dp_strategy": 2, "average_in_collective": True}, {"cp_size": 2}),
        ({"outer_dp_sharding_strategy": 1}, {"cp_size": 2, "dp_replicate_size": 2}),
        (SP | {"activation_checkpointing": "full"}, {"cp_size": 2, "tp_size": 2}),
    ],
    ids=str,
)
def test_parity_with_context_parallelism(config: dict[str, Any], sizes: dict[str, int]) -> None:
    assert_parity("megatron_fsdp", HARD, world_size=4, config=config, sizes=sizes)


@pytest.mark.parametrize("config", [{}, SP], ids=["tp", "sp"])
def test_heads_that_ranks_share(config: dict[str, Any]) -> None:
    """2 key and value heads for 4 ranks."""
    assert_parity("megatron_fsdp", HARD, world_size=4, config=config, sizes={"tp_size": 4})


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        pytest.param("mixtral", {}, id="experts"),
        pytest.param("llama4_text", {}, id="packed-experts"),
        pytest.param("gpt2", {}, id="conv1d"),
        pytest.param("apertus", SP, id="activation-with-parameter"),
        pytest.param("phi3", {"tp_plan": PACKED}, id="packed"),
    ],
)
def test_models(model_type: str, config: dict[str, Any]) -> None:
    case = Case(model_type=model_type, tied=None, microbatches=2, sequences=8)
    assert_parity("megatron_fsdp", case, world_size=4, config=config, sizes=TP2)


@pytest.mark.parametrize("config", [{}, SP, {"zero_dp_strategy": 1}, {"outer_dp_sharding_strategy": 1}], ids=str)
def test_eight_ranks(config: dict[str, Any]) -> None:
    case = Case(microbatches=2, sequences=16, tied=True)
    assert_parity("megatron_fsdp", case, world_size=8, config=config, sizes=HSDP)


@pytest.mark.parametrize("config", [{}, {"zero_dp_strategy": 0}], ids=str)
def test_state_moves_to_single_and_back(config: dict[str, Any]) -> None:
    case = Case(model_type="phi3", tied=None, steps=4)
    config = config | {"tp_plan": PACKED}
    Cell("megatron_fsdp", "", 4, TP2, "state", case, config, kind="state").check()


# -- communication


def _traffic(config: dict[str, Any]) -> dict[str, int]:
    """Bytes that a step gathers and reduces over dp_shard, parameters and gradients alone."""
    case = Case(ragged=False)
    sizes = TP2 if torch.distributed.get_world_size() == 4 else {}
    manager = build_manager("megatron_fsdp", config, sizes, case)
    train_steps(manager, case, range(1))
    groups = {"shard": manager.mesh.group("dp_shard"), "tp": manager.mesh.group("tp")}
    seen = measure_collectives(training_step(manager, case, 1), groups).of(group="shard")
    return {kind: seen.of(kind).bytes for kind in ("all_gather", "reduce_scatter")}


def test_what_is_sharded_along_tp_is_not_sent_along_dp() -> None:
    (alone, *_), (parts, *_) = pool(2).run(_traffic, {}), pool(4).run(_traffic, {})
    for kind, size in alone.items():
        # Norms are whole on every rank, and buckets are padded.
        assert size / 2 < parts[kind] < size * 0.56


def _along(axis: str, config: dict[str, Any]) -> tuple[int, int, list[str]]:
    """Reductions and exchanges of a step along an axis of two ranks, and the weights of a block that it divides."""
    case = Case(ragged=False)
    manager = build_manager("megatron_fsdp", config, {f"{axis}_size": 2}, case)
    train_steps(manager, case, range(1))
    seen = measure_collectives(training_step(manager, case, 1), {axis: manager.mesh.group(axis)}).of(group=axis)
    parallel = manager.tensor_parallel
    divided = {name for name, each in parallel.divisions.items() if each.is_sharded} if parallel else set()
    inside = sorted({name.split(".")[-2] for name in divided if ".layers.0." in name})
    return len(seen.of("reduce_scatter")), len(seen.of("all_to_all")), inside


ALL = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@pytest.mark.parametrize(
    ("axis", "config", "expected"),
    [
        ("tp", {}, (0, 0, ALL)),
        # Into and out of attention and the feed-forward of each of three blocks, in forward and backward.
        ("tp", SP, (12, 0, ALL)),
        ("tp", {"tp_plan": {"model.layers.*.mlp.up_proj": "colwise_gather_output"}}, (0, 0, ["up_proj"])),
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


def test_bf16_with_float32_weights_follows_one_rank_of_the_same_precision() -> None:
    case = Case(dtype="bfloat16", ragged=False)
    config = {"preserve_fp32_weights": True, "grad_reduce_in_fp32": True}
    alone, _ = pool(1).run(_bf16, config, {}, case)[0]
    for losses, trained in pool(4).run(_bf16, config | SP, TP2, case):
        assert trained == {"torch.float32"}
        assert losses == pytest.approx(alone, rel=5e-3)


# -- whole weights


@pytest.mark.parametrize("config", [{}, SP | {"zero_dp_strategy": 1}], ids=str)
def test_unshard_gives_a_plain_model_and_changes_nothing(config: dict[str, Any]) -> None:
    for plain, apart, same, is_same in pool(4).run(unshard_between_steps, "megatron_fsdp", config, TP2, Case()):
        assert plain
        assert apart < 1e-12
        assert same
        assert is_same


# -- refusals


def _refusal(config: dict[str, Any], sizes: dict[str, int], case: Case, steps: int) -> str:
    try:
        manager = build_manager("megatron_fsdp", config, sizes, case)
        train_steps(manager, case, range(steps))
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("config", "sizes", "model_type", "told"),
    [
        ({"tp_plan": {"lm_hed": "colwise"}}, TP2, "llama", "ConfigError: tp_plan names 'lm_hed'"),
        (
            {"tp_plan": {"model.norm": PrepareModuleOutput(output_layouts=WHOLE, desired_output_layouts=WHOLE)}},
            TP2,
            "llama",
            "ConfigError: tp_plan gives model.norm the style PrepareModuleOutput of torch, which makes DTensors",
        ),
        # A parameter of the activation function that meets this rank's features only.
        (
            {"tp_plan": {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
             | {"model.layers.*.mlp.act_fn": "replicate"}},
            TP2,
            "apertus",
            "StrategyError: the tensor-parallel plan replicates model.layers.0.mlp.act_fn",
        ),
    ],
    ids=["name", "torch", "unsummed"],
)  # fmt: skip
def test_what_is_refused_on_all_ranks(
    config: dict[str, Any], sizes: dict[str, int], model_type: str, told: str
) -> None:
    answers = pool(4).run(_refusal, config, sizes, Case(model_type=model_type, tied=None), 1)
    assert len(set(answers)) == 1
    assert told in answers[0]
