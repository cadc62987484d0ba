"""The bucketed engine: parity in every combination, what it reduces and when, unused parameters, loops by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright import Mesh, MeshError, MeshSizes, ModelError, StrategyError, count_tokens, open_world
from meshwright.testing import Case, Cell, assert_parity, conformance, pool
from meshwright.testing.case import share
from meshwright.testing.collectives import measure_collectives
from meshwright.testing.models import tiny_model
from meshwright.testing.parity import build_manager, train_steps
from meshwright_ddp import DDPConfig
from meshwright_ddp.bucketed import BucketedDataParallel
from meshwright_ddp.reduction import Groups, Reduction, Scaling, make_groups

BUCKETED: dict[str, Any] = {"engine": "bucketed"}
OVERLAP = {**BUCKETED, "overlap_grad_reduce": True, "bucket_size": 3000}
ZERO1 = {**BUCKETED, "use_distributed_optimizer": True}
ZERO1_OVERLAP = {**ZERO1, **OVERLAP, "overlap_param_gather": True}
BASE = Case(microbatches=2, sequences=24, tied=True)


def _engine(manager: Any) -> BucketedDataParallel:
    assert isinstance(manager.module, BucketedDataParallel)
    return manager.module


# -- parity


@pytest.mark.parametrize(
    "config",
    [
        BUCKETED,
        OVERLAP,
        {**OVERLAP, "average_in_collective": True},
        {**OVERLAP, "activation_checkpointing": "selective"},
        ZERO1,
        {**ZERO1, "average_in_collective": True},
        {**ZERO1, "num_distributed_optimizer_instances": 2},
        {**ZERO1, "num_distributed_optimizer_instances": 4},
        {**ZERO1, "num_distributed_optimizer_instances": 2, "average_in_collective": True},
        ZERO1_OVERLAP,
        {**ZERO1_OVERLAP, "align_param_gather": True},
        {**ZERO1_OVERLAP, "delay_wgrad_compute": True, "activation_checkpointing": True},
        {**ZERO1_OVERLAP, "reduce_scatter_with_fp32_accumulation": True},
        {**ZERO1_OVERLAP, "pad_buckets_for_high_nccl_busbw": True},
        {**ZERO1_OVERLAP, "param_name_patterns_for_fp32_local_accumulation": ("*norm*", "*mlp*")},
        {**ZERO1_OVERLAP, "activation_checkpointing": True, "reduce_dtype": "float64"},
        {**ZERO1_OVERLAP, "num_distributed_optimizer_instances": 2},
        {**ZERO1_OVERLAP, "bucket_size": None, "num_buckets": 4, "average_in_collective": True},
        {**ZERO1_OVERLAP, "check_for_nan_in_grad": True, "check_for_large_grads": True, "bucket_size": 1},
    ],
    ids=str,
)
def test_parity(config: dict[str, Any]) -> None:
    assert_parity("ddp", BASE, world_size=4, config=config)


@pytest.mark.parametrize("config", [OVERLAP, ZERO1, ZERO1_OVERLAP], ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_parity_on_ranks_that_divide_nothing(config: dict[str, Any], world_size: int) -> None:
    case = Case(eval_after=True, unshard_after=True, frozen=("*layers.1.*", "*embed_tokens*"), norm_type=3.0)
    assert_parity("ddp", case, world_size=world_size, config=config)


@pytest.mark.parametrize("config", [OVERLAP, ZERO1_OVERLAP], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(model_type="routed", route="ranks", steps=4, microbatches=2),
        Case(model_type="routed", route="steps", steps=4),
        Case(model_type="gpt2", tied=True, shares=(1, 2, 3, 6), eval_after=True),
        Case(empty=3, norm_type=float("inf"), max_norm=0.05),
        Case(model_type="mamba2", tied=None),
    ],
    ids=lambda case: f"{case.model_type}-{case.route}-{case.norm_type}",
)
def test_parity_where_parameters_and_tokens_differ_between_ranks(config: dict[str, Any], case: Case) -> None:
    assert_parity("ddp", case, world_size=4, config={**config, "bucket_size": 100})


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("config", [BUCKETED, OVERLAP, ZERO1, ZERO1_OVERLAP], ids=str)
def test_parity_sweep(config: dict[str, Any], world_size: int, microbatches: int, average: bool) -> None:
    case = Case(microbatches=microbatches, sequences=24, tied=True, eval_after=True)
    assert_parity("ddp", case, world_size=world_size, config={**config, "average_in_collective": average})


@pytest.mark.parametrize("cell", conformance("ddp", config=ZERO1_OVERLAP), ids=str)
def test_conformance_of_the_distributed_optimizer(cell: Cell) -> None:
    cell.check()


# -- the collective of a bucket


def _reduced(instances: int, scatter: bool, scaling: Scaling, force: bool) -> list[float]:
    """Index 0 of a buffer of ones on each rank, after the reduction, and whether what this rank owns is one value."""
    world = open_world("cpu")
    mesh = Mesh(MeshSizes(dp_size=world.size).resolve(world.size, frozenset({"dp_replicate"})), world)
    groups = make_groups(mesh, instances)
    gradients = torch.ones(4 * 32)
    reduction = Reduction(gradients, groups, scaling, scatter=scatter)
    reduction.start(force_all_reduce=force)
    reduction.wait()
    size = gradients.numel() // groups.size
    own = gradients[groups.rank * size : (groups.rank + 1) * size]
    return [float(gradients[0]), float(own.min()), float(own.max()), float(gradients.min())]


MEAN = Scaling(0.25)
AVERAGE = Scaling(1.0, average=True)


@pytest.mark.parametrize(
    ("instances", "scatter", "scaling", "force", "first"),
    [
        (1, False, MEAN, False, [1, 1, 1, 1]),
        (1, False, AVERAGE, False, [1, 1, 1, 1]),
        (1, True, MEAN, False, [1, 0.25, 0.25, 0.25]),
        (1, True, AVERAGE, False, [1, 1, 1, 1]),
        (2, True, MEAN, False, [1, 0.25, 1, 0.25]),
        (2, True, AVERAGE, False, [1, 1, 1, 1]),
        (1, True, MEAN, True, [1, 1, 1, 1]),
        (2, True, MEAN, True, [1, 1, 1, 1]),
        (1, True, Scaling(), False, [4, 1, 1, 1]),
    ],
)
def test_what_each_rank_holds_after_the_reduction(
    instances: int, scatter: bool, scaling: Scaling, force: bool, first: list[float]
) -> None:
    results = pool(4).run(_reduced, instances, scatter, scaling, force)
    assert [result[0] for result in results] == first
    # What a rank owns is reduced over all ranks; the rest keeps its scaled local values.
    assert {(low, high) for _, low, high, _ in results} == {(first[0], first[0])}
    if force:
        assert {lowest for *_, lowest in results} == {1.0}


def _fp32_accumulated() -> tuple[int, int]:
    """Elements of a bf16 reduce-scatter that differ from a float32 one, accumulated in float32 and not."""
    world = open_world("cpu")
    torch.manual_seed(world.rank)
    local = torch.randn(100_000).bfloat16()
    groups = Groups(dist.group.WORLD)
    found = []
    for dtype, wide in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        gradients = local.to(dtype, copy=True)
        reduction = Reduction(gradients, groups, Scaling(), scatter=True, wide=wide)
        reduction.start()
        reduction.wait()
        size = gradients.numel() // world.size
        found.append(gradients[world.rank * size : (world.rank + 1) * size].bfloat16())
    return int((found[1] != found[0]).sum()), int((found[2] != found[0]).sum())


def test_fp32_accumulation_sums_bf16_gradients_as_float32_would() -> None:
    for accumulated, plain in pool(4).run(_fp32_accumulated):
        assert accumulated == 0
        assert plain > 1000


# -- a loop by hand


class _Ten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(100, 100) for _ in range(10))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden


def _ten(**options: Any) -> tuple[nn.Module, BucketedDataParallel]:
    world = open_world("cpu")
    mesh = Mesh(MeshSizes(dp_size=world.size).resolve(world.size, frozenset({"dp_replicate"})), world)
    model = _Ten()
    return model, BucketedDataParallel(model, DDPConfig(**{**BUCKETED, **options}), mesh)


def _by_hand(config: dict[str, Any]) -> list[Any]:
    """Two steps of two microbatches; the gradients of the second, and the error of finishing too early."""
    model, engine = _ten(overlap_grad_reduce=True, **config)
    rank = dist.get_rank()
    for step in range(3):
        data = torch.randn(8, 100, generator=torch.Generator().manual_seed(10 * step + rank))
        with engine.no_sync():
            engine(data[:4]).sum().backward()
        last = engine(data[4:]).sum()
        last.backward()
        engine.finish_grad_sync()
        engine.finish_grad_sync()  # idempotent
        gradients = [p.grad.clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
    # All but the first layer's weight: its bias and the others are ready.
    model.layers[0].weight.requires_grad_(False)
    engine(data).sum().backward()
    try:
        engine.finish_grad_sync()
    except StrategyError as error:
        return [gradients, str(error)]
    return [gradients, "accepted"]


@pytest.mark.parametrize("config", [{}, {"delay_wgrad_compute": True}], ids=str)
def test_gradients_of_a_loop_by_hand_are_sums_and_finishing_too_early_is_an_error_on_all_ranks(
    config: dict[str, Any],
) -> None:
    results = pool(4).run(_by_hand, config)
    model = _Ten()
    for rank in range(4):
        data = torch.randn(8, 100, generator=torch.Generator().manual_seed(20 + rank))
        model(data).sum().backward()
    for gradients, text in results:
        for found, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5)
        assert "19 of 20 parameters have their gradient" in text
    assert len({text for _, text in results}) == 1


def _finished_within_no_sync() -> str:
    _model, engine = _ten(overlap_grad_reduce=True)
    engine(torch.ones(1, 100)).sum().backward()
    engine.finish_grad_sync()
    with engine.no_sync():
        engine(torch.ones(1, 100)).sum().backward()
    try:
        engine.finish_grad_sync()
    except StrategyError as error:
        return str(error)
    return "accepted"


def test_gradients_within_no_sync_do_not_count_as_ready() -> None:
    assert all("0 of 20 parameters" in text for text in pool(2).run(_finished_within_no_sync))


def _forced() -> list[bool]:
    _model, engine = _ten(use_distributed_optimizer=True)
    engine(torch.ones(1, 100)).sum().backward()
    local = engine.buffers[0].gradients.clone()
    engine.finish_grad_sync(force_all_reduce=True)
    return [bool(torch.equal(engine.buffers[0].gradients, 2 * local))]


def test_force_all_reduce_reduces_all_of_a_bucket_to_every_rank() -> None:
    assert pool(2).run(_forced) == [[True], [True]]


# -- when and how much is communicated


def _order(config: dict[str, Any]) -> list[str]:
    """Collectives, and where blocks begin forward and end backward, of the second step, in order of time."""
    case = Case()
    manager = build_manager("ddp", config, {}, case)
    train_steps(manager, case, range(1))
    batches = share(case, 1, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    blocks = [manager.model_parts[0].get_submodule(name) for name in manager.layout.blocks]
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, index=index: _mark(f"forward {index}"))
        block.register_full_backward_hook(lambda *_, index=index: _mark(f"backward {index}"))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        manager.forward_backward(batches, num_tokens=tokens)
    found = [
        (event.time_range.start, event.name.removeprefix("c10d::"))
        for event in recorded.events()
        if event.name.startswith(("c10d::", "forward ", "backward "))
    ]
    return [name.strip("_") for _, name in sorted(found)]


def _mark(name: str) -> None:
    with record_function(name):
        pass


def _first(names: list[str], start: str) -> int:
    return next(index for index, name in enumerate(names) if name.startswith(start))


def test_overlapped_reductions_begin_before_backward_has_ended_and_gathers_run_through_forward() -> None:
    for names in pool(2).run(_order, ZERO1_OVERLAP):
        reductions = [index for index, name in enumerate(names) if name.startswith("reduce_scatter")]
        ends = [names.index(f"backward {block}") for block in (2, 1, 0)]
        assert reductions[0] < ends[0] < ends[1] < ends[2]
        assert any(ends[0] < index < ends[1] for index in reductions)
        assert any(ends[1] < index < ends[2] for index in reductions)
        gathers = [index for index, name in enumerate(names) if name.startswith("allgather")]
        forwards = [names.index(f"forward {block}") for block in (0, 1, 2)]
        assert gathers[0] < forwards[0]
        assert any(forwards[0] < index < forwards[1] for index in gathers)
        assert any(forwards[1] < index < forwards[2] for index in gathers)


def test_without_overlap_all_reductions_follow_backward() -> None:
    for names in pool(2).run(_order, BUCKETED):
        after = names[names.index("backward 0") :]
        assert sum(name.startswith("allreduce") for name in names) == sum(n.startswith("allreduce") for n in after) > 1


def test_aligned_gathers_all_begin_with_forward() -> None:
    for names in pool(2).run(_order, {**ZERO1_OVERLAP, "align_param_gather": True}):
        gathers = [index for index, name in enumerate(names) if name.startswith("allgather")]
        assert len(gathers) > 5
        assert max(gathers) < names.index("forward 0")


def _arrivals(config: dict[str, Any], sizes: dict[str, int]) -> list[str]:
    """Forwards, and gradients of the lowest block's last weight and first norm, in the second step, in order."""
    case = Case(microbatches=2, layers=5)
    manager = build_manager("ddp", config, sizes, case)
    train_steps(manager, case, range(1))
    part = manager.model_parts[0]
    block = next(layer for layer in part.model.layers if any(True for _ in layer.parameters()))
    seen: list[str] = []
    part.register_forward_pre_hook(lambda *_: seen.append("forward"))
    for name, weight in (("weight", block.mlp.down_proj.weight), ("norm", block.input_layernorm.weight)):
        # torch also calls it where there is no gradient.
        weight.register_hook(lambda grad, name=name: seen.append(name) if grad is not None else None)
    train_steps(manager, case, range(1, 2))
    return seen


