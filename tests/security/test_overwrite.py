"""`overwrite: true` removes what runs have made, and nothing that happens to bear one of their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.base.errors import ConfigError
from meshwright_run.run_action import RunAction, choose_run_action
from meshwright_run.run_directory import (
    CREATED_NAMES,
    METRICS,
    MODEL,
    OUTPUT_DIRECTORIES,
    OUTPUT_FILES,
    RUN_FILE,
    RunDirectory,
)
from meshwright_run.run_file import RunConfig


def _config(directory: Path) -> RunConfig:
    values = {"strategy": "single", "model": {"model_type": "llama"}, "steps": 3, "batch_size": 1, "overwrite": True}
    return RunConfig.model_validate({**values, "output_dir": str(directory), "resume": "never"})


@pytest.mark.parametrize(
    ("name", "list_of"),
    [
        *((name, None) for name in [*OUTPUT_DIRECTORIES, *OUTPUT_FILES]),
        *((MODEL, text) for text in ("[]", '["other"]', "{}", "5", '"model"', "nonsense", "[[1]]", "[null]")),
    ],
)
def test_what_no_run_has_made_is_not_removed(name: str, list_of: str | None, tmp_path: Path) -> None:
    mine = tmp_path / name
    if name in OUTPUT_DIRECTORIES:
        mine.mkdir()
        mine = mine / "file"
    mine.write_text("the user's own")
    if list_of is not None:
        (tmp_path / CREATED_NAMES).write_text(list_of)
    if "." not in name or name in OUTPUT_FILES:
        with pytest.raises(ConfigError, match=f"would remove {name}.*which no run created"):
            choose_run_action(_config(tmp_path), 3)
    with pytest.raises(ConfigError, match=f"would remove {name}"):
        RunDirectory(tmp_path).prepare("", overwrite=True)
    # A run that begins beside it leaves it, too, except for the file that it writes again.
    if name not in (RUN_FILE, "summary.json"):
        RunDirectory(tmp_path).prepare("", overwrite=False)
        assert mine.read_text() == "the user's own"
        assert name not in RunDirectory(tmp_path).read_created_names()


def test_what_a_run_has_made_is_removed_and_what_lies_beside_it_stays(tmp_path: Path) -> None:
    config = _config(tmp_path)
    RunDirectory(tmp_path).prepare("", overwrite=False)
    assert RunDirectory(tmp_path).read_created_names() == {*OUTPUT_DIRECTORIES, *OUTPUT_FILES}
    (tmp_path / METRICS).write_text("{}\n")
    (tmp_path / MODEL).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert choose_run_action(config, 3) is RunAction.OVERWRITE
    RunDirectory(tmp_path).prepare("", overwrite=True)
    assert {path.name for path in tmp_path.iterdir()} == {RUN_FILE, CREATED_NAMES, "notes.txt"}
    (tmp_path / CREATED_NAMES).write_text(json.dumps(["../outside", "/etc/passwd", "notes.txt", MODEL, ".", ""]))
    assert RunDirectory(tmp_path).read_created_names() == {MODEL}
