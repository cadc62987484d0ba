"""Canaries for the private names of torch that meshwright._compat uses: each fails when torch changes under it."""

from __future__ import annotations

import math

import torch

from meshwright import Mesh, MeshSizes, open_world
from meshwright._compat import foreach_mul_, foreach_norm
from meshwright.testing import pool


def _flattened() -> tuple[list[int], tuple[str, ...], int]:
    world = open_world("cpu")
    mesh = Mesh(MeshSizes(dp_replicate_size=2, cp_size=2, dp_size=2).resolve(world.size), world)
    sliced = mesh["dp_replicate", "dp_shard_cp"]
    return mesh["dp_cp"].mesh.tolist(), sliced.mesh_dim_names, sliced.get_local_rank("dp_shard_cp")


def test_flattened_views_are_registered_in_the_root_mesh() -> None:
    for rank, (ranks, names, coordinate) in enumerate(pool(4).run(_flattened)):
        assert ranks == [0, 1, 2, 3]
        assert names == ("dp_replicate", "dp_shard_cp")
        assert coordinate == rank % 2


def test_foreach_norm_is_the_norm_of_each_tensor_in_the_dtype_asked_for() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.full((2, 2), -2.0)]
    for norm_type, expected in ((1.0, [7.0, 8.0]), (2.0, [5.0, 4.0]), (math.inf, [4.0, 2.0])):
        norms = foreach_norm(tensors, norm_type, torch.float64)
        assert [float(norm) for norm in norms] == expected
        assert {norm.dtype for norm in norms} == {torch.float64}
    assert foreach_norm([], 2.0) == []


def test_foreach_mul_scales_in_place_by_a_scalar_tensor() -> None:
    tensors = [torch.ones(2), torch.full((3, 1), 2.0)]
    foreach_mul_(tensors, torch.tensor(0.5))
    assert [t.flatten().tolist() for t in tensors] == [[0.5] * 2, [1.0] * 3]
    foreach_mul_([], torch.tensor(0.5))
