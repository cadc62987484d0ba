"""What the caching allocator is modelled to take: never less than is held, nothing twice, and what is free is used."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.base.processes import ALLOCATOR_VARIABLES
from meshwright_plan.allocator import (
    LARGE_BUFFER,
    SMALL_BUFFER,
    SMALL_SIZE,
    Allocator,
    assign_streams,
    replay_allocations,
)
from meshwright_plan.trace import Operation

MIB = 1 << 20
sizes = st.one_of(st.integers(1, 4 * SMALL_SIZE), st.integers(1, 60 * MIB))  # Of both pools
changes = st.lists(st.tuples(sizes, st.sampled_from(["compute", "gather"]), st.booleans()), max_size=60)


@pytest.mark.parametrize("expandable", [True, False])
@settings(max_examples=60, deadline=None)
@given(changes, st.randoms(use_true_random=False))
def test_memory_is_held_once_and_taken_in_granules(expandable, steps, random):
    allocator, held = Allocator(expandable=expandable), {}
    for block, (size, stream, frees) in enumerate(steps):
        if frees and held:
            gone = random.choice(list(held))
            allocator.update(gone, -held.pop(gone))
        before = allocator.reserved
        allocator.update(block, size, stream)
        held[block] = size
        assert sum(held.values()) <= allocator.allocated <= allocator.reserved
        assert (allocator.reserved - before) % SMALL_BUFFER == 0
        for pool in allocator._pools.values():
            # Live and free blocks do not overlap and are all that is mapped.
            ranges = sorted([*pool.live.values(), *pool._free_by_start.items()])
            assert all(one + length <= other for (one, length), (other, _) in itertools.pairwise(ranges))
            assert sum(size for _, size in ranges) == pool.mapped
            free = set(pool._free_by_start)
            assert not any(start + size in free for start, size in pool._free_by_start.items())
    for block, size in held.items():
        allocator.update(block, -size)
    assert allocator.allocated == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=20))
def test_what_is_free_is_used_again(made):
    allocator = Allocator(expandable=True)
    taken = set()
    for _ in range(4):
        for block, size in enumerate(made):
            allocator.update(block, size)
        taken.add(allocator.reserved)
        for block, size in enumerate(made):
            allocator.update(block, -size)
    rounded = [-(-size // 512) * 512 for size in made]
    small, large = (sum(s for s in rounded if (s <= SMALL_SIZE) is is_small) for is_small in (True, False))
    assert taken == {-(-small // SMALL_BUFFER) * SMALL_BUFFER + -(-large // LARGE_BUFFER) * LARGE_BUFFER}


def test_the_smallest_that_fits_is_taken_and_the_end_last():
    allocator = Allocator(expandable=True)
    for block, size in enumerate([30, 2, 20, 2]):
        allocator.update(block, size * MIB)
    allocator.update(0, -30 * MIB)
    allocator.update(2, -20 * MIB)
    segment = allocator._pools["compute", False]
    allocator.update(4, 5 * MIB)  # 54 of 60 MiB: the end has 6
    allocator.update(5, 25 * MIB)
    assert (segment.live[4][0], segment.live[5][0], allocator.reserved) == (32 * MIB, 0, 60 * MIB)


def test_streams_do_not_share_memory_and_a_block_that_is_resized_moves():
    log = [(0, 40 * MIB), (0, -40 * MIB), (1, 40 * MIB)]
    assert (replay_allocations(log, {}).reserved, replay_allocations(log, {1: "gather"}).reserved) == (
        40 * MIB,
        80 * MIB,
    )
    allocator = replay_allocations([(0, 30 * MIB), (1, 2 * MIB), (0, -30 * MIB), (0, 36 * MIB)], {})
    assert (allocator.allocated, allocator.reserved) == (38 * MIB, 80 * MIB)


@pytest.mark.parametrize(("name", "stream"), [("fsdp.all_gather_copy_in", "gather"), ("aten.mm", None)])
def test_the_first_operator_tells_the_stream(name, stream):
    made = [("aten.empty.memory_format", (), ((3, 8),)), (f"{name}.default", ((1, 8),), ((3, 8),))]
    operations = [Operation(name, 0, 0, (), torch.float32, None, reads, writes) for name, reads, writes in made]
    assert assign_streams(operations).get(3) == stream


def test_fixed_segments_are_taken_by_size_and_split_and_joined_as_torch_does():
    allocator = Allocator(expandable=False)
    allocator.update(0, 600_000)  # up to 1 MiB: a segment of 2 MiB
    assert allocator.reserved == 2 * MIB
    allocator.update(1, 3 * MIB)  # less than 10 MiB: one of 20 MiB
    allocator.update(2, 16 * MIB)  # of which 17 MiB are left
    assert allocator.reserved == 22 * MIB
    assert allocator.allocated == 600_064 + 20 * MIB  # the last MiB is not split off
    allocator.update(3, 10 * MIB + 1)  # else in multiples of 2 MiB
    assert allocator.reserved == 34 * MIB
    allocator.update(1, -3 * MIB)
    allocator.update(2, -16 * MIB)
    allocator.update(4, 20 * MIB)  # joined within their segment, and not with the next one
    assert allocator.reserved == 34 * MIB
    allocator.update(5, 21 * MIB)
    assert allocator.reserved == 56 * MIB


@pytest.mark.parametrize(("setting", "expected"), [(None, 60), ("max_split_size_mb:512", 42)])
def test_the_environment_says_which_segments_are_planned(monkeypatch, setting, expected):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if setting is not None:
        monkeypatch.setenv(ALLOCATOR_VARIABLES[0], setting)
    allocator = Allocator()
    allocator.update(0, 41 * MIB)
    assert allocator.reserved == expected * MIB
