"""Results of benchmarks/goodput.py are those of the code; docs/reference/goodput.md names the defaults that the code
has."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright_plan.config import PlanConfig
from meshwright_plan.goodput import advice
from meshwright_plan.goodput.simulation import (
    CheckpointSchedule,
    FailureScenario,
    ReplicaSchedule,
    compute_goodput,
    find_best_interval,
)

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import goodput as benchmark  # noqa: E402

CONTENT = json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))


def _fleet(ranks: int, restart_s: float) -> tuple[FailureScenario, ReplicaSchedule]:
    kept = {**CONTENT["fleets"][str(ranks)], "restart_s": restart_s}
    saves, copies = CheckpointSchedule(**kept.pop("checkpoints")), ReplicaSchedule(**kept.pop("replicas"))
    names = FailureScenario.__dataclass_fields__
    return FailureScenario(**{name: each for name, each in kept.items() if name in names}, checkpoints=saves), copies


def test_results_are_those_of_the_code() -> None:
    fleet, copies = benchmark.published_fleet()
    assert (replace(fleet, restart_s=300.0), copies) == _fleet(16_384, PlanConfig().restart_s)
    for found in CONTENT["curves"]:
        fleet, copies = _fleet(found["ranks"], found["restart_s"])
        if found["replicated_every"] is None:
            recommended = find_best_interval(fleet)
            closed = [
                compute_goodput(replace(fleet, checkpoints=replace(fleet.checkpoints, every=each)))
                for each in found["every"]
            ]
            assert closed == pytest.approx(found["closed_form"], abs=6e-6)
            assert closed == pytest.approx(found["goodput"], abs=4 * found["error"])
        else:
            copies, recommended = advice.choose_replica_schedule(fleet, copies)
            assert copies.every == found["replicated_every"]
        assert recommended == found["recommended"]["every"]


def test_documented_defaults_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "goodput.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.e-]+) \|", page, re.MULTILINE))
    assert set(rows) == set(PlanConfig.model_fields) - {"enabled", "device", "on_oom"}
    for name, value in rows.items():
        default = advice.ASSUMED_DETECTION_S if name == "detection_s" else getattr(PlanConfig(), name)
        assert default == pytest.approx(float(value), rel=2e-3), name
