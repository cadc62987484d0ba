"""The bucketed engine: parity, what it reduces and when, checks of gradients, loops by hand, refusals."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.steps import build_and_train, catch_refusal, prepare_gradient_step
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright import Mesh, MeshSizes, StrategyError, TrainingError, open_world
from meshwright.testing import Case, Cell, assert_parity
from meshwright.tracing.collectives import record_collectives
from meshwright_ddp import DDPConfig
from meshwright_ddp.bucketed_ddp import BucketedDataParallel
from meshwright_ddp.collectives import BucketReduction, DataParallelGroups, build_groups
from meshwright_ddp.grad_sync import NUM_REFERENCE_NORMS, GradChecker
from meshwright_testing import conformance, pool
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import build_manager, train_steps

slow = pytest.mark.slow
BUCKETED: dict[str, Any] = {"engine": "bucketed"}
OVERLAP = {**BUCKETED, "overlap_grad_reduce": True, "bucket_size": 3000}
ZERO1 = {**BUCKETED, "use_distributed_optimizer": True}
ZERO1_OVERLAP = {**ZERO1, **OVERLAP, "overlap_param_gather": True}
BASE = Case(microbatches=2, sequences=24, tied=True)


# -- parity


ROUTED = {route: Case(model_type="routed", route=route, steps=4, microbatches=2) for route in ("ranks", "steps")}
UNEVEN = Case(eval_after=True, unshard_after=True, frozen=("*layers.1.*", "*embed_tokens*"), norm_type=3.0)
SMALL = {**ZERO1_OVERLAP, "bucket_size": 100}
LAYOUTS: list[tuple[int, dict[str, Any], Case]] = [
    (4, {**OVERLAP, "average_in_collective": True, "activation_checkpointing": "selective"}, BASE),
    (
        4,
        {
            **ZERO1_OVERLAP,
            "align_param_gather": True,
            "pad_buckets_for_high_nccl_busbw": True,
            "param_name_patterns_for_fp32_local_accumulation": ("*norm*", "*mlp*"),
        },
        BASE,
    ),
    (4, {**ZERO1_OVERLAP, "reduce_scatter_with_fp32_accumulation": True}, BASE),
    (4, {**ZERO1_OVERLAP, "num_distributed_optimizer_instances": 2}, BASE),
    (4, {**ZERO1_OVERLAP, "check_for_nan_in_grad": True, "check_for_large_grads": True, "bucket_size": 1}, BASE),
    # Ranks that divide nothing.
    *((3, config, UNEVEN) for config in (OVERLAP, ZERO1_OVERLAP)),
    # Parameters and tokens that differ between ranks.
    (4, {**OVERLAP, "bucket_size": 100}, ROUTED["ranks"]),
    (4, SMALL, ROUTED["steps"]),
    (4, SMALL, Case(model_type="gpt2", tied=True, shares=(1, 2, 3, 6), eval_after=True)),
    (4, SMALL, Case(num_masked_sequences=3, norm_type=float("inf"), max_norm=0.05)),
    (4, SMALL, Case(model_type="mamba2", tied=None)),
]


@pytest.mark.parametrize(
    ("ranks", "config", "case"),
    [
        pytest.param(
            *(2, {**SMALL, "average_in_collective": True, "delay_wgrad_compute": True}, ROUTED["ranks"]),
            id="bucketed-two-ranks",
        ),
        *(pytest.param(*each, marks=slow) for each in LAYOUTS),
    ],
    ids=str,
)
def test_parity(ranks: int, config: dict[str, Any], case: Case) -> None:
    assert_parity("ddp", case, world_size=ranks, config=config)


FOUR = [cell for cell in conformance("ddp", config=ZERO1_OVERLAP) if cell.layout == "dp_replicate=4"]


@slow
@pytest.mark.parametrize(
    "cell", [cell for cell in FOUR if cell.name in ("all at once", "resume", "bad input")], ids=str
)
def test_conformance_of_the_distributed_optimizer(cell: Cell) -> None:
    cell.check()


# -- the collective of a bucket


def _mesh() -> Mesh:
    world = open_world("cpu")
    return Mesh(MeshSizes(dp_size=world.size).resolve(world.size, frozenset({"dp_replicate"})), world)


def _reduced(instances: int, scatter: bool, average: bool, force: bool) -> tuple[bool, bool]:
    """Reduce ones; whether what this rank owns, and whether the whole bucket, is the sum over ranks."""
    groups = build_groups(_mesh(), instances)
    gradients = torch.ones(4 * 32)
    reduction = BucketReduction(gradients, groups, average=average, scatter=scatter)
    reduction.start(force_all_reduce=force)
    reduction.wait()
    size = gradients.numel() // groups.size
    total = torch.full_like(gradients, dist.get_world_size())
    return torch.equal(gradients[groups.rank * size :][:size], total[:size]), torch.equal(gradients, total)


@pytest.mark.parametrize(
    ("instances", "scatter", "force", "is_whole"),
    [
        (1, False, False, True),
        (1, True, False, False),
        (1, True, True, True),
        pytest.param(2, True, False, False, marks=slow),
        pytest.param(2, True, True, True, marks=slow),
    ],
)
def test_what_each_rank_holds_after_the_reduction(instances: int, scatter: bool, force: bool, is_whole: bool) -> None:
    ranks = 2 * instances
    assert pool(ranks).run(_reduced, instances, scatter, False, force) == [(True, is_whole)] * ranks
    assert all(owned for owned, _ in pool(ranks).run(_reduced, instances, scatter, True, force))


def _fp32_accumulated() -> tuple[int, int]:
    """Elements of a bf16 reduce-scatter that differ from a float32 one, accumulated in float32 and not."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    local = torch.randn(100_000).bfloat16()
    found = []
    for dtype, wide in ((torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)):
        gradients = local.to(dtype, copy=True)
        reduction = BucketReduction(gradients, DataParallelGroups(dist.group.WORLD), scatter=True, sum_in_fp32=wide)
        reduction.start()
        reduction.wait()
        size = gradients.numel() // ranks
        found.append(gradients[rank * size :][:size].bfloat16())
    return int((found[1] != found[0]).sum()), int((found[2] != found[0]).sum())


