"""A run file with its data for the tests of runs, and a directory of a run for each test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import write_run
from support.runs import RunWorkspace


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    write_run(directory)
    (directory / "more").mkdir()
    lines = {"text": "some other words " * 60, "body": "quite another text " * 60}
    (directory / "lines.jsonl").write_text(json.dumps(lines) + "\n", encoding="utf-8")
    (directory / "more" / "news.jsonl").write_text(json.dumps({"text": lines["body"]}) + "\n", encoding="utf-8")
    return directory


@pytest.fixture
def place(workplace: Path, tmp_path: Path) -> RunWorkspace:
    return RunWorkspace(workplace, tmp_path)
