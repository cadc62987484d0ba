"""Signs of life in a store, without processes: who is taken for silent, and who is not."""

from __future__ import annotations

import time

import pytest
from torch.distributed import HashStore

from meshwright.launch.hang import who_hangs
from meshwright.launch.pulse import Pulse, write_sign
from meshwright.launch.signs import DONE, read_signs

INTERVAL_S = 2.0
LIMIT_S = 90.0


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def first_ranks_pulse(store: HashStore, size: int = 3) -> Pulse:
    return Pulse(store, 0, size, timeout_s=LIMIT_S / 0.9, on_hang=print)


def looks(pulse: Pulse, seconds: float) -> list[int]:
    """What the last of so many looks finds, one each interval."""
    silent: list[int] = []
    for _ in range(int(seconds / INTERVAL_S)):
        silent = pulse.look(INTERVAL_S)
    return silent


def test_a_count_that_stands_still_for_too_long_is_silence(store):
    pulse = first_ranks_pulse(store)
    write_sign(store, 2, 5, INTERVAL_S)
    for count in range(46):
        write_sign(store, 1, count, INTERVAL_S)
        assert pulse.look(INTERVAL_S) == []
    write_sign(store, 1, 46, INTERVAL_S)
    assert pulse.look(INTERVAL_S) == [2]
    write_sign(store, 2, 6, INTERVAL_S)
    assert pulse.look(INTERVAL_S) == []


def test_a_rank_that_has_never_given_a_sign_is_silent_and_one_that_is_done_is_not(store):
    pulse = first_ranks_pulse(store)
    write_sign(store, 1, DONE, INTERVAL_S)
    assert looks(pulse, LIMIT_S) == []
    assert looks(pulse, 2 * LIMIT_S) == [2]


def test_a_reader_that_was_stopped_itself_takes_nobody_for_silent(store):
    pulse = first_ranks_pulse(store)
    for rank in (1, 2):
        write_sign(store, rank, 0, INTERVAL_S)
    pulse.look(INTERVAL_S)
    assert pulse.look(10 * LIMIT_S) == []


def test_other_ranks_watch_the_first_one_alone(store):
    pulse = Pulse(store, 2, 3, timeout_s=LIMIT_S / 0.9, on_hang=print)
    write_sign(store, 1, 0, INTERVAL_S)
    assert looks(pulse, 2 * LIMIT_S) == [0]


def test_a_sign_tells_where_the_main_thread_is(store):
    write_sign(store, 0, 3, INTERVAL_S)
    sign = read_signs(store, [0, 1])[0]
    assert "tests/launch/test_pulse.py:" in sign.place or "signs.py:" in sign.place
    assert (sign.count, sign.waits) == (3, False)


def test_without_signs_or_where_all_wait_nobody_stands_out(store, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: write_sign(store, 1, 1, INTERVAL_S))
    assert who_hangs(store, 0, 2, list) is None
    write_sign(store, 1, 0, INTERVAL_S)
    assert who_hangs(store, 0, 2, lambda: [1]) is None
    write_sign(store, 1, 0, INTERVAL_S)
    assert "rank 1 did not come to where rank 0 waits" in str(who_hangs(store, 0, 2, list))
    write_sign(store, 1, 1, INTERVAL_S)
    assert "rank 1 (" in str(who_hangs(store, 0, 2, list))
    assert "no sign of life" in str(who_hangs(store, 0, 2, list))
