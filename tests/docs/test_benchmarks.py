"""What `benchmarks/` measures about surviving can be measured: each script comes to its numbers, with tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launched_processes import build_clean_environment

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = ("--hidden", "64", "--layers", "1", "--seq", "16", "--rounds", "7", "--warmup", "1")


def measured(script: str, *arguments: str, file: Path) -> dict[str, Any]:
    """What a script has written."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--json", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=build_clean_environment(), timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(file.read_text())
    # Seconds mean nothing without the machine that they were measured on.
    assert {"command", "date", "versions", "cpu"} <= found.keys()
    return found


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("script", "contest"),
    [
        (("watchdog.py", "--watchdog", "3"), "watched"),
        (("verifying.py", "--every", "2"), "verified"),
        (("verifying.py", "--every", "2", "--strategy", "fsdp2"), "verified"),
        (("observers.py", "--trackers", "tensorboard"), "observers"),
    ],
    ids=["watchdog", "verifying ddp", "verifying fsdp2", "observers"],
)
def test_a_contest_is_held_and_both_sides_train_alike(script: tuple[str, ...], contest: str, tmp_path: Path) -> None:
    ratios = measured(*script, *TINY, file=tmp_path / "found.json")["strategies"][contest]
    # Watching changes no number, and takes time.
    assert ratios["largest_relative_disagreement"] == 0.0
    assert set(ratios["median_step_s"]) == {"raw A", "ours", "raw B"}
    assert min(ratios["median_step_s"].values()) > 0


@pytest.mark.slow
def test_what_a_replica_costs_is_reported(tmp_path: Path) -> None:
    found = measured("replicas.py", "--steps", "12", file=tmp_path / "found.json")["steps"]
    assert found["copied"] + found["left_out"] == 6
    assert min(found[each] for each in ("state_bytes_per_rank", "after_none_s", "after_copy_s", "held_up_s")) > 0


@pytest.mark.zoo
@pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc")
def test_the_time_from_a_death_to_the_next_step_is_reported(tmp_path: Path) -> None:
    found = measured("restarts.py", "--rounds", "1", "--deaths", "1", file=tmp_path / "found.json")["seconds"]
    assert {"torchrun alone", "meshwright train, from memory", "meshwright train, from disk"} < found.keys()
    for reported in found.values():
        # What ends within 0.3 s of a death was under way, and is not counted.
        assert reported["deaths"] == 1
        assert 0.3 < reported["median"] == reported["worst"]
