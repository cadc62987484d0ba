"""Each option of megatron_fsdp acts, on real ranks; where it cannot, it is refused on all of them before any step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright import MeshwrightError, TrainingError, count_tokens
from meshwright.testing import Case, assert_parity, count_collectives, pool
from meshwright.testing.case import share
from meshwright.testing.collectives import measure_collectives
from meshwright.testing.observe import Counting
from meshwright.testing.parity import build_manager, full_weights, train_steps

HSDP = {"dp_replicate_size": 2}
BLOCKS = 3
UNITS = BLOCKS + 1


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"activation_checkpointing": True}, {}),
        ({"activation_checkpointing": "selective", "zero_dp_strategy": 1}, {}),
        ({"overlap_grad_reduce": False, "zero_dp_strategy": 0}, {}),
        ({"overlap_grad_reduce": False, "overlap_param_gather": False, "zero_dp_strategy": 1}, HSDP),
        ({"overlap_param_gather": False, "zero_dp_strategy": 2}, {}),
        ({"average_in_collective": True}, {}),
        ({"gradient_reduce_div_fusion": False}, {}),
        ({"average_in_collective": True, "outer_dp_sharding_strategy": 1}, HSDP),
        ({"fsdp_double_buffer": True}, {}),
        ({"fsdp_double_buffer": True, "outer_dp_sharding_strategy": 1}, HSDP),
        ({"megatron_fsdp_unit_modules": ["LlamaAttention", "LlamaMLP"]}, {}),
        ({"suggested_communication_unit_size": 1}, {}),
        ({"main_params_dtype": "float64", "main_grads_dtype": "float64", "zero_dp_strategy": 2}, {}),
    ],
    ids=str,
)
def test_parity(config: dict[str, Any], sizes: dict[str, int]) -> None:
    case = Case(microbatches=2, sequences=24, tied=True, frozen=("*layers.1.*",), eval_after=True, unshard_after=True)
    assert_parity("megatron_fsdp", case, world_size=4, config=config, sizes=sizes)


# -- what is communicated


def _step(manager: Any, case: Case, index: int = 1) -> Callable[[], Any]:
    batches = share(case, index, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    return lambda: manager.forward_backward(batches, num_tokens=tokens)


def _traffic(config: dict[str, Any], sizes: dict[str, int]) -> Any:
    """What a step communicates in backward and forward, and what its end does."""
    case = Case(microbatches=3, ragged=False)
    manager = build_manager("megatron_fsdp", config, sizes, case)
    train_steps(manager, case, range(1))
    step = measure_collectives(_step(manager, case), {"shard": manager.mesh.group("dp_shard")})
    return step.of(group="shard"), measure_collectives(manager.optimizer_step)


def _counts(config: dict[str, Any], sizes: dict[str, int] | None = None) -> tuple[int, int, int, int]:
    """all-gathers, reduce-scatters and all-reduces of large tensors in forward_backward, and all-gathers of a step."""
    step, end = pool(2).run(_traffic, config, sizes or {})[0]
    large = [each.kind for each in step if each.bytes > 8000]
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    gathers, scatters, reduces = (large.count(kind) for kind in kinds)
    return gathers, scatters, reduces, len(end.of("all_gather"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_dp_strategy": 0}, (0, 0, UNITS, 0)),
        ({"zero_dp_strategy": 1}, (UNITS, UNITS, 0, 0)),
        ({"zero_dp_strategy": 2}, (UNITS, 3 * UNITS, 0, 0)),
        ({"zero_dp_strategy": 2, "overlap_param_gather": False}, (0, 3 * UNITS, 0, UNITS)),
        # Parameters in no unit are kept from the first microbatch on; a unit is gathered for forward and backward.
        ({"zero_dp_strategy": 3}, (1 + 2 * 3 * BLOCKS, 3 * UNITS, 0, 0)),
        ({"data_parallel_sharding_strategy": "optim"}, (UNITS, UNITS, 0, 0)),
    ],
    ids=str,
)
def test_each_stage_gathers_and_reduces_what_it_shards(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert _counts(config) == expected


def _when(config: dict[str, Any]) -> list[int]:
    """Reductions of one microbatch up to the moment at which backward ends."""
    case = Case(ragged=False)
    manager = build_manager("megatron_fsdp", {"zero_dp_strategy": 1, **config}, {}, case)
    batch = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)[0]
    logits = manager.module(input_ids=batch["input_ids"]).logits
    before = count_collectives(lambda: logits.sum().backward())
    after = count_collectives(manager.check_gradients)
    return [before["reduce_scatter"], after["reduce_scatter"]]


@pytest.mark.parametrize(("overlap", "expected"), [(True, [UNITS, 0]), (False, [0, UNITS])])
def test_overlap_grad_reduce_decides_whether_backward_reduces(overlap: bool, expected: list[int]) -> None:
    assert pool(2).run(_when, {"overlap_grad_reduce": overlap}) == [expected] * 2


def _dtypes(config: dict[str, Any], dtype: str) -> dict[str, set[str]]:
    case = Case(dtype=dtype)
    manager = build_manager("megatron_fsdp", config, {}, case)
    train_steps(manager, case, range(1))
    step = measure_collectives(_step(manager, case))
    gradients = [each for each in step.of("reduce_scatter") if each.bytes > 4000]
    return {
        "sent": {str(each.dtype) for each in gradients},
        "trained": {str(p.dtype) for p in manager.trainable()},
        "model": {str(p.dtype) for p in manager._fsdp.raw_param.values()},
        "sums": {str(g.main_grad_buffer.dtype) for g in manager._fsdp.param_and_grad_buffer.parameter_groups},
    }


@pytest.mark.parametrize(
    ("config", "sent", "trained", "sums"),
    [
        ({}, "bfloat16", "bfloat16", "bfloat16"),
        ({"grad_reduce_in_fp32": True}, "float32", "bfloat16", "float32"),
        ({"preserve_fp32_weights": True}, "bfloat16", "float32", "bfloat16"),
        ({"main_params_dtype": "float32", "main_grads_dtype": "float32"}, "float32", "float32", "float32"),
        ({"grad_reduce_in_fp32": True, "grad_comm_dtype": "bfloat16"}, "bfloat16", "bfloat16", "float32"),
        ({"reduce_dtype": "float64"}, "float64", "bfloat16", "float64"),
    ],
    ids=str,
)
def test_dtypes_of_weights_sums_and_messages(config: dict[str, Any], sent: str, trained: str, sums: str) -> None:
    for found in pool(2).run(_dtypes, config, "bfloat16"):
        assert found == {
            "sent": {f"torch.{sent}"},
            "trained": {f"torch.{trained}"},
            "model": {"torch.bfloat16"},
            "sums": {f"torch.{sums}"},
        }


def _layout_of_buffers(config: dict[str, Any]) -> dict[str, Any]:
    manager = build_manager("megatron_fsdp", config, {}, Case())
    fsdp = manager._fsdp
    groups = fsdp.param_and_grad_buffer.parameter_groups
    return {
        "units": len({group.fsdp_unit_id for group in groups} - {None}),
        "bucket": fsdp.bucket_size,
        "allocator": type(fsdp.param_and_grad_buffer.weight_alloc).__name__,
        "ahead": fsdp.suggested_AG_prefetch_size,
        "waiting": fsdp.suggested_RS_queue_capacity,
        "divides": fsdp.ddp_config.gradient_reduce_div_fusion,
    }


@pytest.mark.parametrize(
    ("config", "key", "expected"),
    [
        ({}, "units", BLOCKS),
        ({"megatron_fsdp_unit_modules": ["LlamaAttention", "LlamaMLP"]}, "units", 2 * BLOCKS),
        (
            {"megatron_fsdp_unit_modules": ["transformers.models.llama.modeling_llama.LlamaMLP"]},
            "units",
            BLOCKS,
        ),
        ({}, "bucket", 40_000_000),
        ({"disable_bucketing": True}, "bucket", None),
        ({}, "allocator", "StorageResizeBasedBucketAllocator"),
        ({"fsdp_double_buffer": True}, "allocator", "FixedPoolAllocator"),
        ({}, "ahead", 500_000_000),
        ({"suggested_communication_unit_size": 10}, "ahead", 5),
        ({"suggested_communication_unit_size": 10}, "waiting", 10),
        ({}, "divides", True),
        ({"gradient_reduce_div_fusion": False}, "divides", False),
    ],
    ids=str,
)
def test_units_buckets_and_buffers(config: dict[str, Any], key: str, expected: Any) -> None:
    assert [found[key] for found in pool(2).run(_layout_of_buffers, config)] == [expected] * 2


def _averages(config: dict[str, Any]) -> list[bool]:
    """Which operations reduce gradients."""
    import megatron_fsdp.param_and_grad_buffer as module

    seen = []
    original = module.gradient_reduce_preprocessing
    module.gradient_reduce_preprocessing = lambda *args: seen.append(original(*args)) or seen[-1]
    try:
        case = Case()
        train_steps(build_manager("megatron_fsdp", config, {}, case), case, range(1))
    finally:
        module.gradient_reduce_preprocessing = original
    return [op == torch.distributed.ReduceOp.AVG for op in seen]


@pytest.mark.parametrize("average", [False, True])
def test_gradients_are_summed_unless_average_in_collective(average: bool) -> None:
    for ops in pool(2).run(_averages, {"average_in_collective": average}):
        assert len(ops) == UNITS
        assert set(ops) == {average}


@pytest.mark.parametrize("value", [True, False])
def test_calculate_per_token_loss_holds_anyway(value: bool) -> None:
    assert_parity("megatron_fsdp", Case(), world_size=2, config={"calculate_per_token_loss": value})


# -- recomputation


def _operators(mode: Any) -> tuple[int, int]:
    """How often attention and activation functions are computed in a step."""
    case = Case()
    manager = build_manager("megatron_fsdp", {"activation_checkpointing": mode}, {}, case)
    with Counting() as counting:
        _step(manager, case)()
    return counting.counts["aten._scaled_dot_product_flash_attention_for_cpu.default"], counting.counts[
        "aten.silu.default"
    ]


@pytest.mark.parametrize(
    ("mode", "attentions", "activations"),
    [(False, 1, 1), (True, 2, 2), ("full", 2, 2), ("selective", 1, 2)],
)
def test_activation_checkpointing_computes_again_what_its_mode_says(
    mode: Any, attentions: int, activations: int
) -> None:
    assert pool(2).run(_operators, mode) == [(BLOCKS * attentions, BLOCKS * activations)] * 2


# -- gradients that are not finite


def _broken(config: dict[str, Any]) -> tuple[str, bool, float]:
    """The first step's error where one rank's gradients break, and whether training goes on unharmed."""
    case = Case(ragged=False)
    manager = build_manager("megatron_fsdp", config, {}, case)
    before = full_weights(manager)
    is_last = manager.mesh.rank == manager.mesh.world.size - 1
    handles = []
    if is_last:
        norm = manager.model_parts[0].model.norm
        handles.append(norm.register_forward_hook(lambda *a: a[-1] * float("inf")))
    try:
        _step(manager, case, 0)()
        manager.read()
        told = "accepted"
    except TrainingError as error:
        told = str(error)
    for handle in handles:
        handle.remove()
    if told == "accepted":
        return told, False, 0.0
    after = full_weights(manager)
    same = all(torch.equal(before[name], value) for name, value in after.items())
    losses, _, _ = train_steps(manager, case, range(1))
    return told, same, losses[0]


def test_check_for_nan_in_grad_refuses_the_step_on_all_ranks() -> None:
    answers = pool(2).run(_broken, {})
    assert answers[0] == answers[1]
    told, same, loss = answers[0]
    assert "holds a NaN or infinity. Lower the learning rate" in told
    assert same
    assert loss == loss
    assert {told for told, _, _ in pool(2).run(_broken, {"check_for_nan_in_grad": False})} == {"accepted"}


def test_report_nan_in_param_grad_tells_it_on_all_ranks_before_it_spreads() -> None:
    answers = pool(2).run(_broken, {"report_nan_in_param_grad": True, "check_for_nan_in_grad": False})
    assert answers[0] == answers[1]
    assert "on a rank, before it is reduced" in answers[0][0]
    assert answers[0][1]


# -- refusals


def _refusal(config: dict[str, Any], sizes: dict[str, int], dtype: str) -> str:
    try:
        build_manager("megatron_fsdp", config, sizes, Case(dtype=dtype))
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("config", "sizes", "dtype", "told"),
    [
        ({"zero_dp_strategy": 0}, HSDP, "float64", "cannot do so over two axes (dp_replicate=2)"),
        ({"outer_dp_sharding_strategy": 1}, {}, "float64", "dp_replicate, which has one rank"),
        ({"nccl_ub": True}, {}, "float64", "but the mesh is on the CPU. Set nccl_ub=false"),
        ({"nccl_ub": True, "disable_symmetric_registration": True}, {}, "float64", "but the mesh is on the CPU"),
        ({"backend": "mpi"}, {}, "float64", "MeshError: backend='mpi', but the process group uses 'gloo' for cpu"),
        ({"main_params_dtype": "float32"}, {}, "float64", "is coarser than the model's parameters (torch.float64)"),
        ({"main_grads_dtype": "bfloat16"}, {}, "float32", "is coarser than the model's parameters (torch.float32)"),
        ({"reduce_dtype": "float32"}, {}, "float64", "reduce_dtype=float32 is coarser"),
        ({"megatron_fsdp_unit_modules": ["Nothing"]}, {}, "float64", "has no module of that class. Its classes: "),
        ({"init_fsdp_with_meta_device": True}, {}, "float64", "ModelError: init_fsdp_with_meta_device=true, but"),
    ],
    ids=str,
)
def test_what_cannot_act_on_this_mesh_or_model_is_refused_on_all_ranks(
    config: dict[str, Any], sizes: dict[str, int], dtype: str, told: str
) -> None:
    first, second = pool(2).run(_refusal, config, sizes, dtype)
    assert first == second
    assert told in first


def test_the_backend_that_is_used_is_accepted() -> None:
    for backend in ("gloo", "nccl"):
        assert pool(2).run(_refusal, {"backend": backend}, {}, "float64") == ["accepted"] * 2
