"""Each element is written once, by a rank that has it, and all ranks write about alike."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from support.checkpoints import layouts

from meshwright.tensors.pieces import SMALL_BYTES, Rectangle, divide


@given(layouts())
def test_every_element_is_written_once_by_a_rank_that_has_it(held: list[list[Rectangle]]) -> None:
    shapes: dict[str, list[int]] = {}
    for part in itertools.chain(*held):
        ends = [o + s for o, s in zip(part.offsets, part.sizes, strict=True)]
        shapes[part.name] = [max(a, b) for a, b in zip(shapes.get(part.name, ends), ends, strict=True)]
    written = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for rank, parts in enumerate(divide(held)):
        for part in parts:
            written[part.name][tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))] += 1
            assert any(_inside(part, each) for each in held[rank])
    assert all(bool((count == 1).all()) for count in written.values())


def _inside(part: Rectangle, other: Rectangle) -> bool:
    return part.name == other.name and all(
        w <= p and p + ps <= w + ws
        for p, ps, w, ws in zip(part.offsets, part.sizes, other.offsets, other.sizes, strict=True)
    )


def test_replicas_write_equal_shares_of_every_large_tensor() -> None:
    tensors = [Rectangle("embedding", (0, 0), (32000, 1024), 4), Rectangle("wide", (0, 0), (3, 4_000_003), 4)]
    small = [Rectangle(f"norm{n}", (0,), (1024,), 4) for n in range(33)]
    owned = divide([tensors + small] * 4)
    written = [sum(part.nbytes for part in parts) for parts in owned]
    assert sum(written) == sum(each.nbytes for each in tensors + small)
    assert max(written) < 1.001 * min(written)
    assert all(each.nbytes < SMALL_BYTES for each in small)
