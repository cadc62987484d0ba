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
from meshwright.model.weights import Weights
from meshwright.tensors.pieces import Piece, pieces_within, stretch_pieces, tensor_pieces
from meshwright_testing import pool
from meshwright_testing.case import Case
from meshwright_testing.parity import build_manager

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4)


def part_of(whole: Tensor, piece: Piece) -> Tensor:
    return whole[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))]


@given(SHAPES, st.data())
def test_a_stretch_is_few_rectangles_which_are_its_elements(shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    end = data.draw(st.integers(start, whole.numel()))
    stretch = whole.flatten()[start:end].clone()
    pieces = stretch_pieces(stretch, start, shape)
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
    pieces = tensor_pieces(tensor)
    right = all(torch.equal(piece.tensor, part_of(whole, piece)) for piece in pieces)
    for piece in pieces:
        piece.tensor.fill_(-1)
    local = tensor.to_local()
    return sum(piece.tensor.numel() for piece in pieces), right, bool((local == -1).all())


@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((7, 3), [Shard(0), Replicate()]),
        ((7, 6), [Shard(0), Shard(1)]),
        ((9, 3), [Shard(0), Shard(0)]),
        ((8, 12), [Shard(0), packed_shard(1, 2)]),
        ((3, 8, 5), [Replicate(), packed_shard(1, 2)]),
        ((1,), [Shard(0), Replicate()]),
        ((), [Replicate(), Replicate()]),
        ((5, 2), [Replicate(), Replicate()]),
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
    pieces = pieces_within(stretch_pieces(stretch, start, local.shape), part)
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


class _Numbered:
    """Values that say where they come from: the place of each element in the whole, and the name's length."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self._shapes = shapes

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def read(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        shape = self._shapes[name]
        whole = torch.arange(math.prod(shape), dtype=torch.float64).view(shape) + len(name) / 100
        return part_of(whole, Piece(offsets, torch.empty(sizes)))


def _filled(strategy: str, config: dict[str, object], sizes: dict[str, int], model_type: str) -> bool:
    """Fill sharded parameters piece by piece, and gather the whole state in the strategy's own way."""
    from meshwright.model.weights import fill

    manager = build_manager(strategy, config, sizes, Case(model_type=model_type))
    tensors = manager.model.state_dict(keep_vars=True)
    shapes = {name: manager.parts.shape(value, value) for name, value in tensors.items()}
    weights: Weights = _Numbered(shapes)
    fill(manager.model, weights, manager.parts.pieces)
    state = manager.state_dict(full=True)["model"]
    tied = {id(value): name for name, value in reversed(state.items())}
    return all(
        torch.equal(value, weights.read(tied[id(value)], (0,) * value.dim(), value.shape)) for value in state.values()
    )


@pytest.mark.parametrize(
    ("strategy", "config", "ranks", "sizes", "model_type"),
    [
        ("fsdp2", {}, 2, {}, "llama"),
        *(
            pytest.param(*layout, model_type, marks=pytest.mark.slow)
            for layout, model_type in (
                (("single", {}, 1, {}), "gpt2"),
                (("ddp", {}, 2, {}), "mixtral"),
                (("fsdp2", {}, 4, {"dp_replicate_size": 2}), "gpt2"),
                (("fsdp2", {}, 4, {"tp_size": 2}), "mixtral"),
                (("megatron_fsdp", {"zero_dp_strategy": 3}, 3, {}), "llama"),
                (("megatron_fsdp", {"zero_dp_strategy": 1}, 3, {}), "gpt2"),
                (("megatron_fsdp", {}, 4, {"tp_size": 2}), "mixtral"),
                (("megatron_fsdp", {"zero_dp_strategy": 0}, 2, {"tp_size": 2}), "llama"),
            )
        ),
    ],
    ids=str,
)
def test_what_is_written_into_pieces_is_what_the_strategy_trains(strategy, config, ranks, sizes, model_type):
    assert pool(ranks).run(_filled, strategy, config, sizes, model_type) == [True] * ranks
