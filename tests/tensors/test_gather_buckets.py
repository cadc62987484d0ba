"""Each element travels once, in rounds that a bucket holds, and whole tensors come in their order."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import rank_layouts

from meshwright.tensors.chunks import Rectangle, assign_owners
from meshwright.tensors.gather_parameters import plan_buckets


@settings(deadline=None)
@given(rank_layouts(), st.integers(1, 12))
def test_each_element_travels_once_within_the_bucket(held: list[list[Rectangle]], buckets: int) -> None:
    shapes: dict[str, list[int]] = {}
    itemsizes = {each.name: each.itemsize for each in itertools.chain(*held)}
    for each in itertools.chain(*held):
        ends = [o + s for o, s in zip(each.offsets, each.sizes, strict=True)]
        shapes[each.name] = [max(a, b) for a, b in zip(shapes.get(each.name, ends), ends, strict=True)]
    names = sorted([*shapes, "empty"])
    bucket_bytes = sum(math.prod(shape) * itemsizes[name] for name, shape in shapes.items()) // buckets
    travelled = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}
    finished = []
    for each in plan_buckets(names, assign_owners(held), bucket_bytes):
        assert each.nbytes <= max(bucket_bytes, len(held) * max(itemsizes.values()))
        assert not finished or each.names[0] != finished[-1]
        assert each.is_last or len(each.names) == 1
        finished += each.names if each.is_last else []
        taken = torch.zeros(each.nbytes, dtype=torch.int64)
        for (start, end), segment in zip(itertools.pairwise(each.starts), each.segments, strict=True):
            assert not each.uses_all_gather or end - start == each.starts[1]
            for name, part in ((name, part) for name, parts in segment.items() for part in parts):
                assert name in each.names
                assert (start + part.begin) % itemsizes[name] == 0
                taken[start + part.begin : start + part.end] += 1
                assert start + part.end <= end
                region = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
                travelled[name][region] += 1
                assert part.end - part.begin == travelled[name][region].numel() * itemsizes[name]
        assert taken.max() <= 1 if taken.numel() else True
    assert finished == names
    assert all(bool((count == 1).all()) for count in travelled.values())
