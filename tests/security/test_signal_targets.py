"""A signal reaches the process that it is for, and none that has its number later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from typing import Any

import pytest

from meshwright.base.processes import ProcessHandle, get_process_identity
from meshwright_run.launch import local


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no files of processes here")
def test_a_handle_sends_to_its_process_and_not_to_who_has_the_number_later(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    ended = _sleeper()
    handle = ProcessHandle(ended.pid, get_process_identity(ended.pid))
    assert handle.is_alive()
    handle.send_signal(signal.SIGKILL)
    assert ended.wait(20) == -signal.SIGKILL
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    assert not handle.is_alive()
    handle.send_signal(signal.SIGKILL)
    handle.close()
    assert sent == []


def test_the_reaper_spares_who_has_the_number_of_a_dead_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "KILL_DELAY_S", 0.2)
    roll = get_context("spawn").SimpleQueue()
    dead, alive, other = _sleeper(), _sleeper(), _sleeper()
    roll.put((0, (dead.pid, get_process_identity(dead.pid))))
    roll.put((1, (alive.pid, get_process_identity(alive.pid))))
    # A rank that has ended before it was looked at, and whose number another process has.
    roll.put((2, (other.pid, get_process_identity(dead.pid))))
    try:
        with local._Reaper(roll):
            time.sleep(0.5)
            dead.kill()
            dead.wait()
            assert alive.wait(20) == -signal.SIGKILL
            time.sleep(0.3)
            assert other.poll() is None
    finally:
        for each in (dead, alive, other):
            each.kill()
            each.wait()
