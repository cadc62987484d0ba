"""Norms of gradients, in total and by block: those of one process under every layout, and of whole gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.tiers import mark_mostly_slow
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright import ConfigError, count_tokens
from meshwright.model.layout import sort_parts
from meshwright.tensors.norms import (
    check_clip_options,
    clip_grads_with_norm,
    compute_grad_norm,
    compute_tensor_norms,
    sum_squares_by_part,
)
from meshwright.testing import Case
from meshwright.tracing.collectives import CollectiveTrace, record_collectives
from meshwright_testing import pool
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager, train_steps
from meshwright_testing.tasks import run_norms_reference, train_with_gradient_norms

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

ZERO = {"engine": "bucketed", "use_distributed_optimizer": True}
INTERLEAVED = {"pipeline": {"pp_schedule": "interleaved1f1b"}}
LAYOUTS: Mapping[str, tuple[int, str, Mapping[str, Any], Mapping[str, int], Mapping[str, Any] | None]] = {
    "ddp-zero1": (2, "ddp", ZERO, {}, None),
    "fsdp2-wide": (2, "fsdp2", {"reduce_dtype": "float64"}, {}, None),
    "tp-sequence": (2, "fsdp2", {"sequence_parallel": True}, {"tp_size": 2}, None),
    "pp-interleaved": (2, "fsdp2", {}, {"pp_size": 2}, INTERLEAVED),
    "pp-zero1": (4, "ddp", ZERO, {"pp_size": 2, "dp_size": 2}, None),
}
CASES = {
    "tied": Case(layers=4, tied=True, steps=2, sequences=24, microbatches=2),
    "frozen": Case(layers=4, frozen=("*embed_tokens*", "*layers.1.*"), steps=2),
    "unused": Case(model_type="routed", layers=4, route="steps", steps=2),
}


@pytest.mark.parametrize(
    ("layout", "case"),
    mark_mostly_slow(
        [
            ("fsdp2-wide", "unused"),
            *((layout, "tied") for layout in ("ddp-zero1", "tp-sequence", "pp-interleaved", "pp-zero1")),
            *((layout, "frozen") for layout in ("ddp-zero1", "pp-interleaved")),
        ]
    ),
)
def test_norms_by_block_are_those_of_one_process(layout: str, case: str) -> None:
    ranks, strategy, config, sizes, wrapper = LAYOUTS[layout]
    for found in pool(ranks).run(train_with_gradient_norms, strategy, config, sizes, CASES[case], "cpu", wrapper):
        assert found.max_difference(run_norms_reference(CASES[case])) <= 1e-9
        assert found.max_difference_from_total() <= 1e-12


def test_names_are_those_of_blocks_in_the_order_in_which_they_run() -> None:
    (first, _) = run_norms_reference(CASES["frozen"]).by_block
    assert list(first) == ["model.layers.0", "model.layers.2", "model.layers.3", "head", "other"]
    assert sort_parts(["other", "b.1", "head", "a.0", "embedding", "b.1"]) == [
        "embedding",
        "b.1",
        "a.0",
        "head",
        "other",
    ]


def _traffic(strategy: str, sizes: Mapping[str, int]) -> CollectiveTrace:
    """Of asking for them a second time, behind a step's gradients."""
    manager = build_manager(strategy, {}, sizes, CASES["tied"])
    train_steps(manager, CASES["tied"], range(1))
    microbatches = rank_microbatches(CASES["tied"], 1, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(microbatches, num_tokens=count_tokens(microbatches, manager.mesh))
    manager.gradient_norms()
    return record_collectives(manager.gradient_norms)


@pytest.mark.parametrize(
    ("strategy", "sizes", "calls"),
    mark_mostly_slow([("fsdp2", {}, 1), ("fsdp2", {"dp_replicate_size": 2}, 0), ("fsdp2", {"pp_size": 2}, 1)]),
)
def test_one_vector_is_summed_for_each_set_of_groups(strategy: str, sizes: Mapping[str, int], calls: int) -> None:
    for traffic in pool(2).run(_traffic, strategy, sizes):
        assert [each.kind for each in traffic] == ["all_reduce"] * calls
        # Of six numbers: the embedding, four blocks, and the rest.
        assert traffic.nbytes == calls * 6 * 8


def test_what_is_not_finite_stays_in_its_part() -> None:
    parameters = [torch.nn.Parameter(torch.ones(count)) for count in (3, 0, 2, 4, 5)]
    for parameter, value in zip(parameters, (2.0, 1.0, math.nan, 1.0, None), strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    squares = sum_squares_by_part(parameters, [0, 0, 1, 2, 3], 5, [()] * 5)
    assert squares.dtype == torch.float64
    assert squares[[0, 2, 3, 4]].tolist() == pytest.approx([12.0, 4.0, 0.0, 0.0])
    assert math.isnan(squares[1])


def _whole() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    # Rows that four ranks do not divide, fewer rows than ranks (empty parts), a vector and an empty tensor.
    shapes = [(7, 3), (2, 5), (9,), (0, 4), (6, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _norms(norm_type: float) -> tuple[float, list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    layouts = [
        (mesh["shard"], [Shard(0)]),
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(0), Shard(0)]),
        (mesh["shard"], [Shard(1)]),
        (mesh, [Replicate(), Replicate()]),
    ]
    gradients = [distribute_tensor(g.clone(), m, p) for g, (m, p) in zip(_whole(), layouts, strict=True)]
    gradients.append(torch.full((3,), 0.5, dtype=torch.float64))
    norm = compute_grad_norm(gradients, norm_type)
    clip_grads_with_norm(gradients, norm, 0.25)
    scaled = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return float(norm), scaled


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [2.0, 2.5, math.inf])
def test_norm_and_scale_over_mixed_placements(norm_type: float) -> None:
    whole = [*_whole(), torch.full((3,), 0.5, dtype=torch.float64)]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in whole]), norm_type)
    factor = 0.25 / (expected + 1e-6)
    for norm, scaled in pool(4).run(_norms, norm_type):
        assert norm == pytest.approx(float(expected), rel=1e-14)
        for got, gradient in zip(scaled, whole, strict=True):
            torch.testing.assert_close(got, gradient * factor, rtol=1e-14, atol=0)


