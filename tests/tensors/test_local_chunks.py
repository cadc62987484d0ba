"""Pieces say exactly which elements of a whole lie in memory, however it is divided."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from meshwright import open_world
from meshwright._compat.torch import packed_shard
from meshwright.tensors.chunks import LocalChunk, get_flat_range_chunks, get_local_chunks, to_global_chunks
from meshwright_testing import pool

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4)


def part_of(whole: Tensor, piece: LocalChunk) -> Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))]


@given(SHAPES, st.data())
def test_a_stretch_is_few_rectangles_which_are_its_elements(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(start, whole.numel()))
    stretch = whole.flatten()[start:end].clone()
    pieces = get_flat_range_chunks(stretch, start, shape)
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
    for piece in pieces:
        assert torch.equal(piece.tensor, part_of(whole, piece))
    covered = torch.cat([piece.tensor.flatten() for piece in pieces]) if pieces else torch.empty(0)
    assert covered.tolist() == stretch.tolist()
    for piece in pieces:
        piece.tensor.fill_(-1)
    assert torch.equal(stretch, torch.full_like(stretch, -1)), "pieces must be views"


def _divided(shape: tuple[int, ...], placements: list[Placement]) -> tuple[int, bool, bool]:
    world = open_world("cpu")
    mesh = init_device_mesh("cpu", (2, world.size // 2))
    whole = torch.arange(math.prod(shape)).view(shape)
    tensor: DTensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    pieces = get_local_chunks(tensor)
    right = all(torch.equal(piece.tensor, part_of(whole, piece)) for piece in pieces)
    for piece in pieces:
        piece.tensor.fill_(-1)
    local = tensor.to_local()
    return sum(piece.tensor.numel() for piece in pieces), right, bool((local == -1).all())


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((7, 6), [Shard(0), Shard(1)]),
        ((9, 3), [Shard(0), Shard(0)]),
        ((3, 8, 5), [Replicate(), packed_shard(1, 2)]),
        ((1,), [Shard(0), Replicate()]),
        ((), [Replicate(), Replicate()]),
    ],
    ids=str,
)
@pytest.mark.slow
def test_pieces_of_shards_cover_them(shape: tuple[int, ...], placements: list[Placement]) -> None:
    found = pool(4).run(_divided, shape, placements)
    assert all(right and views for _, right, views in found)
    copies = math.prod(2 for placement in placements if placement.is_replicate())
    assert sum(count for count, _, _ in found) == copies * math.prod(shape)


def _stretched(shape: tuple[int, ...], placement: Placement, start: int, end: int) -> tuple[int, bool]:
    world = open_world("cpu")
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(math.prod(shape)).view(shape)
    part: DTensor = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
    local = part.to_local().contiguous()
    stretch = local.flatten()[start:end]
    pieces = to_global_chunks(get_flat_range_chunks(stretch, start, local.shape), part)
    return sum(piece.tensor.numel() for piece in pieces), all(
        torch.equal(piece.tensor, part_of(whole, piece)) for piece in pieces
    )


@pytest.mark.parametrize(
    ("shape", "placement"),
    [((7, 6), Shard(0)), ((5, 6), Shard(1)), ((8, 3), packed_shard(0, 2)), ((3, 8, 5), packed_shard(1, 2))],
    ids=str,
)
def test_pieces_of_a_part_are_pieces_of_the_whole(shape: tuple[int, ...], placement: Placement) -> None:
    for start, end in ((0, 4), (2, 11), (5, 9)):
        assert pool(2).run(_stretched, shape, placement, start, end) == [(end - start, True)] * 2