@slow
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


def _ten(**options: Any) -> tuple[_Ten, BucketedDataParallel]:
    model = _Ten()
    return model, BucketedDataParallel(model, DDPConfig(**BUCKETED, **options), _mesh())


def _finishing(engine: BucketedDataParallel) -> str:
    try:
        engine.finish_grad_sync()
    except StrategyError as error:
        return str(error)
    return "accepted"


def _by_hand(config: dict[str, Any]) -> list[Any]:
    """The gradients of the last of three steps of two microbatches, and the errors of finishing too early."""
    model, engine = _ten(overlap_grad_reduce=True, **config)
    rank = dist.get_rank()
    for step in range(3):
        data = torch.randn(8, 100, generator=torch.Generator().manual_seed(10 * step + rank))
        with engine.no_sync():
            engine(data[:4]).sum().backward()
        engine(data[4:]).sum().backward()
        engine.finish_grad_sync()
        engine.finish_grad_sync()  # idempotent
        gradients = [p.grad.clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
    # All but the first layer's weight: its bias and the others are ready.
    model.layers[0].weight.requires_grad_(False)
    engine(data).sum().backward()
    one_missing = _finishing(engine)
    engine.zero_grad_buffer()
    with engine.no_sync():
        engine(data).sum().backward()
    return [gradients, one_missing, _finishing(engine)]


@pytest.mark.parametrize("config", [pytest.param({}, marks=slow), {"delay_wgrad_compute": True}], ids=str)
def test_gradients_of_a_loop_by_hand_are_sums_and_finishing_too_early_is_an_error_on_all_ranks(
    config: dict[str, Any],
) -> None:
    results = pool(2).run(_by_hand, config)
    model = _Ten()
    for rank in range(2):
        data = torch.randn(8, 100, generator=torch.Generator().manual_seed(20 + rank))
        model(data).sum().backward()
    for gradients, one_missing, all_missing in results:
        for found, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5)
        assert "19 of 20 parameters have their gradient" in one_missing
        # Gradients within no_sync do not count as ready.
        assert "0 of 20 parameters" in all_missing
    assert len({tuple(texts) for _, *texts in results}) == 1


# -- when and how much is communicated


def _order(config: dict[str, Any]) -> list[str]:
    """Collectives, and where blocks begin forward and end backward, of the second step, in order of time."""
    case = Case()
    manager = build_and_train("ddp", config, {}, case)
    step = prepare_gradient_step(manager, case, 1)
    for index, block in enumerate(manager.model_parts[0].get_submodule(name) for name in manager.layout.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: _mark(f"forward {index}"))
        block.register_full_backward_hook(lambda *_, index=index: _mark(f"backward {index}"))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    found = [
        (event.time_range.start, event.name.removeprefix("c10d::"))
        for event in recorded.events()
        if event.name.startswith(("c10d::", "forward ", "backward "))
    ]
    return [name.strip("_") for _, name in sorted(found)]


