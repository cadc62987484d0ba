"""Runs of every strategy that are killed end as runs that are not; the sweep is in kill_sweep.py. Real processes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from kill_sweep import LAYOUTS, STEPS, Layout, finish, make_run, sweep

PIPELINE = "pipeline over single"
LAYOUTS_TO_RESUME: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "single": {"strategy": "single", "nproc": 1},
    "ddp": {"strategy": "ddp", "nproc": 2},
    "pipeline over ddp": {"strategy": "ddp", "nproc": 4, "pp_size": 2},
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kill")


@pytest.mark.slow
def test_a_run_killed_while_it_trains_and_while_it_saves_ends_as_one_that_was_not(workplace: Path) -> None:
    layout = Layout(workplace, "killed", LAYOUTS["fsdp2"], random.Random(0))
    for moment, victim in (("training", "rank"), ("writing", "all"), ("training", "all")):
        layout.kill(moment, victim)
    layout.end()


@pytest.mark.zoo
@pytest.mark.parametrize("name", LAYOUTS_TO_RESUME)
def test_a_killed_run_ends_with_the_numbers_and_weights_of_one_that_was_not(name: str, workplace: Path) -> None:
    layout = Layout(workplace, name, LAYOUTS_TO_RESUME[name], random.Random(name))
    layout.kill("training", "all")
    layout.end()


@pytest.mark.slow
def test_a_killed_pipeline_ends_as_one_that_was_not_and_goes_on_without_one_at_the_same_rates(workplace: Path) -> None:
    # Two stages on a rank, so groups in another number than elsewhere.
    settings = {"strategy": "single", "nproc": 2, "pp_size": 2, "wrapper_config": {"pipeline": {"pp_schedule": "zbv"}}}
    layout = Layout(workplace, PIPELINE, settings, random.Random(PIPELINE))
    found = layout.run.checkpoints
    while not found.is_dir() or not any(path.name[-1].isdigit() for path in found.iterdir()):
        layout.kill("training", "all")
    other = make_run(workplace, "other", LAYOUTS_TO_RESUME["single"])
    shutil.copytree(layout.run.directory, other.directory)
    layout.end()
    finish("train", str(other.file))
    rates = [(each["step"], each["learning_rate"]) for each in other.numbers()]
    assert len(rates) == STEPS
    assert rates == [(each["step"], each["learning_rate"]) for each in layout.run.numbers()]


@pytest.mark.zoo
def test_random_kills(tmp_path: Path) -> None:
    kills = [kill for kill, _ in sweep(tmp_path, 8, 3, "fsdp2")]
    assert len({kill.moment for kill in kills}) == 7
