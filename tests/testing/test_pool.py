"""The pool of worker ranks that all parity tests stand on."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright import RankError
from meshwright.testing import Case, pool
from meshwright.testing.parity import build_manager, train_case


def _sum() -> int:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return int(total)


def _pid() -> int:
    return os.getpid()


def _fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError(f"planted on rank {rank}")
    return _sum()


def _die_on(rank: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return _sum()


def _hang_on(rank: int) -> int:
    if dist.get_rank() == rank:
        time.sleep(60)
    return dist.get_rank()


def test_results_come_in_order_of_rank_from_one_process_group() -> None:
    assert pool(3).run(_sum) == [6, 6, 6]


def test_workers_stay_between_tasks() -> None:
    assert pool(2).run(_pid) == pool(2).run(_pid)


def test_a_worker_that_dies_between_tasks_is_told_and_replaced() -> None:
    before = pool(2).run(_pid)
    os.kill(before[1], signal.SIGKILL)
    with pytest.warns(UserWarning, match="a worker died after a task had ended"):
        after = pool(2).run(_pid)
    assert set(before).isdisjoint(after)


def _group(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> None:
    case = Case(steps=1)
    # A full state, so that torch plans how to gather each kind of placement.
    train_case(strategy, config, sizes, case)
    build_manager(strategy, config, sizes, case).state_dict(full=True)


def _threads() -> int:
    return threading.active_count() + len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux shows them")
@pytest.mark.parametrize(
    ("strategy", "config", "sizes"),
    [
        ("fsdp2", {}, {"dp_replicate_size": 2}),
        ("fsdp2", {}, {"tp_size": 2}),
        ("ddp", {}, {}),
        ("ddp", {"engine": "bucketed", "use_distributed_optimizer": True, "overlap_grad_reduce": True}, {}),
        ("megatron_fsdp", {}, {}),
        ("fsdp2", {}, {"pp_size": 2}),
    ],
    ids=str,
)
def test_process_groups_of_earlier_tasks_leave_no_threads(
    strategy: str, config: dict[str, Any], sizes: dict[str, int]
) -> None:
    counts = []
    for _ in range(4):
        pool(4).run(_group, strategy, config, sizes)
        counts.append(pool(4).run(_threads))
    assert max(counts[-1]) <= max(counts[0]), counts


def test_the_failing_rank_is_told_and_the_next_task_gets_new_workers() -> None:
    before = pool(2).run(_pid)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:\n(.|\n)*planted on rank 1"):
        pool(2).run(_fail_on, 1)
    assert time.monotonic() - start < 30, "peers of a failed rank must not wait for their collective to time out"
    assert not set(before) & set(pool(2).run(_pid))


def test_a_killed_rank_is_told() -> None:
    # Rank 0 may see the closed connection before the parent sees the death.
    with pytest.raises(RankError, match=r"rank 1 of 2 died with signal SIGKILL|rank 0 of 2 failed"):
        pool(2).run(_die_on, 1)


def test_a_hanging_rank_is_told_by_number() -> None:
    pool(2).run(_pid)  # Starting workers takes a while on a busy machine.
    with pytest.raises(RankError, match="more than 5 s on rank 1 of 2"):
        pool(2).run(_hang_on, 1, timeout_s=5.0)
