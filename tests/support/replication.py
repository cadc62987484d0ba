"""Commands that train and copy their state to memory, and the keepers that hold the copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from support.kill_sweep import TrainingRun, hash_weights, read_command_line
from support.launched_processes import build_clean_environment


class TrainingProcess(subprocess.Popen[bytes]):
    """A command that trains, in a session of its own, and its output."""

    def __init__(self, arguments: Sequence[str], said: Path, **environment: str) -> None:
        self._output_file = said
        options: Any = {"env": build_clean_environment(**environment), "start_new_session": True, "cwd": said.parent}
        with said.open("wb") as file:
            super().__init__(arguments, stdout=file, stderr=file, **options)

    @property
    def output(self) -> str:
        return self._output_file.read_text(errors="replace")

    def assert_succeeds(self) -> None:
        """Wait for the command to succeed."""
        assert self.wait(200) == 0, self.output[-4000:]


def start_training(run: TrainingRun, *settings: str) -> TrainingProcess:
    assignments = [part for each in settings for part in ("--set", each)]
    return TrainingProcess([sys.executable, "-m", "meshwright", "train", str(run.file), *assignments], output_path(run))


def output_path(run: TrainingRun) -> Path:
    return run.directory.with_name(f"{run.directory.name}.said")


def find_replica_servers(pid: int) -> list[int]:
    """List the living keepers that end with a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        words = read_command_line(int(path.name)).split(b"\0")
        if b"meshwright_replicate.server" in words and str(pid).encode() in words:
            found.append(int(path.name))
    return found


def wait_for_no_servers(pid: int) -> bool:
    until = time.monotonic() + 5
    while find_replica_servers(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not find_replica_servers(pid)


def find_anonymous_copies(pid: int) -> list[str]:
    """List the memory that keepers hold for a process. It must have no name, under which it would outlive them."""
    held = []
    for keeper in find_replica_servers(pid):
        for path in Path(f"/proc/{keeper}/fd").iterdir():
            with suppress(FileNotFoundError):
                held.append(os.readlink(path))
    assert not [each for each in held if each.startswith("/dev/shm/")]
    return [each for each in held if each.startswith("/memfd:meshwright-replica")]


def corrupt_copies(keeper: int) -> int:
    """Flip a bit in the middle of each part of a state that a keeper holds; return their number."""
    spoilt = 0
    for file in Path(f"/proc/{keeper}/fd").iterdir():
        if "meshwright-replica" not in os.readlink(file) or file.stat().st_size < 10_000:
            continue
        with file.open("r+b") as content:
            middle = file.stat().st_size // 2
            byte = os.pread(content.fileno(), 1, middle)[0]
            os.pwrite(content.fileno(), bytes([byte ^ 1]), middle)
        spoilt += 1
    return spoilt


def find_agent_ranks(pid: int) -> list[int]:
    """List the ranks that an agent of torchrun has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted({int(each) for each in children} - {*find_replica_servers(pid)})


def read_events(run: TrainingRun, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run.directory / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def step_reached(run: TrainingRun, step: int) -> Callable[[], bool]:
    return lambda: run.count_steps() >= step


def assert_same_results(run: TrainingRun, other: TrainingRun) -> None:
    assert run.read_metrics() == other.read_metrics()
    assert hash_weights(run.directory / "model") == hash_weights(other.directory / "model")
