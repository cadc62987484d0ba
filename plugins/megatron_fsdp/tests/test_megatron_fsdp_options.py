"""Each option of megatron_fsdp acts, on real ranks; where it cannot, it is refused on all of them before any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.measurements import OperationCounter
from support.steps import build_and_train, catch_refusal, prepare_gradient_step

from meshwright import TrainingError
from meshwright.testing import Case, assert_parity, count_collectives
from meshwright.tracing.collectives import record_collectives
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager, full_weights, train_steps

slow = pytest.mark.slow
HSDP = {"dp_replicate_size": 2}
BLOCKS = 3
UNITS = BLOCKS + 1


@slow
@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"activation_checkpointing": "selective", "zero_dp_strategy": 1, "calculate_per_token_loss": True}, {}),
        ({"overlap_grad_reduce": False, "overlap_param_gather": False, "zero_dp_strategy": 1}, HSDP),
        ({"overlap_param_gather": False, "zero_dp_strategy": 2, "gradient_reduce_div_fusion": False}, {}),
        ({"fsdp_double_buffer": True, "average_in_collective": True}, {}),
        ({"fsdp_double_buffer": True, "outer_dp_sharding_strategy": 1}, HSDP),
        (
            {
                "megatron_fsdp_unit_modules": ["LlamaAttention", "LlamaMLP"],
                "suggested_communication_unit_size": 1,
                "activation_checkpointing": True,
            },
            {},
        ),
        ({"main_params_dtype": "float64", "main_grads_dtype": "float64", "zero_dp_strategy": 2}, {}),
    ],
    ids=str,
)
def test_parity(config: dict[str, Any], sizes: dict[str, int]) -> None:
    case = Case(microbatches=2, sequences=24, tied=True, frozen=("*layers.1.*",), eval_after=True, unshard_after=True)
    assert_parity("megatron_fsdp", case, world_size=4, config=config, sizes=sizes)


# -- what is communicated


def _counts(config: dict[str, Any]) -> tuple[int, ...]:
    """all-gathers, reduce-scatters and all-reduces of large tensors in forward_backward, and all-gathers of a step."""
    case = Case(microbatches=3, ragged=False)
    manager = build_and_train("megatron_fsdp", config, {}, case)
    step = record_collectives(prepare_gradient_step(manager, case, 1), {"shard": manager.mesh.group("dp_shard")})
    end = record_collectives(manager.optimizer_step)
    large = [each.kind for each in step.filter(group="shard") if each.nbytes > 8000]
    return *(large.count(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")), len(
        end.filter("all_gather")
    )


@slow
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"zero_dp_strategy": 0}, (0, 0, UNITS, 0)),
        ({"zero_dp_strategy": 2}, (UNITS, 3 * UNITS, 0, 0)),
        ({"zero_dp_strategy": 2, "overlap_param_gather": False}, (0, 3 * UNITS, 0, UNITS)),
        # Parameters in no unit are kept from the first microbatch on; a unit is gathered for forward and backward.
        ({"zero_dp_strategy": 3}, (1 + 2 * 3 * BLOCKS, 3 * UNITS, 0, 0)),
        ({"data_parallel_sharding_strategy": "optim"}, (UNITS, UNITS, 0, 0)),
    ],
    ids=str,
)
def test_each_stage_gathers_and_reduces_what_it_shards(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert pool(2).run(_counts, config) == [expected] * 2


def _when(config: dict[str, Any]) -> list[int]:
    """Reductions of one microbatch up to the moment at which backward ends."""
    case = Case(ragged=False)
    manager = build_manager("megatron_fsdp", {"zero_dp_strategy": 1, **config}, {}, case)
    batch = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)[0]
    logits = manager.module(input_ids=batch["input_ids"]).logits
    before = count_collectives(lambda: logits.sum().backward())
    after = count_collectives(manager.report_gradients)
    return [before["reduce_scatter"], after["reduce_scatter"]]


@slow
@pytest.mark.parametrize(("overlap", "expected"), [(True, [UNITS, 0]), (False, [0, UNITS])])
def test_overlap_grad_reduce_decides_whether_backward_reduces(overlap: bool, expected: list[int]) -> None:
    assert pool(2).run(_when, {"overlap_grad_reduce": overlap}) == [expected] * 2


def _dtypes(config: dict[str, Any], dtype: str) -> dict[str, set[str]]:
    case = Case(dtype=dtype)
    manager = build_and_train("megatron_fsdp", config, {}, case)
    step = record_collectives(prepare_gradient_step(manager, case, 1))
    gradients = [each for each in step.filter("reduce_scatter") if each.nbytes > 4000]
    return {
        "sent": {str(each.dtype) for each in gradients},
        "trained": {str(p.dtype) for p in manager.iter_trainable()},
        "model": {str(p.dtype) for p in manager._fsdp.raw_param.values()},
        "sums": {str(g.main_grad_buffer.dtype) for g in manager._fsdp.param_and_grad_buffer.parameter_groups},
    }


@slow
@pytest.mark.parametrize(
    ("config", "sent", "trained", "sums"),
    [
        ({}, "bfloat16", "bfloat16", "bfloat16"),
        ({"preserve_fp32_weights": True}, "bfloat16", "float32", "bfloat16"),
        ({"main_params_dtype": "float32", "main_grads_dtype": "float32"}, *["float32"] * 3),
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


def _layout_of_buffers(configs: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Units, size of a bucket, allocator, elements gathered ahead and waiting, and whether reductions divide."""
    found = []
    for config in configs:
        fsdp = build_manager("megatron_fsdp", config, {}, Case())._fsdp
        buffer = fsdp.param_and_grad_buffer
        units = len({group.fsdp_unit_id for group in buffer.parameter_groups} - {None})
        ahead = fsdp.suggested_AG_prefetch_size, fsdp.suggested_RS_queue_capacity
        divides = fsdp.ddp_config.gradient_reduce_div_fusion
        found.append((units, fsdp.bucket_size, type(buffer.weight_alloc).__name__, *ahead, divides))
    return found


