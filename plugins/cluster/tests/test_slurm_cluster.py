"""A job that `meshwright launch` submits to a real Slurm is pre-empted, queued again, continues, and ends the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import LAUNCHER_VARIABLES
from support.kill_sweep import TrainingRun, hash_weights, make_run, run_to_end
from support.slurm import SlurmCluster, find_missing_requirement

pytestmark = [pytest.mark.zoo, pytest.mark.skipif(bool(find_missing_requirement()), reason=find_missing_requirement())]

STEPS = 300
LAYOUT: dict[str, Any] = {
    "strategy": "fsdp2",
    "nproc": 2,
    "steps": STEPS,
    "checkpoint": {"every": 1000},
    "schedule": {"name": "cosine", "warmup_steps": 20},
    "eval": {"every": 90, "max_sequences": 4},
    "launch": {
        "ranks_per_node": 2,
        "python": sys.executable,
        "grace_s": 60,
        "env": {"GLOO_SOCKET_IFNAME": "lo"},
        "slurm": {"partition": "low"},
    },
}
DISTANT_S = 120.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    place = Path(tempfile.mkdtemp(prefix="meshwright"))
    try:
        with SlurmCluster(place / "slurm") as found:
            yield found
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _submitted(cluster: SlurmCluster, run: TrainingRun) -> str:
    environment = {name: value for name, value in cluster.environment.items() if name not in LAUNCHER_VARIABLES}
    out = run.directory.with_name(f"{run.directory.name}-job")
    arguments = ("launch", str(run.file), "--to", "slurm", "--submit", "--out", str(out))
    words, place = [sys.executable, "-m", "meshwright", *arguments], run.file.parent
    done = subprocess.run(words, env=environment, cwd=place, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (number,) = re.findall(r"Submitted batch job (\d+)", done.stdout)
    return str(number)


def _await_step(cluster: SlurmCluster, number: str, run: TrainingRun, step: int) -> None:
    end = time.monotonic() + DISTANT_S
    while run.count_steps() < step:
        assert time.monotonic() < end, f"{_log(run)}{cluster.read_job(number)}{cluster.logs()}"
        time.sleep(0.01)


def _begin_again(cluster: SlurmCluster, number: str) -> None:
    """Start a requeued job without the two minutes of Slurm's delay."""
    cluster.wait_for_state(number, "PENDING")
    # A node refuses a job whose credential is of the second in which the node was last reported to end that job.
    time.sleep(2)
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now")


def _log(run: TrainingRun) -> str:
    return "".join(path.read_text() for path in run.directory.with_name(f"{run.directory.name}-job").glob("*.log"))


def _saved(run: TrainingRun) -> list[int]:
    """Steps that a signal has stopped the run after, as its log says."""
    said = re.findall(rf"stopped by SIGTERM after step (\d+) of {STEPS}, saved; the same command continues", _log(run))
    return [int(step) for step in said]


def test_a_job_that_is_preempted_and_requeued_ends_with_the_numbers_of_one_that_was_not(cluster, tmp_path):
    whole, run = (make_run(tmp_path, name, LAYOUT) for name in ("whole", "queued"))
    run_to_end("train", str(whole.file))
    number = _submitted(cluster, run)
    _await_step(cluster, number, run, 5)
    # Another job takes the machine: a signal, and time to save.
    cluster.run("sbatch", "--partition=high", "--ntasks=2", "--output=/dev/null", "--wrap=sleep 2")
    _begin_again(cluster, number)
    assert len(_saved(run)) == 1
    # The machine's keeper wants it now: the signal, and KillWait later the end.
    _await_step(cluster, number, run, _saved(run)[0] + 5)
    cluster.run("scontrol", "requeue", number)
    _begin_again(cluster, number)
    job = cluster.wait_for_state(number, "COMPLETED", timeout_s=240)
    first, second = _saved(run)
    assert 5 <= first < second < STEPS
    assert job["Restarts"] == "2"
    said = _log(run)
    assert [int(step) for step in re.findall(r"resuming from .*, after step (\d+)", said)] == [first, second]
    assert "Traceback" not in said
    assert run.read_metrics() == whole.read_metrics()
    assert hash_weights(run.directory / "model") == hash_weights(whole.directory / "model")


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = make_run(tmp_path, "cancelled", LAYOUT)
    number = _submitted(cluster, run)
    _await_step(cluster, number, run, 5)
    cluster.run("scancel", number)
    cluster.wait_for_state(number, "CANCELLED")
    end = time.monotonic() + DISTANT_S
    while not _saved(run):
        assert time.monotonic() < end, _log(run) + cluster.logs()
        time.sleep(0.1)
    time.sleep(3)
    job = cluster.read_job(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0")
    assert run.count_steps() == _saved(run)[0] < STEPS
    assert os.path.isdir(run.checkpoints / f"step-{_saved(run)[0]:08d}")