def _divided(norm_type: float) -> tuple[float, list[float]]:
    """Norms of plain parts, whose groups are reported: of all gradients together, and of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    (outer, inner), (row, column) = (mesh.get_group(dim) for dim in (0, 1)), mesh.get_coordinate() or (0, 0)
    first, _, third, _, last = _whole()
    parts = [first.tensor_split(2)[row], last.tensor_split(2)[row].tensor_split(2, 1)[column], third]
    groups = [(outer,), (outer, inner), ()]
    return float(compute_grad_norm(parts, norm_type, groups=groups)), compute_tensor_norms(parts, groups).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_norms_of_plain_parts_whose_groups_are_reported(norm_type: float) -> None:
    whole = [_whole()[index] for index in (0, 4, 2)]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in whole]), norm_type)
    for norm, each in pool(4).run(_divided, norm_type):
        assert norm == pytest.approx(float(expected), rel=1e-14)
        assert each == pytest.approx([float(g.norm()) for g in whole], rel=1e-14)


@pytest.mark.parametrize("wide", [False, True])
def test_wide_norms_do_not_depend_on_how_a_tensor_is_cut(wide: bool) -> None:
    whole = torch.randn(300, 77, generator=torch.Generator().manual_seed(0))
    norms = [
        float(compute_grad_norm(parts, use_float64=wide))
        for parts in ([whole], whole.tensor_split(7), whole.tensor_split(5, dim=1), [whole[:1], whole[1:]])
    ]
    apart = max(abs(norm - norms[0]) / norms[0] for norm in norms)
    assert apart < 1e-14 if wide else 1e-12 < apart < 1e-5, apart


def test_half_precision_is_summed_in_float32() -> None:
    """Ten thousand bfloat16 ones; summed in bfloat16 they would stop growing at 256."""
    parameter = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert float(compute_grad_norm([parameter.grad], 1.0)) == 10_000.0
    assert sum_squares_by_part([parameter], [0], 1, [()]).tolist() == pytest.approx([10_000.0])


def test_what_is_above_the_limit_is_scaled_in_its_own_dtype_and_nan_is_not_hidden() -> None:
    below = torch.tensor([3.0, 4.0])
    clip_grads_with_norm([below], compute_grad_norm([below]), 5.1)
    gradients = [torch.full((4,), 2.0), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    clip_grads_with_norm(gradients, torch.tensor(4.0, dtype=torch.float64), 1.0)
    assert (below.tolist(), gradients[1].tolist()) == ([3.0, 4.0], [0.5] * 4)
    assert [g.dtype for g in gradients] == [torch.float32, torch.bfloat16]
    for norm_type in (1.0, 2.0, math.inf):
        assert math.isnan(float(compute_grad_norm([torch.ones(3), torch.tensor([1.0, math.nan])], norm_type)))


@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.0, 2.0), (-1.0, 2.0), (math.nan, 2.0), (1.0, 0.0), (1.0, -2.0)])
def test_limits_that_mean_nothing_are_refused(max_norm: float, norm_type: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        check_clip_options(max_norm, norm_type)
