"""The driver that `meshwright launch` makes for Ray Train trains as without Ray, and continues when a rank is
killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import copy_environment, run_command
from support.kill_sweep import TrainingRun, hash_weights, make_run, run_to_end

pytest.importorskip("ray.train", reason="pip install 'ray[train]'")

STEPS = 300
LAYOUT: dict[str, Any] = {
    "strategy": "fsdp2",
    "nproc": 2,
    "steps": STEPS,
    "checkpoint": {"every": 50},
    "schedule": {"name": "cosine", "warmup_steps": 20},
    "eval": {"every": 90, "max_sequences": 4},
    "launch": {"ranks_per_node": 2, "max_restarts": 2},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    run = make_run(tmp_path_factory.mktemp("ray"), "whole", LAYOUT)
    run_to_end("train", str(run.file))
    return run


def _workers() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                if b"RayTrainWorker" in (path / "cmdline").read_bytes():
                    yield int(path.name)
            except OSError:
                continue


@pytest.mark.zoo
@pytest.mark.parametrize("killed", [False, True], ids=["whole", "killed"])
def test_ray_trains_the_same_numbers(whole: TrainingRun, killed: bool) -> None:
    run = make_run(whole.file.parent, f"ray-{killed}", LAYOUT)
    driver = run.directory.with_name(f"{run.directory.name}-job") / "job.py"
    done = run_command("launch", str(run.file), "--to", "ray", "--out", str(driver.parent))
    assert done.returncode == 0, done.stderr
    before = set(_workers())
    environment = copy_environment()
    log = driver.with_name("log")
    with log.open("w") as said:
        process = subprocess.Popen([sys.executable, str(driver)], env=environment, stdout=said, stderr=said)
    try:
        while killed and run.count_steps() < 120:
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
        if killed:
            os.kill(max(set(_workers()) - before), signal.SIGKILL)
        assert process.wait(300) == 0, log.read_text()[-6000:]
    finally:
        process.terminate()
        process.wait(60)
    assert ("resuming from" in log.read_text(), run.read_metrics()) == (killed, whole.read_metrics())
    assert hash_weights(run.directory / "model") == hash_weights(whole.directory / "model")
