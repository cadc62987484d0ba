"""The pool of worker ranks that all parity tests use."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright import RankError
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, train_case


def _on_rank_1(what: str) -> tuple[int, int]:
    """Do something to rank 1; otherwise return the sum over ranks, and the process."""
    if dist.get_rank() == 1 and what == "fail":
        raise ValueError("planted on rank 1")
    if dist.get_rank() == 1 and what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1 and what == "hang":
        time.sleep(60)
    total = torch.tensor([dist.get_rank() + 1])
    if what != "hang":
        dist.all_reduce(total)
    return int(total), os.getpid()


def _pids() -> set[int]:
    return {pid for _, pid in pool(2).run(_on_rank_1, "nothing")}


def test_workers_stay_between_tasks_but_a_failing_rank_is_named_and_the_next_task_gets_new_ones() -> None:
    (one, pid), (two, other) = pool(2).run(_on_rank_1, "nothing")
    before, start = _pids(), time.monotonic()
    assert (one, two, before) == (3, 3, {pid, other})
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:\n(.|\n)*planted on rank 1"):
        pool(2).run(_on_rank_1, "fail")
    assert time.monotonic() - start < 30, "peers of a failed rank must not wait for their collective to time out"
    assert not before & _pids()


@pytest.mark.slow
def test_a_worker_that_dies_between_tasks_is_reported_and_replaced() -> None:
    before = pool(2).run(_on_rank_1, "nothing")
    os.kill(before[1][1], signal.SIGKILL)
    with pytest.warns(UserWarning, match="a worker died after a task had ended"):
        assert not {pid for _, pid in before} & _pids()


@pytest.mark.slow
def test_a_killed_rank_and_a_hanging_rank_are_named() -> None:
    # Rank 0 may see the closed connection before the parent sees the death.
    with pytest.raises(RankError, match=r"rank 1 of 2 died with signal SIGKILL|rank 0 of 2 failed"):
        pool(2).run(_on_rank_1, "die")
    _pids()  # Starting workers takes a while on a busy machine.
    with pytest.raises(RankError, match="more than 5 s on rank 1 of 2"):
        pool(2).run(_on_rank_1, "hang", timeout_s=5.0)


def _train(sizes: dict[str, int]) -> None:
    # A full state, so that torch plans how to gather each kind of placement.
    train_case("fsdp2", {}, sizes, Case(steps=1))
    build_manager("fsdp2", {}, sizes, Case(steps=1)).state_dict(full=True)


def _threads() -> int:
    return threading.active_count() + len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_process_groups_of_earlier_tasks_leave_no_threads(sizes: dict[str, int]) -> None:
    counts = []
    for _ in range(4):
        pool(4).run(_train, sizes)
        counts.append(pool(4).run(_threads))
    assert max(counts[-1]) <= max(counts[0]), counts