@slow
def test_units_buckets_and_buffers() -> None:
    resized, bucket, gib = "StorageResizeBasedBucketAllocator", 40_000_000, 10**9
    path = "transformers.models.llama.modeling_llama.LlamaMLP"
    cases: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({}, (BLOCKS, bucket, resized, gib // 2, gib, True)),
        (
            {"megatron_fsdp_unit_modules": ["LlamaAttention", "LlamaMLP"], "suggested_communication_unit_size": 10},
            (2 * BLOCKS, bucket, resized, 5, 10, True),
        ),
        (
            {"megatron_fsdp_unit_modules": [path], "gradient_reduce_div_fusion": False},
            (BLOCKS, bucket, resized, gib // 2, gib, False),
        ),
        (
            {"disable_bucketing": True, "fsdp_double_buffer": True},
            (BLOCKS, None, "FixedPoolAllocator", gib // 2, gib, True),
        ),
    ]
    found = pool(2).run(_layout_of_buffers, [config for config, _ in cases])
    assert found == [[expected for _, expected in cases]] * 2


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


@slow
@pytest.mark.parametrize("average", [False, True])
def test_gradients_are_summed_unless_average_in_collective(average: bool) -> None:
    for ops in pool(2).run(_averages, {"average_in_collective": average}):
        assert len(ops) == UNITS
        assert set(ops) == {average}


# -- recomputation


def _operators(mode: Any) -> tuple[int, int]:
    """How often attention and activation functions are computed in a step."""
    manager = build_manager("megatron_fsdp", {"activation_checkpointing": mode}, {}, Case())
    with OperationCounter() as counting:
        prepare_gradient_step(manager, Case())()
    attention = counting.counts["aten._scaled_dot_product_flash_attention_for_cpu.default"]
    return attention, counting.counts["aten.silu.default"]


@slow
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
    """The first step's error where one rank's gradients break, and whether training continues unharmed."""
    case = Case(ragged=False)
    manager = build_manager("megatron_fsdp", config, {}, case)
    before = full_weights(manager)
    is_last = manager.mesh.rank == manager.mesh.world.size - 1
    handles = []
    if is_last:
        norm = manager.model_parts[0].model.norm
        handles.append(norm.register_forward_hook(lambda *a: a[-1] * float("inf")))
    try:
        prepare_gradient_step(manager, case)()
        manager.read_scalars()
        reported = "accepted"
    except TrainingError as error:
        reported = str(error)
    for handle in handles:
        handle.remove()
    if reported == "accepted":
        return reported, False, 0.0
    after = full_weights(manager)
    same = all(torch.equal(before[name], value) for name, value in after.items())
    losses, _, _ = train_steps(manager, case, range(1))
    return reported, same, losses[0]


def test_check_for_nan_in_grad_refuses_the_step_on_all_ranks() -> None:
    answers = pool(2).run(_broken, {})
    assert answers[0] == answers[1]
    reported, same, loss = answers[0]
    assert "holds a NaN or infinity. Lower the learning rate" in reported
    assert same
    assert loss == loss
    assert {reported for reported, _, _ in pool(2).run(_broken, {"check_for_nan_in_grad": False})} == {"accepted"}


@slow
def test_report_nan_in_param_grad_tells_it_on_all_ranks_before_it_spreads() -> None:
    answers = pool(2).run(_broken, {"report_nan_in_param_grad": True, "check_for_nan_in_grad": False})
    assert answers[0] == answers[1]
    assert "on a rank, before it is reduced" in answers[0][0]
    assert answers[0][1]


# -- refusals


REFUSED: list[tuple[dict[str, Any], dict[str, int], str, str]] = [
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
    ({"backend": "gloo"}, {}, "float64", "accepted"),
    ({"backend": "nccl"}, {}, "float64", "accepted"),
]


def _refusals() -> list[str]:
    return [catch_refusal("megatron_fsdp", config, sizes, Case(dtype=dtype)) for config, sizes, dtype, _ in REFUSED]


def test_what_cannot_act_on_this_mesh_or_model_is_refused_on_all_ranks() -> None:
    first, second = pool(2).run(_refusals)
    assert first == second
    for found, (*_, reported) in zip(first, REFUSED, strict=True):
        assert reported in found