def _mark(name: str) -> None:
    with record_function(name):
        pass


def _places(names: list[str], start: str) -> list[int]:
    return [index for index, name in enumerate(names) if name.startswith(start)]


def test_overlapped_reductions_begin_before_backward_has_ended_and_gathers_run_through_forward() -> None:
    for names in pool(2).run(_order, ZERO1_OVERLAP):
        reductions, gathers = _places(names, "reduce_scatter"), _places(names, "allgather")
        ends = [names.index(f"backward {block}") for block in (2, 1, 0)]
        assert reductions[0] < ends[0] < ends[1] < ends[2]
        assert any(ends[0] < index < ends[1] for index in reductions)
        assert any(ends[1] < index < ends[2] for index in reductions)
        forwards = [names.index(f"forward {block}") for block in (0, 1, 2)]
        assert gathers[0] < forwards[0]
        assert any(forwards[0] < index < forwards[1] for index in gathers)
        assert any(forwards[1] < index < forwards[2] for index in gathers)


@slow
def test_without_overlap_all_reductions_follow_backward_and_aligned_gathers_begin_with_forward() -> None:
    for names in pool(2).run(_order, BUCKETED):
        reductions = _places(names, "allreduce")
        assert len(reductions) > 1
        assert reductions[0] > names.index("backward 0")
    for names in pool(2).run(_order, {**ZERO1_OVERLAP, "align_param_gather": True}):
        gathers = _places(names, "allgather")
        assert len(gathers) > 5
        assert gathers[-1] < names.index("forward 0")


def _arrivals(config: dict[str, Any], sizes: dict[str, int]) -> list[str]:
    """Forwards, and gradients of the lowest block's last weight and first norm, in the second step, in order."""
    case = Case(microbatches=2, layers=5)
    manager = build_and_train("ddp", config, sizes, case)
    part = manager.model_parts[0]
    block = next(layer for layer in part.model.layers if any(True for _ in layer.parameters()))
    seen: list[str] = []
    part.register_forward_pre_hook(lambda *_: seen.append("forward"))
    for name, weight in (("weight", block.mlp.down_proj.weight), ("norm", block.input_layernorm.weight)):
        # torch also calls it where there is no gradient.
        weight.register_hook(lambda grad, name=name: seen.append(name) if grad is not None else None)
    train_steps(manager, case, range(1, 2))
    return seen


