"""The layout of buckets: cases that the reference's own layout yields, and what must hold for every model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright_ddp.layout import bucket_layout, default_bucket_size

TEN = [9025] * 10


def _ends(*ends: int) -> list[tuple[int, int]]:
    return list(zip((0, *ends[:-1]), ends, strict=True))


@pytest.mark.parametrize(
    ("numels", "bucket_size", "dp_size", "padded", "buckets", "unpadded"),
    [
        (TEN, 18050, 8, False, _ends(*range(18050, 90251, 18050)), [18050] * 5),
        (TEN, 18050, 8, True, _ends(*range(18176, 90881, 18176)), [18113] * 5),
        (TEN, 9000, 8, True, _ends(*range(9088, 90881, 9088)), [9025] * 10),
        (TEN, 20000, 8, True, _ends(27264, 54528, 81792, 90880), [27201] * 3 + [9025]),
        ([9025, 95] * 10, 9050, 8, True, _ends(*range(9216, 92161, 9216)), [9153] * 10),
        ([97, 103], None, 2, True, [(0, 256)], [225]),
        ([16, 4], None, 2, True, [(0, 128)], [80]),
        ([5000] * 3, 8000, 2, True, [(0, 10112), (10112, 15232)], [10056, 5000]),
        ([1000], None, 6, True, [(0, 1152)], [1000]),
        ([10000] * 3, 15000, 2, False, [(0, 20000), (20000, 30000)], [20000, 10000]),
    ],
)
def test_the_layout_is_the_references(
    numels: list[int],
    bucket_size: int | None,
    dp_size: int,
    padded: bool,
    buckets: list[tuple[int, int]],
    unpadded: list[int],
) -> None:
    layout = bucket_layout(numels, bucket_size=bucket_size, dp_size=dp_size, distributed_optimizer=padded)
    assert (layout.buckets, layout.unpadded) == (buckets, unpadded)


@pytest.mark.parametrize(
    ("numels", "bucket_size", "dp_size", "buckets", "unpadded"),
    [
        (TEN, None, 8, [(0, 9088), (9088, 90880)], [9025, 81729]),
        (TEN, 20000, 8, _ends(9088, 36352, 63616, 90880), [9025] + [27201] * 3),
        ([5000] * 4, 8000, 2, _ends(5120, 15232, 20352), [5000, 10056, 5000]),
    ],
)
def test_a_shared_embedding_that_is_registered_last_has_the_first_bucket_for_itself(
    numels: list[int], bucket_size: int | None, dp_size: int, buckets: list[tuple[int, int]], unpadded: list[int]
) -> None:
    layout = bucket_layout(
        numels,
        bucket_size=bucket_size,
        dp_size=dp_size,
        distributed_optimizer=True,
        shared_embeddings={len(numels) - 1},
    )
    assert (layout.buckets, layout.unpadded) == (buckets, unpadded)


def test_padding_for_high_bus_bandwidth() -> None:
    layout = bucket_layout([1000], bucket_size=None, dp_size=2, distributed_optimizer=True, pad_for_high_busbw=True)
    assert (layout.buckets, layout.unpadded) == ([(0, 65536)], [1000])


def test_parameters_start_where_the_reference_starts_them() -> None:
    for numels, starts in (([97, 103], {0, 128}), ([16, 4], {0, 64})):
        layout = bucket_layout(numels, bucket_size=None, dp_size=2, distributed_optimizer=True)
        assert {start for start, _, _ in layout.param_ranges} == starts


def test_the_default_bucket_grows_with_the_ranks() -> None:
    assert [default_bucket_size(ranks) for ranks in (1, 40, 41, 1000)] == [4 * 10**7, 4 * 10**7, 4.1 * 10**7, 10**9]


LAYOUTS = {
    "numels": st.lists(st.integers(1, 3000), max_size=30),
    "bucket_size": st.none() | st.integers(1, 5000),
    "dp_size": st.integers(1, 9),
    "distributed": st.booleans(),
    "busbw": st.booleans(),
    "shared": st.sets(st.integers(0, 29), max_size=3),
}


@given(**LAYOUTS)
def test_what_holds_for_every_layout(
    numels: Sequence[int], bucket_size: int | None, dp_size: int, distributed: bool, busbw: bool, shared: set[int]
) -> None:
    shared = {index for index in shared if index < len(numels)}
    layout = bucket_layout(
        numels,
        bucket_size=bucket_size,
        dp_size=dp_size,
        distributed_optimizer=distributed,
        shared_embeddings=shared,
        pad_for_high_busbw=busbw,
    )
    # Buckets cover the buffer, one behind the other, and none is empty.
    assert [start for start, _ in layout.buckets] == [0, *(end for _, end in layout.buckets)][: len(layout.buckets)]
    assert all(0 < size <= end - start for size, (start, end) in zip(layout.unpadded, layout.buckets, strict=True))
    assert layout.numel == (layout.buckets[-1][1] if numels else 0)
    # Parameters keep their sizes, lie in reverse order without overlap, and each in one bucket.
    assert [end - start for start, end, _ in layout.param_ranges] == list(numels)
    behind = 0
    for start, end, bucket in reversed(layout.param_ranges):
        assert behind <= start
        behind = end
        first, last = layout.buckets[bucket]
        assert first <= start < end <= first + layout.unpadded[bucket] <= last
    members = [
        [i for i, (_, _, b) in enumerate(layout.param_ranges) if b == bucket] for bucket in range(len(layout.buckets))
    ]
    for bucket, indices in enumerate(members):
        # Only the last parameter of a bucket brings it to the size that was asked for.
        start = layout.buckets[bucket][0]
        for index in indices[1:]:
            assert bucket_size is None or layout.param_ranges[index][1] - start < bucket_size
        assert distributed is False or len(indices) == 1 or not shared.intersection(indices)
    if not distributed:
        assert layout.numel == sum(numels)
        return
    multiple = math.lcm(dp_size, 128, 2**16 if busbw else 1)
    assert all(start % 64 == 0 for start, _, _ in layout.param_ranges)
    assert all(end % multiple == 0 for _, end in layout.buckets)


@given(**LAYOUTS)
def test_every_element_is_owned_once(
    numels: Sequence[int], bucket_size: int | None, dp_size: int, distributed: bool, busbw: bool, shared: set[int]
) -> None:
    shared = {index for index in shared if index < len(numels)}
    layout = bucket_layout(
        numels,
        bucket_size=bucket_size,
        dp_size=dp_size,
        distributed_optimizer=True,
        shared_embeddings=shared,
        pad_for_high_busbw=busbw,
    )
    for bucket, (start, end) in enumerate(layout.buckets):
        parts = [layout.part(bucket, rank) for rank in range(dp_size)]
        assert parts == [*zip([start, *(b for _, b in parts[:-1])], [*(b for _, b in parts[:-1]), end], strict=True)]
        assert len({b - a for a, b in parts}) == 1
    for index, numel in enumerate(numels):
        ranges = [each for each in (layout.owned(index, rank) for rank in range(dp_size)) if each != (0, 0)]
        assert [position for a, b in ranges for position in range(a, b)] == list(range(numel))
