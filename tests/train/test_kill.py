"""Runs of every strategy that are killed end as runs that are not; the sweep is in kill_sweep.py. Real processes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from kill_sweep import LAYOUTS, STEPS, Layout, finish, make_run, sweep

PIPELINE: dict[str, Any] = {"strategy": "single", "nproc": 2, "pp_size": 2}
LAYOUTS_TO_RESUME: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "single": {"strategy": "single", "nproc": 1},
    "ddp": {"strategy": "ddp", "nproc": 2},
    # Two stages on a rank, so groups in another number than elsewhere.
    "pipeline over single": {**PIPELINE, "wrapper_config": {"pipeline": {"pp_schedule": "zbv"}}},
    "pipeline over ddp": {"strategy": "ddp", "nproc": 4, "pp_size": 2},
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kill")


@pytest.mark.zoo
@pytest.mark.parametrize("name", [name for name in LAYOUTS_TO_RESUME if name != "pipeline over single"])
def test_a_killed_run_ends_with_the_numbers_and_weights_of_one_that_was_not(name: str, workplace: Path) -> None:
    layout = Layout(workplace, name, LAYOUTS_TO_RESUME[name], random.Random(name))
    layout.kill("training", "all")
    layout.end()


def test_a_killed_pipeline_ends_as_one_that_was_not_and_goes_on_without_one_at_the_same_rates(workplace: Path) -> None:
    name = "pipeline over single"
    layout = Layout(workplace, name, LAYOUTS_TO_RESUME[name], random.Random(name))
    while not layout.run.checkpoints.is_dir() or not any(path.name[-1].isdigit() for path in _found(layout)):
        layout.kill("training", "all")
    other = make_run(workplace, "other", LAYOUTS_TO_RESUME["single"])
    shutil.copytree(layout.run.directory, other.directory)
    layout.end()
    finish("train", str(other.file))
    rates = [(each["step"], each["learning_rate"]) for each in other.numbers()]
    assert len(rates) == STEPS
    assert rates == [(each["step"], each["learning_rate"]) for each in layout.run.numbers()]


def _found(layout: Layout) -> list[Path]:
    return list(layout.run.checkpoints.iterdir())


@pytest.mark.zoo
def test_random_kills(tmp_path: Path) -> None:
    kills = [kill for kill, _ in sweep(tmp_path, 8, 3, "fsdp2")]
    assert len({kill.moment for kill in kills}) == 7
