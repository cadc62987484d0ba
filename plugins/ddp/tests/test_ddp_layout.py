"""The layout of buckets: cases that the reference's own layout yields, and what must hold for every model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright_ddp.bucket_ranges import BucketLayout, bucket_layout, default_bucket_size

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


@dataclass(frozen=True)
class Given:
    numels: list[int]
    bucket_size: int | None
    dp_size: int
    distributed: bool
    busbw: bool
    shared: frozenset[int]

    @property
    def layout(self) -> BucketLayout:
        return bucket_layout(
            self.numels,
            bucket_size=self.bucket_size,
            dp_size=self.dp_size,
            distributed_optimizer=self.distributed,
            shared_embeddings=self.shared,
            pad_for_high_busbw=self.busbw,
        )


def givens(distributed: st.SearchStrategy[bool]) -> st.SearchStrategy[Given]:
    return st.builds(
        Given,
        numels=st.lists(st.integers(1, 3000), max_size=30),
        bucket_size=st.none() | st.integers(1, 5000),
        dp_size=st.integers(1, 9),
        distributed=distributed,
        busbw=st.booleans(),
        shared=st.frozensets(st.integers(0, 29), max_size=3),
    )


@given(givens(st.booleans()))
def test_buckets_cover_the_buffer_in_order(given: Given) -> None:
    buckets, unpadded = given.layout.buckets, given.layout.unpadded
    assert [start for start, _ in buckets] == [0, *(end for _, end in buckets)][: len(buckets)]
    assert all(0 < size <= end - start for size, (start, end) in zip(unpadded, buckets, strict=True))
    assert given.layout.numel == (buckets[-1][1] if given.numels else 0)
    if not given.distributed:
        assert given.layout.numel == sum(given.numels)


@given(givens(st.booleans()))
def test_parameters_keep_their_sizes_and_lie_in_reverse_order_each_within_a_bucket(given: Given) -> None:
    layout, behind = given.layout, 0
    assert [end - start for start, end, _ in layout.param_ranges] == given.numels
    for start, end, bucket in reversed(layout.param_ranges):
        assert behind <= start
        behind = end
        first, last = layout.buckets[bucket]
        assert first <= start < end <= first + layout.unpadded[bucket] <= last


@given(givens(st.booleans()))
def test_only_the_last_parameter_of_a_bucket_brings_it_to_its_size(given: Given) -> None:
    layout = given.layout
    for bucket, (first, _) in enumerate(layout.buckets):
        members = [index for index, place in enumerate(layout.param_ranges) if place[2] == bucket]
        for index in members[1:]:
            assert given.bucket_size is None or layout.param_ranges[index][1] - first < given.bucket_size
        assert not given.distributed or len(members) == 1 or not given.shared.intersection(members)


@given(givens(st.just(True)))
def test_parameters_and_buckets_are_aligned(given: Given) -> None:
    multiple = math.lcm(given.dp_size, 128, 2**16 if given.busbw else 1)
    layout = given.layout
    assert all(start % 64 == 0 for start, _, _ in layout.param_ranges)
    assert all(end % multiple == 0 for _, end in layout.buckets)


@given(givens(st.just(True)))
def test_every_element_is_owned_once(given: Given) -> None:
    layout, ranks = given.layout, range(given.dp_size)
    for bucket, (start, end) in enumerate(layout.buckets):
        parts = [layout.part(bucket, rank) for rank in ranks]
        assert [low for low, _ in parts] == [start, *(high for _, high in parts[:-1])]
        assert parts[-1][1] == end
        assert len({high - low for low, high in parts}) == 1
    for index, numel in enumerate(given.numels):
        owned = [place for rank in ranks if (place := layout.owned(index, rank)) != (0, 0)]
        assert [low for low, _ in owned] == [0, *(high for _, high in owned[:-1])]
        assert owned[-1][1] == numel