@slow
@pytest.mark.parametrize("config", [OVERLAP, {**BUCKETED, "activation_checkpointing": True}], ids=str)
def test_delayed_gradients_of_weights_follow_the_backward_of_their_microbatch(config: dict[str, Any]) -> None:
    delayed = {**config, "delay_wgrad_compute": True}
    assert pool(2).run(_arrivals, config, {}) == [["forward", "weight", "norm"] * 2] * 2
    assert pool(2).run(_arrivals, delayed, {}) == [["forward", "norm", "weight"] * 2] * 2
    for seen in pool(2).run(_arrivals, delayed, {"pp_size": 2}):
        gradients = [each for each in seen if each != "forward"]
        assert gradients == ["norm", "weight"] * (len(gradients) // 2)
        assert len(gradients) > 2


def _gathers_of_a_stage(config: dict[str, Any]) -> list[str]:
    """Gathers, and what other stages send, in the second step of a stage of a pipeline, in order of time."""
    case = Case(layers=5)
    manager = build_and_train("ddp", config, {"pp_size": 2}, case)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        train_steps(manager, case, range(1, 2))
    names = {"c10d::_allgather_base_": "gather", "c10d::recv_": "receive"}
    found = [(event.time_range.start, names[event.name]) for event in recorded.events() if event.name in names]
    names_in_order = [name for _, name in sorted(found)]
    # First come the messages that count the step's tokens and agree on it, in two rounds each.
    if names_in_order[:4] != ["receive"] * 4:
        raise AssertionError(f"the step does not begin with two messages: {names_in_order}")
    return names_in_order[4:]


@slow
def test_aligned_gathers_of_a_stage_do_not_wait_for_its_first_microbatch() -> None:
    plain = pool(4).run(_gathers_of_a_stage, ZERO1_OVERLAP)
    aligned = pool(4).run(_gathers_of_a_stage, {**ZERO1_OVERLAP, "align_param_gather": True})
    last = slice(2, 4)
    for before, after in zip(plain[last], aligned[last], strict=True):
        assert before.count("gather") == after.count("gather") > 2
        assert before.index("receive") == 0
        assert after.index("receive") == after.count("gather")


def _traffic(config: dict[str, Any], case: Case) -> dict[str, tuple[int, int]]:
    """Calls and bytes by kind of collective in the second step."""
    manager = build_and_train("ddp", config, {}, case)
    seen = record_collectives(lambda: train_steps(manager, case, range(1, 2)))
    large = [each for each in seen if each.nbytes > 1000]
    sizes = {kind: [each.nbytes for each in large if each.kind == kind] for kind in sorted({e.kind for e in large})}
    return {kind: (len(each), sum(each)) for kind, each in sizes.items()}


NUMEL = sum(p.numel() for p in build_tiny_model().parameters())


def test_a_step_moves_every_gradient_once_and_every_parameter_once() -> None:
    case = Case(microbatches=3)
    plain, zero1, overlapped = (pool(2).run(_traffic, each, case)[0] for each in (BUCKETED, ZERO1, ZERO1_OVERLAP))
    assert plain == {"all_reduce": (1, 8 * NUMEL)}
    # A ring sends twice as much for an all-reduce as for either of these.
    assert set(zero1) == {"reduce_scatter", "all_gather"}
    assert zero1["reduce_scatter"] == zero1["all_gather"]
    calls, size = zero1["reduce_scatter"]
    assert calls == 1
    assert 8 * NUMEL <= size < 1.05 * 8 * NUMEL
    assert overlapped["reduce_scatter"] == overlapped["all_gather"]
    assert overlapped["reduce_scatter"][0] > 5


def _bucket_counts(configs: list[dict[str, Any]]) -> list[list[int]]:
    managers = [build_manager("ddp", config, {}, Case()) for config in configs]
    return [[bucket.reduction.gradients.numel() for bucket in manager.module.buckets] for manager in managers]


def test_buckets_are_as_large_as_asked_for() -> None:
    by_default, by_number = {**OVERLAP, "bucket_size": None}, {**OVERLAP, "bucket_size": None, "num_buckets": 4}
    padding = {**ZERO1, **OVERLAP, "pad_buckets_for_high_nccl_busbw": True}
    one, large, sizes, four, padded = pool(2).run(_bucket_counts, [BUCKETED, by_default, OVERLAP, by_number, padding])[
        0
    ]
    assert one == large == [NUMEL]
    assert sum(sizes) == NUMEL
    assert len(sizes) > 6
    assert all(size >= 3000 for size in sizes[:-1])
    assert 2 <= len(four) <= 4
    assert all(size % 2**16 == 0 for size in padded)


# -- checks of gradients


PLANTED = "model.layers.1.mlp.up_proj.weight"


def _with_planted(config: dict[str, Any], value: float, planted_step: int) -> list[Any]:
    """A gradient of the second rank is not finite in one step; losses of the others, and the error."""
    case = Case(microbatches=2)
    manager = build_manager("ddp", config, {}, case)
    spoil = [False]
    weight = dict(manager.model_parts[0].named_parameters())[PLANTED]
    weight.register_hook(lambda grad: torch.full_like(grad, value) if spoil[0] else grad)
    reported: list[Any] = []
    for step in range(3):
        spoil[0] = step == planted_step and manager.mesh.rank == 1
        try:
            loss = float(prepare_gradient_step(manager, case, step)())
            manager.optimizer_step()
            reported.append(loss)
        except TrainingError as error:
            reported.append(str(error))
    return reported


@pytest.mark.parametrize(
    ("config", "value", "kind", "planted_step"),
    [
        pytest.param(BUCKETED, math.nan, "NaN", 1, marks=slow),
        pytest.param(OVERLAP, math.inf, "Inf", 0, marks=slow),
        ({**OVERLAP, "use_distributed_optimizer": True}, math.nan, "NaN", 1),
    ],
    ids=str,
)
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_with_its_name_and_bucket(
    config: dict[str, Any], value: float, kind: str, planted_step: int
) -> None:
    first, second = pool(2).run(_with_planted, {**config, "check_for_nan_in_grad": True}, value, planted_step)
    assert first == second
    text = first.pop(planted_step)
    assert f"is {kind} before the data-parallel collective" in text
    assert all(each in text for each in (PLANTED, "bucket ", "(found on rank 1"))
    # Nothing was stepped, and training can continue.
    assert all(isinstance(loss, float) and math.isfinite(loss) for loss in first)


def _look(checks: GradChecker, norm: float) -> None:
    checks.record_norms(0, ["a", "b"], [torch.tensor([0.6 * norm]), torch.tensor([[0.8 * norm]])])
    norms = checks.recorded_norms()
    assert checks.find_error(norms.tolist() if norms is not None else []) is None


def test_large_gradients_are_reported_only_after_a_hundred_norms_have_been_seen() -> None:
    checks = GradChecker(check_nonfinite=False, check_large=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(NUM_REFERENCE_NORMS - 1):
            _look(checks, 1.0 + step % 2)
        _look(checks, math.nan)  # counts for nothing
        _look(checks, 50.0)
        _look(checks, 499.0)
        _look(GradChecker(check_nonfinite=False, check_large=False), math.nan)
    with pytest.warns(UserWarning, match=r"bucket 0 \(b to a\) have norm 501 .* largest of the first 100 norms \(50\)"):
        _look(checks, 501.0)
    # What was announced has not become what is expected.
    with pytest.warns(UserWarning, match="norm 501"):
        _look(checks, 501.0)


def _large() -> list[str]:
    manager = build_manager("ddp", {**BUCKETED, "check_for_large_grads": True}, {}, Case(max_norm=None))
    scale = [1.0]
    for parameter in manager.model_parts[0].parameters():
        parameter.register_hook(lambda grad: grad * scale[0])
    step = prepare_gradient_step(manager, Case())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(NUM_REFERENCE_NORMS + 1):
            scale[0] = 20.0 if index == NUM_REFERENCE_NORMS else 1.0
            manager.read_scalars(step())
            for parameter in manager.model_parts[0].parameters():
                parameter.grad = None
    return [str(each.message) for each in caught if "check_for_large_grads" in str(each.message)]


@slow
def test_large_gradients_of_a_step_are_reported_and_training_continues() -> None:
    for reported in pool(2).run(_large):
        assert len(reported) == 1
        assert "bucket 0" in reported[0]


# -- refusals that need a model or a mesh, and activations


def _refusals(configs: list[dict[str, Any]]) -> list[str]:
    return [catch_refusal("ddp", config, {}, Case()) for config in configs]


def test_what_cannot_act_on_this_mesh_or_model_is_refused_on_all_ranks() -> None:
    cases = [
        ({**ZERO1, "num_distributed_optimizer_instances": 3}, "MeshError: num_distributed_optimizer_instances=3 does"),
        ({**BUCKETED, "grad_reduce_in_fp32": True}, "ModelError: grad_reduce_in_fp32=true is coarser"),
        ({**BUCKETED, "reduce_dtype": "float32"}, "ModelError: reduce_dtype=float32 is coarser"),
        ({**OVERLAP, "bucket_size": None, "num_buckets": 10**9}, "ModelError: num_buckets=1000000000, but the model"),
        ({**BUCKETED, "backend": "mpi"}, "MeshError: backend='mpi', but the process group uses 'gloo' for cpu"),
        ({**BUCKETED, "backend": "nccl"}, "accepted"),
        ({**BUCKETED, "backend": "gloo"}, "accepted"),
    ]
    first, second = pool(2).run(_refusals, [config for config, _ in cases])
    assert first == second
    assert all(found.startswith(text) for found, (_, text) in zip(first, cases, strict=True)), first


def _forwards(config: dict[str, Any]) -> int:
    """How often the last block's MLP begins in a step of one microbatch; recomputation may stop within it."""
    manager = build_manager("ddp", config, {}, Case())
    calls = []
    manager.model_parts[0].get_submodule("model.layers.2.mlp").register_forward_pre_hook(lambda *_: calls.append(1))
    train_steps(manager, Case(), range(1))
    return len(calls)


@slow
@pytest.mark.parametrize("engine", ["torch", "bucketed"])
def test_activations_are_computed_again(engine: str) -> None:
    for mode, times in ((False, 1), (True, 2), ("full", 2), ("selective", 2)):
        assert pool(1).run(_forwards, {"engine": engine, "activation_checkpointing": mode}) == [times]
