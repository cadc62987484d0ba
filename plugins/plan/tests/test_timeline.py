"""Timelines of pipelines: what ranks measure in some steps, on one clock, beside what the schedule has planned."""

from __future__ import annotations

import io
import itertools
import json
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.commands import LAUNCHER_VARIABLES, write_run

from meshwright.events.run import RunInfo
from meshwright.events.step import StepResult
from meshwright_run.journal import TimelineLog, timeline_logs
from meshwright_run.run_file import load_run
from meshwright_run.run_rank import run_rank
from meshwright_testing import pool
from meshwright_watch import answers as timelines


def _rank(path: str) -> None:
    with redirect_stdout(io.StringIO()), pytest.MonkeyPatch.context() as patch:
        # The process group is there; there is no launcher, whose store a rank would report to.
        for name in LAUNCHER_VARIABLES:
            patch.delenv(name, raising=False)
        run_rank(None, load_run(Path(path)))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("timelines")
    write_run(directory)
    return directory


def _trained(workplace: Path, directory: Path, **changes: Any) -> Path:
    values = yaml.safe_load((workplace / "run.yaml").read_text(encoding="utf-8"))
    values |= {"steps": 4, "sample": None, "eval": {"sequences": 2}, "output_dir": str(directory / "out")} | changes
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    pool(2).run(_rank, str(path))
    return directory / "out"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_ranks_of_a_pipeline_note_each_action_of_the_steps_that_are_asked_for(workplace, tmp_path):
    # Two runs of the schedule in a step, of two microbatches each.
    wrapper = {"pipeline": {"pp_batch_size": 2}}
    output = _trained(workplace, tmp_path, pp_size=2, wrapper_config=wrapper, metrics={"timeline_every": 2})
    ranks = [_lines(output / "timeline" / f"rank-{rank:05}.jsonl") for rank in (0, 1)]
    for rank, lines in enumerate(ranks):
        assert [line["step"] for line in lines] == [2, 4]
        for line in lines:
            assert line["pp_rank"] == rank
            kinds = sorted((kind, stage, batch) for kind, stage, batch, _, _ in line["actions"])
            assert kinds == sorted(itertools.product("BF", [rank], range(4)))
            times = [moment for *_, start, end in line["actions"] for moment in (start, end)]
            assert times == sorted(times)
            assert times[0] >= 0
    # On one clock: no stage begins before what it needs was there.
    found = timelines.timeline_at(output / "timeline", 4)
    at = {(kind, stage, batch): span for row in found["measured"] for kind, stage, batch, *span in row["actions"]}
    for batch in range(4):
        assert at["F", 1, batch][0] >= at["F", 0, batch][1] - 1e-3
        assert at["B", 0, batch][0] >= at["B", 1, batch][1] - 1e-3
    planned = found["planned"]
    assert planned["schedule"].lower() == "1f1b"
    for row, lines in zip(planned["ranks"], ranks, strict=True):
        assert [action[:3] for action in row] == [action[:3] for action in lines[0]["actions"]]


class _Recorder:
    def __init__(self) -> None:
        self.asked = 0

    def record_next(self) -> None:
        self.asked += 1

    def take(self) -> dict[str, Any] | None:
        return {"time": 0.0, "pp_rank": 0, "actions": []}

    planned: dict[str, Any] = {"schedule": "s", "ranks": []}  # noqa: RUF012 as the recorder has it


@dataclass
class _Manager:
    mesh: Any
    timeline: Any = None


@pytest.mark.parametrize(("recorder", "every", "count"), [(_Recorder(), 100, 1), (_Recorder(), None, 0), (None, 1, 0)])
def test_there_is_a_timeline_where_one_is_asked_for_and_there_is_a_pipeline(recorder, every, count, tmp_path):
    manager = _Manager(SimpleNamespace(rank=1), recorder)
    assert len(timeline_logs(manager, tmp_path, every)) == count


def _info(start: int) -> RunInfo:
    return RunInfo("id", "run", "pipeline", "pp=2", 2, 0, start, 10, None, "cpu")


def _result(step: int) -> StepResult:
    return StepResult(step, 10, 1.0, 1.0, 1.0, 8, 1.0, 0)


def test_the_step_before_asks_also_where_a_run_goes_on(tmp_path):
    recorder = _Recorder()
    log = TimelineLog(recorder, tmp_path, rank=0, every=3)
    log.on_run_start(_info(5))
    assert recorder.asked == 1
    log.on_step_end(_result(6))
    log.on_step_end(_result(7))
    assert recorder.asked == 1
    log.on_step_end(_result(8))
    assert recorder.asked == 2


def test_a_disk_that_takes_no_timeline_is_told_once_and_ends_no_run(tmp_path):
    (tmp_path / "timeline").write_text("in the way", encoding="utf-8")
    recorder = _Recorder()
    log = TimelineLog(recorder, tmp_path, rank=0, every=1)
    with pytest.warns(UserWarning, match="cannot be written"):
        log.on_step_end(_result(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.on_step_end(_result(2))
    assert recorder.asked == 0
