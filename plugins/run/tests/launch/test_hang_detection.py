"""Which rank hangs, judged by heartbeats without processes; which rank is a straggler."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from meshwright.events.step import StepResult
from meshwright.mesh.progress import HeartbeatRecord, Progress, TrainingPhase
from meshwright_run.launch.hang_detection import (
    FINISHED,
    HangReport,
    describe_hung_rank,
    find_culprits,
    find_stalled_ranks,
    read_heartbeats,
)
from meshwright_run.launch.heartbeat import Heartbeat, write_heartbeat
from meshwright_run.metrics_report import StragglerFilter, read_metrics, to_record
from meshwright_run.observers import StragglerDetector
from meshwright_run.run_sections import StragglersConfig

INTERVAL_S = 2.0
LIMIT_S = 90.0


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def pulse_of(store: HashStore, rank: int) -> Heartbeat:
    return Heartbeat(store, rank, 3, timeout_s=LIMIT_S / 0.9, on_hang=print)


def looks(pulse: Heartbeat, seconds: float) -> list[int]:
    """What the last of so many looks finds, one each interval."""
    silent: list[int] = []
    for _ in range(int(seconds / INTERVAL_S)):
        silent = pulse.find_silent_ranks(INTERVAL_S)
    return silent


def test_a_count_that_stands_still_for_too_long_is_silence(store):
    pulse = pulse_of(store, 0)
    write_heartbeat(store, 2, 5, INTERVAL_S)
    for count in range(46):
        write_heartbeat(store, 1, count, INTERVAL_S)
        assert pulse.find_silent_ranks(INTERVAL_S) == []
    write_heartbeat(store, 1, 46, INTERVAL_S)
    assert pulse.find_silent_ranks(INTERVAL_S) == [2]
    write_heartbeat(store, 2, 6, INTERVAL_S)
    assert pulse.find_silent_ranks(INTERVAL_S) == []


def test_a_rank_without_a_sign_is_silent_and_one_that_is_done_or_a_reader_that_was_stopped_is_no_alarm(store):
    write_heartbeat(store, 1, FINISHED, INTERVAL_S)
    pulse = pulse_of(store, 0)
    assert looks(pulse, LIMIT_S) == []
    assert looks(pulse, 2 * LIMIT_S) == [2]
    # Other ranks watch the first one alone.
    assert looks(pulse_of(store, 2), 2 * LIMIT_S) == [0]
    for rank in (1, 2):
        write_heartbeat(store, rank, 0, INTERVAL_S)
    stopped = pulse_of(store, 0)
    stopped.find_silent_ranks(INTERVAL_S)
    assert stopped.find_silent_ranks(10 * LIMIT_S) == []


def test_a_sign_tells_where_the_main_thread_is_and_says_the_same_when_it_is_read(store):
    write_heartbeat(store, 0, 3, INTERVAL_S)
    found = read_heartbeats(store, [0, 1])[0]
    assert "hang_detection.py:" in found.location
    assert (found.sequence_number, found.is_communicating) == (3, False)
    written = sign(stack=("a.py:1 in f", "b.py:2 in g"), busy_s=0.5, step_s=1.0, num_steps=20)
    assert HeartbeatRecord.from_json(written.to_json()) == written


def test_without_signs_or_where_all_wait_nobody_stands_out(store, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: write_heartbeat(store, 1, 1, INTERVAL_S))
    assert describe_hung_rank(store, 0, 2, list) is None
    write_heartbeat(store, 1, 0, INTERVAL_S)
    assert describe_hung_rank(store, 0, 2, lambda: [1]) is None
    write_heartbeat(store, 1, 0, INTERVAL_S)
    assert "rank 1 did not reach the point where rank 0 waits" in str(describe_hung_rank(store, 0, 2, list))
    write_heartbeat(store, 1, 1, INTERVAL_S)
    assert "no heartbeat" in str(describe_hung_rank(store, 0, 2, list))


def sign(step: int = 5, part: int = 2, *, still_s: float = 9.0, waits: bool = False, **more: Any) -> HeartbeatRecord:
    at = TrainingPhase(
        step, part, "forward_backward", more.pop("moves", 0), more.pop("settled", True), more.pop("patient", False)
    )
    return HeartbeatRecord(
        more.pop("sequence_number", 7), "host, process 1", waits, "x.py:1 in f", 0.2, at, still_s, **more
    )


def test_the_ranks_at_the_earliest_position_stand_still_or_nobody_does():
    ahead, behind = sign(5, 3), sign(5, 2)
    assert find_stalled_ranks({0: ahead, 1: behind}, 4.0) == [1]
    assert find_stalled_ranks({0: ahead, 1: replace(behind, stalled_s=3.0)}, 4.0) == []
    assert find_stalled_ranks({0: ahead, 1: behind, 2: sign(5, 2, still_s=1.0)}, 4.0) == []
    assert find_stalled_ranks({0: sign(6, 1), 1: behind}, 4.0) == [1]
    # In what may be slow, before a step is done, or where all is done.
    assert find_stalled_ranks({0: ahead, 1: sign(5, 2, patient=True)}, 4.0) == []
    assert find_stalled_ranks({0: ahead, 1: sign(0, 1, settled=False)}, 4.0) == []
    assert (
        find_stalled_ranks(
            {0: replace(ahead, sequence_number=FINISHED), 1: replace(behind, sequence_number=FINISHED)}, 4.0
        )
        == []
    )


def test_of_ranks_at_one_place_the_one_is_named_that_does_not_wait_or_has_started_less():
    assert find_culprits({0: HangReport(sign(waits=True)), 1: HangReport(sign()), 2: HangReport(sign(waits=True))}) == [
        1
    ]
    assert find_culprits({0: HangReport(sign(5, 1, waits=True)), 1: HangReport(sign())}) == [0]
    # As with NCCL: all are in a wait for the device.
    counts = {"dp": (7, 7, 6)}
    reports = {rank: HangReport(sign(), counts) for rank in range(3)}
    assert find_culprits(reports) == [0, 1, 2]
    assert find_culprits(reports | {1: HangReport(sign(), {"dp": (7, 6, 6)})}) == [1]
    assert find_culprits(reports | {2: HangReport(sign(), {"other": (1, 1, 1)})}) == [0, 1, 2]
    assert find_culprits({0: HangReport(sign(moves=3)), 1: HangReport(sign(moves=2))}) == [1]


def owns(*seconds: float, steps: int = 20) -> dict[int, HeartbeatRecord]:
    return {rank: sign(busy_s=own, step_s=0.2, num_steps=steps) for rank, own in enumerate(seconds)}


@pytest.mark.parametrize(
    ("signs", "config", "named"),
    [
        (owns(0.01, 0.011, 0.012, 0.06), {}, [3]),
        (owns(0.01, 0.011, 0.012, 0.06, steps=19), {}, []),
        (owns(0.01, 0.011, 0.012, 0.06, steps=5), {"window_steps": 5}, [3]),
        (owns(0.01, 0.011, 0.012, 0.06), {"deviations": 100.0}, []),
        # Less than 5 % of a step, and fewer than four ranks.
        (owns(0.01, 0.01, 0.01, 0.018), {}, []),
        (owns(0.01, 0.011, 0.06), {}, []),
    ],
    ids=["slow", "few steps", "over=5", "deviations=100", "little of a step", "three ranks"],
)
def test_stragglers_are_judged_by_the_signs_of_all_ranks(signs, config, named):
    progress = Progress()
    asked = StragglersConfig(**config)
    watching = StragglerDetector(asked, progress)
    assert watching() == ()
    for step, expected in ((20, []), (20 + asked.window_steps - 1, []), (20 + asked.window_steps, named)):
        progress.heartbeats = {rank: replace(each, phase=TrainingPhase(step)) for rank, each in signs.items()}
        assert [each["rank"] for each in watching()] == expected
    # A rank that is fast for a moment is named again only when it has been slow for as many steps.
    progress.heartbeats = owns(0.01, 0.01, 0.01, 0.01)
    assert watching() == ()
    progress.heartbeats = {rank: replace(each, phase=TrainingPhase(1000)) for rank, each in signs.items()}
    assert watching() == ()


def test_a_straggler_is_reported_once_and_kept_in_the_metrics(tmp_path):
    slow = {"rank": 3, "seconds": 0.06, "median": 0.01, "deviations": float("inf")}
    result = StepResult(1, 2, 1.0, 1.0, 0.1, 10, 0.5, 0, stragglers=(slow,))
    new = StragglerFilter()
    assert [len(new.select_new(each)) for each in (replace(result, stragglers=()), result, result)] == [0, 1, 0]
    record = to_record(result)
    assert record["stragglers"] == [slow | {"deviations": None}]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (read,) = read_metrics(tmp_path / "metrics.jsonl", last_step=2, num_steps=2)
    assert read.stragglers[0]["rank"] == 3
    assert to_record(read) == record
