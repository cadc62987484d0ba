"""Timelines of pipelines: what ranks measure in some steps, on one clock, beside what the schedule has planned."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import replace
from unittest.mock import Mock

import pytest
import yaml
from support.commands import write_run
from support.runs import run_rank_capturing

from meshwright.events.run import RunInfo
from meshwright.events.step import StepResult
from meshwright_run.run_logs import TimelineLog
from meshwright_testing import pool
from meshwright_watch import api as timelines


def test_ranks_of_a_pipeline_note_each_action_of_the_steps_that_are_asked_for(tmp_path):
    # Two runs of the schedule in a step, of two microbatches each.
    path = write_run(tmp_path)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values |= {"steps": 4, "sample": None, "eval": {"max_sequences": 2}, "metrics": {"timeline_every": 2}}
    values |= {"pp_size": 2, "wrapper_config": {"pipeline": {"pp_batch_size": 2}}}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert {found[1:] for found in pool(2).run(run_rank_capturing, str(path), None)} == {("", 0)}
    output = tmp_path / "out"
    texts = [(output / "timeline" / f"rank-{rank:05}.jsonl").read_text(encoding="utf-8") for rank in (0, 1)]
    ranks = [[json.loads(line) for line in text.splitlines()] for text in texts]
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
    found = timelines.load_timeline(output / "timeline", 4)
    at = {(kind, stage, batch): span for row in found["measured"] for kind, stage, batch, *span in row["actions"]}
    for batch in range(4):
        assert at["F", 1, batch][0] >= at["F", 0, batch][1] - 1e-3
        assert at["B", 0, batch][0] >= at["B", 1, batch][1] - 1e-3
    planned = found["planned"]
    assert planned["schedule"].lower() == "1f1b"
    for row, lines in zip(planned["ranks"], ranks, strict=True):
        assert [action[:3] for action in row] == [action[:3] for action in lines[0]["actions"]]


def _recorder() -> Mock:
    return Mock(
        planned_timeline={"schedule": "s", "ranks": []}, pop_timeline=lambda: {"time": 0.0, "pp_rank": 0, "actions": []}
    )


RESULT = StepResult(1, 10, 1.0, 1.0, 1.0, 8, 1.0, 0)


def test_the_step_before_asks_also_where_a_run_continues(tmp_path):
    recorder = _recorder()
    log = TimelineLog(recorder, tmp_path, rank=0, every=3)
    log.on_run_start(RunInfo("id", "run", "pipeline", "pp=2", 2, 0, 5, 10, None, "cpu"))
    assert recorder.record_next.call_count == 1
    for step, asked in ((6, 1), (7, 1), (8, 2)):
        log.on_step_end(replace(RESULT, step=step))
        assert recorder.record_next.call_count == asked


def test_a_disk_that_takes_no_timeline_is_reported_once_and_ends_no_run(tmp_path):
    (tmp_path / "timeline").write_text("in the way", encoding="utf-8")
    recorder = _recorder()
    log = TimelineLog(recorder, tmp_path, rank=0, every=1)
    with pytest.warns(UserWarning, match="cannot be written"):
        log.on_step_end(RESULT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.on_step_end(replace(RESULT, step=2))
    assert recorder.record_next.call_count == 0
