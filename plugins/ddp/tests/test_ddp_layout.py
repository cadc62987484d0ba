"""The layout of buckets: cases that the reference's own layout yields, and what must hold for every model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright_ddp.buckets import BucketLayout, compute_bucket_layout, compute_default_bucket_size

TEN = [9025] * 10
SHARED = {"separate_params": {9}}


def _ends(*ends: int) -> list[tuple[int, int]]:
    return list(zip((0, *ends[:-1]), ends, strict=True))


@pytest.mark.parametrize(
    ("numels", "bucket_size", "dp_size", "options", "buckets", "unpadded"),
    [
        (TEN, 18050, 8, None, _ends(*range(18050, 90251, 18050)), [18050] * 5),
        ([10000] * 3, 15000, 2, None, [(0, 20000), (20000, 30000)], [20000, 10000]),
        (TEN, 18050, 8, {}, _ends(*range(18176, 90881, 18176)), [18113] * 5),
        (TEN, 9000, 8, {}, _ends(*range(9088, 90881, 9088)), [9025] * 10),
        (TEN, 20000, 8, {}, _ends(27264, 54528, 81792, 90880), [27201] * 3 + [9025]),
        ([9025, 95] * 10, 9050, 8, {}, _ends(*range(9216, 92161, 9216)), [9153] * 10),
        ([97, 103], None, 2, {}, [(0, 256)], [225]),
        ([16, 4], None, 2, {}, [(0, 128)], [80]),
        ([5000] * 3, 8000, 2, {}, [(0, 10112), (10112, 15232)], [10056, 5000]),
        ([1000], None, 6, {}, [(0, 1152)], [1000]),
        ([1000], None, 2, {"pad_for_high_busbw": True}, [(0, 65536)], [1000]),
        # A shared embedding that is registered last has the first bucket for itself.
        (TEN, None, 8, SHARED, [(0, 9088), (9088, 90880)], [9025, 81729]),
        (TEN, 20000, 8, SHARED, _ends(9088, 36352, 63616, 90880), [9025] + [27201] * 3),
        ([5000] * 4, 8000, 2, {"separate_params": {3}}, _ends(5120, 15232, 20352), [5000, 10056, 5000]),
    ],
)
def test_the_layout_is_the_references(
    numels: list[int],
    bucket_size: int | None,
    dp_size: int,
    options: dict[str, Any] | None,
    buckets: list[tuple[int, int]],
    unpadded: list[int],
) -> None:
    """With the distributed optimizer where there are options."""
    layout = compute_bucket_layout(
        numels,
        bucket_size=bucket_size,
        dp_size=dp_size,
        use_distributed_optimizer=options is not None,
        **options or {},
    )
    assert (layout.buckets, layout.unpadded) == (buckets, unpadded)


def test_the_default_bucket_grows_with_the_ranks() -> None:
    assert [compute_default_bucket_size(ranks) for ranks in (1, 40, 41, 1000)] == [
        4 * 10**7,
        4 * 10**7,
        4.1 * 10**7,
        10**9,
    ]


def options_of_layouts(distributed: st.SearchStrategy[bool]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "numels": st.lists(st.integers(1, 3000), max_size=30),
            "bucket_size": st.none() | st.integers(1, 5000),
            "dp_size": st.integers(1, 9),
            "use_distributed_optimizer": distributed,
            "pad_for_high_busbw": st.booleans(),
            "separate_params": st.frozensets(st.integers(0, 29), max_size=3),
        }
    )


@given(options_of_layouts(st.booleans()))
def test_buckets_cover_the_buffer_in_order_and_hold_whole_parameters_in_reverse_order(options: dict[str, Any]) -> None:
    layout: BucketLayout = compute_bucket_layout(**options)
    numels, size = options["numels"], options["bucket_size"]
    assert [start for start, _ in layout.buckets] == [0, *(end for _, end in layout.buckets)][: len(layout.buckets)]
    assert all(0 < size <= end - start for size, (start, end) in zip(layout.unpadded, layout.buckets, strict=True))
    assert layout.numel == (layout.buckets[-1][1] if numels else 0)
    assert options["use_distributed_optimizer"] or layout.numel == sum(numels)
    assert [end - start for start, end, _ in layout.param_ranges] == numels
    behind = 0
    for start, end, bucket in reversed(layout.param_ranges):
        assert behind <= start
        behind = end
        first, last = layout.buckets[bucket]
        assert first <= start < end <= first + layout.unpadded[bucket] <= last
    for (first, _), members in zip(layout.buckets, layout.param_indices, strict=True):
        # Only the last parameter of a bucket brings it to its size.
        assert all(size is None or layout.param_ranges[index][1] - first < size for index in members[1:])
        is_alone = len(members) == 1 or not options["separate_params"].intersection(members)
        assert is_alone or not options["use_distributed_optimizer"]


@given(options_of_layouts(st.just(True)))
def test_parameters_and_buckets_are_aligned_and_every_element_is_owned_once(options: dict[str, Any]) -> None:
    layout, ranks = compute_bucket_layout(**options), range(options["dp_size"])
    multiple = math.lcm(options["dp_size"], 128, 2**16 if options["pad_for_high_busbw"] else 1)
    assert all(start % 64 == 0 for start, _, _ in layout.param_ranges)
    assert all(end % multiple == 0 for _, end in layout.buckets)
    for bucket, (start, end) in enumerate(layout.buckets):
        parts = [layout.shard_range(bucket, rank) for rank in ranks]
        assert [low for low, _ in parts] == [start, *(high for _, high in parts[:-1])]
        assert parts[-1][1] == end
        assert len({high - low for low, high in parts}) == 1
    for index, numel in enumerate(options["numels"]):
        owned = [place for rank in ranks if (place := layout.owned_param_range(index, rank)) != (0, 0)]
        assert [low for low, _ in owned] == [0, *(high for _, high in owned[:-1])]
        assert owned[-1][1] == numel
