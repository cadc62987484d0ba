"""A run that a signal asks to stop saves, leaves with the code that was asked for, and goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kill_sweep import Run, end_session, fingerprint, finish, make_run
from test_cli import LAUNCHER_VARIABLES
from torch import Tensor

from meshwright import Checkpointer, EMAConfig, Loop, fit
from meshwright.base.errors import ConfigError
from meshwright.launch.stopping import SAME_S, Stopped, StopSignals
from meshwright.testing import Case, pool
from meshwright.testing.case import share
from meshwright.testing.collectives import measure_collectives
from meshwright.testing.parity import build_manager
from meshwright.train.run_sections import CheckpointConfig

STEPS = 60
LAYOUT: dict[str, Any] = {
    "strategy": "fsdp2",
    "nproc": 2,
    "steps": STEPS,
    "schedule": {"name": "cosine", "warmup_steps": 4},
    "checkpoint": {"every": 11, "keep_last": 2},
    "eval": {"every": 25, "sequences": 4},
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PROMPT_S = 60.0
EMA = EMAConfig(decay=0.5)


def _stop(run: Run, after: int, number: int, victim: str, *, launcher: Sequence[str] = ()) -> tuple[int, str]:
    """Train until so many steps are done, and send a signal; the exit code, and what was said."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "meshwright", "train", str(run.file)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        deadline_s = time.monotonic() + PROMPT_S * 2
        while run.steps_done() < after:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline_s
            time.sleep(0.002)
        if victim == "all":
            os.killpg(process.pid, number)
        else:
            os.kill(process.pid if victim == "parent" else _rank_1(process.pid), number)
        said, _ = process.communicate(timeout=PROMPT_S)
        return process.returncode, said
    finally:
        end_session(process)


def _rank_1(launcher: int) -> int:
    """Its process, of those that torchrun has started, each in a session of its own."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == launcher and b"\0RANK=1\0" in b"\0" + (path / "environ").read_bytes():
                    return int(path.name)
    raise AssertionError(f"{launcher} has no rank 1")


def test_a_run_stopped_time_and_again_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, run = (make_run(tmp_path, name, LAYOUT) for name in ("whole", "stopped"))
    finish("train", str(whole.file))
    # Whoever gets the signal, all ranks save the same step: between checkpoints, and in the middle of an epoch.
    for after, number, victim, launcher, expected in (
        (5, signal.SIGTERM, "parent", (), 143),
        (15, signal.SIGUSR1, "parent", (), 143),
        (25, signal.SIGTERM, "all", (), 143),
        (32, signal.SIGTERM, "parent", TORCHRUN, 1),
        (40, signal.SIGUSR1, "one rank", TORCHRUN, 1),
    ):
        code, said = _stop(run, after, number, victim, launcher=launcher)
        assert code == expected, said
        done = run.steps_done()
        assert after <= done < STEPS
        name = signal.Signals(number).name
        assert f"stopped by {name} after step {done} of {STEPS}, saved; the same command goes on" in said
        assert run.newest().name == f"step-{done:08d}", said
        assert "Traceback" not in said.replace(_agents_traceback(said), "")
    finish("train", str(run.file))
    assert run.numbers() == whole.numbers()
    assert fingerprint(run.directory / "model") == fingerprint(whole.directory / "model")


def _agents_traceback(said: str) -> str:
    """What torchrun itself has to say of a signal, or of ranks that left with another code than 0."""
    start = said.find("Traceback")
    return said[start:] if start >= 0 and "torch/distributed/run.py" in said else ""
