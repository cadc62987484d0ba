"""A process that is stopped is ended by its companion, soon enough and for no other reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.kill_sweep import end_session, is_alive, make_run, read_command_line, wait_for_moment
from support.launched_processes import TORCHRUN, find_free_port
from support.replication import TrainingProcess, find_agent_ranks, output_path, step_reached

from meshwright_run.launch import external_watchdog

INTERVAL_S, PATIENCE_S = 0.1, 1.0
"""Shorter than runs have them."""
SLACK_S = 5.0
"""For a busy machine."""
IGNORED = [getattr(signal, name) for name in external_watchdog._IGNORED_SIGNALS]
RANK = f"""
import os, sys, time
from meshwright_run.launch import external_watchdog

external_watchdog.MIN_INTERVAL_S = 0.0
forks = "fork" in sys.argv
with external_watchdog.ExternalWatchdog(lambda: 1000.0 if forks else {PATIENCE_S - INTERVAL_S}, {INTERVAL_S}):
    if forks and not os.fork():
        time.sleep(1000)
    print("started", flush=True)
    sys.stdin.readline()
print("over", flush=True)
sys.stdin.readline()
"""


def companions_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if external_watchdog.__name__.encode() in read_command_line(int(child)).split(b"\0")
    ]


def ignored_by(pid: int) -> Callable[[int], bool]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return lambda number: bool(mask >> (number - 1) & 1)


class Rank(subprocess.Popen):
    """A process in such a context, and its companion."""

    def __init__(self, *options: str) -> None:
        pipe = subprocess.PIPE
        super().__init__(
            [sys.executable, "-c", RANK, *options], stdin=pipe, stdout=pipe, text=True, start_new_session=True
        )
        assert self.stdout is not None
        assert self.stdout.readline() == "started\n"
        (self.companion,) = companions_of(self.pid)
        assert come(lambda: all(map(ignored_by(self.companion), IGNORED)), SLACK_S)
        # It is given a patience.
        time.sleep(3 * INTERVAL_S)

    def continues(self) -> None:
        assert self.poll() is None
        assert is_alive(self.companion)


def come(what: Callable[[], bool], limit_s: float) -> bool:
    until_s = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen]]:
    every: list[subprocess.Popen] = []
    yield every
    for each in every:
        with suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)
        each.communicate()


def test_who_is_stopped_is_ended_when_its_patience_is_over_and_who_tells_is_not(started):
    for _ in range(2):
        started.append(Rank())
    stopped, other = started
    began = time.monotonic()
    stopped.send_signal(signal.SIGSTOP)
    assert stopped.wait(PATIENCE_S + SLACK_S) == -signal.SIGKILL
    # The last word was up to an interval old.
    assert time.monotonic() - began > PATIENCE_S - 2 * INTERVAL_S
    time.sleep(2 * PATIENCE_S)
    other.continues()


@pytest.mark.slow
def test_what_stops_a_rank_for_less_or_both_for_long_is_borne(started):
    started.append(rank := Rank())
    for _ in range(4):
        rank.send_signal(signal.SIGSTOP)
        time.sleep(PATIENCE_S / 4)
        rank.send_signal(signal.SIGCONT)
        time.sleep(4 * INTERVAL_S)
    rank.continues()
    os.killpg(rank.pid, signal.SIGSTOP)
    time.sleep(2 * PATIENCE_S)
    # Whichever continues first.
    os.kill(rank.companion, signal.SIGCONT)
    time.sleep(2 * INTERVAL_S)
    rank.send_signal(signal.SIGCONT)
    time.sleep(2 * PATIENCE_S)
    rank.continues()


@pytest.mark.slow
def test_a_companion_ends_with_its_rank_though_a_worker_lives_on_and_has_all_it_had_open(started):
    started.append(rank := Rank("fork"))
    rank.kill()
    rank.wait()
    assert come(lambda: not is_alive(rank.companion), INTERVAL_S + SLACK_S)


def test_a_companion_respects_no_signal_that_its_rank_may_live_through_and_ends_with_its_context(started):
    started.append(rank := Rank())
    for number in IGNORED:
        os.kill(rank.companion, number)
    time.sleep(2 * INTERVAL_S)
    assert is_alive(rank.companion)
    rank.stdin.write("\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "over\n"
    assert not is_alive(rank.companion)
    assert rank.poll() is None


@pytest.mark.filterwarnings("error")
def test_a_rank_without_a_companion_continues_and_says_so(monkeypatch):
    monkeypatch.setattr(external_watchdog, "SAFE_PYTHON", ("/nowhere/python",))
    with (
        pytest.warns(UserWarning, match="no watchdog would end this rank if it is stopped: no process started"),
        external_watchdog.ExternalWatchdog(lambda: PATIENCE_S, INTERVAL_S),
    ):
        pass


# -- runs under torchrun


@pytest.mark.slow
def test_a_rank_that_is_stopped_and_alone_on_its_node_is_ended_and_the_run_continues(tmp_path):
    """Its peers cannot end it, and its agent would wait for 30 s."""
    watchdog_s = 4.0
    run = make_run(tmp_path, "two nodes", {"strategy": "fsdp2", "steps": 2000, "watchdog_s": watchdog_s})
    meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{find_free_port()}", "--rdzv-id=run")
    options = (*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", *meeting)
    command = (*options, "-m", "meshwright", "train", str(run.file))
    agents = [TrainingProcess(command, output_path(run).with_suffix(f".{node}")) for node in (0, 1)]
    try:
        assert wait_for_moment(agents[0], step_reached(run, 5)), agents[0].output
        ranks = [pid for agent in agents for pid in find_agent_ranks(agent.pid)]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGSTOP)
        assert come(lambda: not any(map(is_alive, ranks)), watchdog_s + SLACK_S), [agent.output for agent in agents]
        said = "".join(agent.output for agent in agents)
        assert said.count(f"hangs: no heartbeat for {0.9 * watchdog_s:.0f} s") == 1, said
        done = run.count_steps()
        assert wait_for_moment(agents[0], step_reached(run, done + 5)), agents[0].output
    finally:
        for agent in agents:
            end_session(agent)
