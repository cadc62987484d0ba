"""The total norm over mixed placements equals torch's norm of the whole gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright import ConfigError
from meshwright.tensors.norms import check_clip, each_norm, scale_to_norm, total_grad_norm
from meshwright.testing import pool


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
    norm = total_grad_norm(gradients, norm_type)
    scale_to_norm(gradients, norm, 0.25)
    scaled = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return float(norm), scaled


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, math.inf])
def test_norm_and_scale_over_mixed_placements(norm_type: float) -> None:
    whole = [*_whole(), torch.full((3,), 0.5, dtype=torch.float64)]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in whole]), norm_type)
    factor = 0.25 / (expected + 1e-6)
    for norm, scaled in pool(4).run(_norms, norm_type):
        assert norm == pytest.approx(float(expected), rel=1e-14)
        for got, gradient in zip(scaled, whole, strict=True):
            torch.testing.assert_close(got, gradient * factor, rtol=1e-14, atol=0)


def _divided(norm_type: float) -> tuple[float, list[float]]:
    """Norms of plain parts, whose groups are told: of all gradients together, and of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outer, inner = mesh.get_group("outer"), mesh.get_group("inner")
    first, second, third = _whole()[0], _whole()[4], _whole()[2]
    parts = [
        first.tensor_split(2)[mesh.get_local_rank("outer")],
        second.tensor_split(2)[mesh.get_local_rank("outer")].tensor_split(2, 1)[mesh.get_local_rank("inner")],
        third,
    ]
    groups = [(outer,), (outer, inner), ()]
    return float(total_grad_norm(parts, norm_type, groups=groups)), each_norm(parts, groups).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_norms_of_plain_parts_whose_groups_are_told(norm_type: float) -> None:
    whole = [_whole()[index] for index in (0, 4, 2)]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in whole]), norm_type)
    for norm, each in pool(4).run(_divided, norm_type):
        assert norm == pytest.approx(float(expected), rel=1e-14)
        assert each == pytest.approx([float(g.norm()) for g in whole], rel=1e-14)


def test_gradients_below_the_limit_stay_as_they_are() -> None:
    gradient = torch.tensor([3.0, 4.0])
    scale_to_norm([gradient], total_grad_norm([gradient]), 5.1)
    assert gradient.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("wide", [False, True])
def test_wide_norms_do_not_depend_on_how_a_tensor_is_cut(wide: bool) -> None:
    whole = torch.randn(300, 77, generator=torch.Generator().manual_seed(0))
    norms = [
        float(total_grad_norm(parts, wide=wide))
        for parts in ([whole], whole.tensor_split(7), whole.tensor_split(5, dim=1), [whole[:1], whole[1:]])
    ]
    apart = max(abs(norm - norms[0]) / norms[0] for norm in norms)
    assert apart < 1e-14 if wide else 1e-12 < apart < 1e-5, apart


def test_half_precision_is_summed_in_float32() -> None:
    """Ten thousand bfloat16 ones; summed in bfloat16 they would stop growing at 256."""
    assert float(total_grad_norm([torch.ones(10_000, dtype=torch.bfloat16)], 1.0)) == 10_000.0


def test_mixed_dtypes_are_scaled_each_in_its_own() -> None:
    gradients = [torch.full((4,), 2.0), torch.full((4,), 2.0, dtype=torch.bfloat16)]
    scale_to_norm(gradients, torch.tensor(4.0, dtype=torch.float64), 1.0)
    assert [g.dtype for g in gradients] == [torch.float32, torch.bfloat16]
    assert gradients[1].tolist() == [0.5] * 4


def test_without_gradients_the_norm_is_zero() -> None:
    assert float(total_grad_norm([])) == 0.0


def test_nan_is_not_hidden_by_any_norm() -> None:
    for norm_type in (1.0, 2.0, math.inf):
        assert math.isnan(float(total_grad_norm([torch.ones(3), torch.tensor([1.0, math.nan])], norm_type)))


@pytest.mark.parametrize(("max_norm", "norm_type"), [(0.0, 2.0), (-1.0, 2.0), (math.nan, 2.0), (1.0, 0.0), (1.0, -2.0)])
def test_limits_that_mean_nothing_are_refused(max_norm: float, norm_type: float) -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        check_clip(max_norm, norm_type)
