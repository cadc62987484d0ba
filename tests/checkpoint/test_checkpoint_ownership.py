"""Each element is written once, by a rank that has it, and all ranks write about alike."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.tensors.ownership import SMALL_BYTES, Rectangle, divide


@st.composite
def layouts(draw: st.DrawFn) -> list[list[Rectangle]]:
    """Tensors cut into rows at random, each part on some of the ranks."""
    ranks = draw(st.integers(1, 5))
    held: list[list[Rectangle]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(1, 40), min_size=0, max_size=3))
        size = shape[0] if shape else 1
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
        itemsize = draw(st.sampled_from([1, 2, 8, 1000]))
        for start, end in itertools.pairwise(cuts):
            part = (
                Rectangle(f"t{number}", (start, *[0] * (len(shape) - 1)), (end - start, *shape[1:]), itemsize)
                if shape
                else Rectangle(f"t{number}", (), (), itemsize)
            )
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                # A rank may have the same twice.
                held[rank] += [part] * draw(st.integers(1, 2))
    return held


@given(layouts())
def test_every_element_is_written_once_by_a_rank_that_has_it(held: list[list[Rectangle]]) -> None:
    owned = divide(held)
    shapes: dict[str, list[int]] = {}
    for rectangle in itertools.chain(*held):
        ends = [o + s for o, s in zip(rectangle.offsets, rectangle.sizes, strict=True)]
        before = shapes.get(rectangle.name, ends)
        shapes[rectangle.name] = [max(a, b) for a, b in zip(before, ends, strict=True)]
    written = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    for rank, parts in enumerate(owned):
        for part in parts:
            region = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
            written[part.name][region] += 1
            assert any(_inside(part, each) for each in held[rank])
    assert all(bool((count == 1).all()) for count in written.values())


def _inside(part: Rectangle, whole: Rectangle) -> bool:
    return part.name == whole.name and all(
        w <= p and p + ps <= w + ws
        for p, ps, w, ws in zip(part.offsets, part.sizes, whole.offsets, whole.sizes, strict=True)
    )


def test_replicas_write_equal_shares_of_every_large_tensor() -> None:
    tensors = [Rectangle("embedding", (0, 0), (32000, 1024), 4), Rectangle("wide", (0, 0), (3, 4_000_003), 4)]
    small = [Rectangle(f"norm{n}", (0,), (1024,), 4) for n in range(33)]
    owned = divide([tensors + small] * 4)
    written = [sum(part.nbytes for part in parts) for parts in owned]
    assert sum(written) == sum(each.nbytes for each in tensors + small)
    assert max(written) < 1.001 * min(written)
    assert all(each.nbytes < SMALL_BYTES for each in small)
    assert math.isclose(written[0], sum(written) / 4, rel_tol=1e-3)