@pytest.mark.parametrize("config", [OVERLAP, {**BUCKETED, "activation_checkpointing": True}], ids=str)
def test_delayed_gradients_of_weights_follow_the_backward_of_their_microbatch(config: dict[str, Any]) -> None:
    delayed = {**config, "delay_wgrad_compute": True}
    assert pool(2).run(_arrivals, config, {}) == [["forward", "weight", "norm"] * 2] * 2
    assert pool(2).run(_arrivals, delayed, {}) == [["forward", "norm", "weight"] * 2] * 2


def test_delayed_gradients_of_weights_follow_each_backward_of_a_pipeline() -> None:
    first, last = pool(2).run(_arrivals, {**BUCKETED, "delay_wgrad_compute": True}, {"pp_size": 2})
    for seen in (first, last):
        gradients = [each for each in seen if each != "forward"]
        assert gradients == ["norm", "weight"] * (len(gradients) // 2)
        assert len(gradients) > 2


def _gathers_of_a_stage(config: dict[str, Any]) -> list[str]:
    """Gathers, and what other stages send, in the second step of a stage of a pipeline, in order of time."""
    case = Case(layers=5)
    manager = build_manager("ddp", config, {"pp_size": 2}, case)
    train_steps(manager, case, range(1))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        train_steps(manager, case, range(1, 2))
    names = {"c10d::_allgather_base_": "gather", "c10d::recv_": "receive"}
    found = [(event.time_range.start, names[event.name]) for event in recorded.events() if event.name in names]
    names_in_order = [name for _, name in sorted(found)]
    # First come the messages that count the step's tokens and agree on it, in two rounds each.
    if names_in_order[:4] != ["receive"] * 4:
        raise AssertionError(f"the step does not begin with two messages: {names_in_order}")
    return names_in_order[4:]


def test_aligned_gathers_of_a_stage_do_not_wait_for_its_first_microbatch() -> None:
    plain = pool(4).run(_gathers_of_a_stage, ZERO1_OVERLAP)
    aligned = pool(4).run(_gathers_of_a_stage, {**ZERO1_OVERLAP, "align_param_gather": True})
    last = slice(2, 4)
    for before, after in zip(plain[last], aligned[last], strict=True):
        assert before.count("gather") == after.count("gather") > 2
        assert before.index("receive") == 0
        assert after.index("receive") == after.count("gather")


def _traffic(config: dict[str, Any], microbatches: int) -> dict[str, tuple[int, int]]:
    case = Case(microbatches=microbatches)
    manager = build_manager("ddp", config, {}, case)
    train_steps(manager, case, range(1))
    traffic = measure_collectives(lambda: train_steps(manager, case, range(1, 2)))
    large = [each for each in traffic if each.bytes > 1000]
    return {
        kind: (len(sizes), sum(sizes))
        for kind in sorted({each.kind for each in large})
        for sizes in [[each.bytes for each in large if each.kind == kind]]
    }


def _ways(config: dict[str, Any]) -> tuple[list[str], set[str]]:
    """By which collectives buckets travel, and what these do with gradients."""
    manager = build_manager("ddp", config, {}, Case(dtype="bfloat16"))
    traffic = measure_collectives(lambda: train_steps(manager, Case(), range(1)))
    kinds = sorted({each.kind for each in traffic if each.bytes > 1000})
    return kinds, {"average" if bucket.reduction._scaling.average else "sum" for bucket in _engine(manager).buckets}


@pytest.mark.parametrize(
    ("config", "kinds", "does"),
    [
        (BUCKETED, ["all_reduce"], "sum"),
        ({**BUCKETED, "average_in_collective": True}, ["all_reduce"], "average"),
        (ZERO1, ["all_gather", "reduce_scatter"], "sum"),
        ({**ZERO1, "reduce_scatter_with_fp32_accumulation": True}, ["all_gather", "all_to_all"], "sum"),
    ],
    ids=str,
)
def test_buckets_travel_by_the_collective_that_the_options_say(
    config: dict[str, Any], kinds: list[str], does: str
) -> None:
    assert pool(2).run(_ways, config) == [(kinds, {does})] * 2


NUMEL = sum(p.numel() for p in tiny_model().parameters())


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_step_moves_every_gradient_once_and_every_parameter_once(microbatches: int) -> None:
    (plain, zero1, overlapped) = [
        pool(2).run(_traffic, config, microbatches)[0] for config in (BUCKETED, ZERO1, ZERO1_OVERLAP)
    ]
    assert plain == {"all_reduce": (1, 8 * NUMEL)}
    # A ring sends twice as much for an all-reduce as for either of these.
    assert set(zero1) == {"reduce_scatter", "all_gather"}
    assert zero1["reduce_scatter"] == zero1["all_gather"]
    calls, size = zero1["reduce_scatter"]
    assert calls == 1
    assert 8 * NUMEL <= size < 1.05 * 8 * NUMEL
    assert overlapped["reduce_scatter"] == overlapped["all_gather"]
    assert overlapped["reduce_scatter"][0] > 5


def _bucket_count(config: dict[str, Any]) -> list[int]:
    manager = build_manager("ddp", config, {}, Case())
    return [len(_engine(manager).buffers), *(bucket.reduction.gradients.numel() for bucket in _engine(manager).buckets)]


def test_buckets_are_as_large_as_asked_for() -> None:
    assert pool(1).run(_bucket_count, BUCKETED) == [[1, NUMEL]]
    assert pool(1).run(_bucket_count, {**OVERLAP, "bucket_size": None}) == [[1, NUMEL]]
    (sizes,) = pool(1).run(_bucket_count, OVERLAP)
    assert sum(sizes[1:]) == NUMEL
    assert len(sizes) > 6
    assert all(size >= 3000 for size in sizes[1:-1])
    (four,) = pool(1).run(_bucket_count, {**OVERLAP, "bucket_size": None, "num_buckets": 4})
    assert 2 <= len(four) - 1 <= 4
    (padded,) = pool(1).run(_bucket_count, {**ZERO1, **OVERLAP, "pad_buckets_for_high_nccl_busbw": True})
    assert all(size % 2**16 == 0 for size in padded[1:])


# -- refusals that need a model or a mesh


def _refusal(config: dict[str, Any], dtype: str = "float64") -> str:
    try:
        build_manager("ddp", config, {}, Case(dtype=dtype))
    except (MeshError, ModelError, StrategyError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**ZERO1, "num_distributed_optimizer_instances": 3}, "MeshError: num_distributed_optimizer_instances=3 does"),
        ({**BUCKETED, "grad_reduce_in_fp32": True}, "ModelError: grad_reduce_in_fp32=true is coarser"),
        ({**BUCKETED, "reduce_dtype": "float32"}, "ModelError: reduce_dtype=float32 is coarser"),
        ({**OVERLAP, "bucket_size": None, "num_buckets": 10**9}, "ModelError: num_buckets=1000000000, but the model"),
        ({**BUCKETED, "backend": "mpi"}, "MeshError: backend='mpi', but the process group uses 'gloo' for cpu"),
        ({**BUCKETED, "backend": "nccl"}, "accepted"),
        ({**BUCKETED, "backend": "gloo"}, "accepted"),
    ],
)
def test_what_cannot_act_on_this_mesh_or_model_is_refused_on_all_ranks(config: dict[str, Any], text: str) -> None:
    answers = pool(2).run(_refusal, config)
    assert len(set(answers)) == 1
    assert answers[0].startswith(text)


# -- activations


def _forwards(config: dict[str, Any]) -> int:
    """How often the last block's MLP begins in a step of one microbatch; recomputation may stop within it."""
    manager = build_manager("ddp", config, {}, Case())
    calls = []
    manager.model_parts[0].get_submodule("model.layers.2.mlp").register_forward_pre_hook(lambda *_: calls.append(1))
    train_steps(manager, Case(), range(1))
    return len(calls)


@pytest.mark.parametrize("engine", ["torch", "bucketed"])
def test_activations_are_computed_again(engine: str) -> None:
    assert pool(1).run(_forwards, {"engine": engine}) == [1]
    for mode in (True, "full", "selective"):
        assert pool(1).run(_forwards, {"engine": engine, "activation_checkpointing": mode}) == [2]
