"""A run that its command starts over after a failure: it ends as one that nothing has happened to."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import copy_environment, write_run
from support.kill_sweep import (
    STEPS,
    CommandProcess,
    TrainingRun,
    end_session,
    find_ranks,
    find_session_processes,
    hash_weights,
    make_run,
    run_to_end,
    wait_for_moment,
)

from meshwright.base.errors import ConfigError
from meshwright_run.run_file import load_run, to_redacted_dict
from meshwright_run.start import RestartPolicy, find_rank_counts

REPORTED_S = 2.0
"""Ranks that survive a peer hear of it in this time."""


def _events(run: TrainingRun, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run.directory / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def _after(run: TrainingRun, step: int) -> Any:
    return lambda: run.count_steps() >= step


# -- ranks that are killed


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"strategy": "fsdp2", "nproc": 2}, id="fsdp2", marks=pytest.mark.slow),
        pytest.param({"strategy": "fsdp2", "nproc": 4, "pp_size": 2}, id="pipeline", marks=pytest.mark.zoo),
    ],
)
def test_a_run_whose_ranks_are_killed_continues_in_one_command(settings: dict[str, Any], tmp_path: Path) -> None:
    whole, run = (make_run(tmp_path, name, settings | {"max_restarts": 3}) for name in ("whole", "killed"))
    run_to_end("train", str(whole.file))
    dice, process = random.Random(24), CommandProcess("train", str(run.file))
    try:
        for after in (4, 13):
            assert wait_for_moment(process, _after(run, after))
            ranks = find_ranks(process)
            assert len(ranks) == settings["nproc"]
            os.kill(dice.choice(ranks), signal.SIGKILL)
            killed_s = time.monotonic()
            while set(ranks) & set(find_ranks(process)):
                time.sleep(0.01)
            # The kernel and a busy machine take their time, too.
            assert time.monotonic() - killed_s < REPORTED_S + 1.5
        process.wait(200)
        # Python's resource tracker goes a moment later than who it works for.
        deadline_s = time.monotonic() + 5
        while find_session_processes(process) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not find_session_processes(process)
    finally:
        end_session(process)
    process.check()
    assert run.read_metrics() == whole.read_metrics()
    assert hash_weights(run.directory / "model") == hash_weights(whole.directory / "model")
    assert [(each["number"], each["max_restarts"], each["ranks"]) for each in _events(run, "restart")] == [
        (number, 3, settings["nproc"]) for number in (1, 2)
    ]
    assert [each["code"] for each in _events(run, "exit")] == [1, 1]


@pytest.mark.slow
def test_a_run_continues_with_fewer_ranks_where_one_is_broken_and_its_losses_stay(tmp_path: Path) -> None:
    settings = {"strategy": "fsdp2", "strategy_config": {"reduce_dtype": "float64"}, "nproc": 4}
    # Dropout would draw other numbers: they follow from the data rank.
    without = "model.attention_dropout=0.0"
    whole = make_run(tmp_path, "whole", settings)
    run_to_end("train", str(whole.file), "--set", without)
    run = make_run(tmp_path, "fewer", settings | {"max_restarts": 3, "elastic": {"min": 2, "max": 4}})
    run.file.write_text(yaml.safe_dump(to_redacted_dict(load_run(run.file, [without]))))
    broken = tmp_path / "broken"
    code = "from support import restart_targets; restart_targets.main()"
    environment = copy_environment()
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[4] / "tests"), os.environ.get("PYTHONPATH", "")]
    )
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(run.file), str(broken)],
            env=environment,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        assert wait_for_moment(process, _after(run, 6))
        broken.touch()
        os.kill(find_ranks(process)[-1], signal.SIGKILL)
        assert process.wait(200) == 0, (tmp_path / "said").read_text()
    finally:
        end_session(process)
    # Four are tried once more, and three cannot share a batch of four.
    assert [each["ranks"] for each in _events(run, "restart")] == [4, 2]
    text = (tmp_path / "said").read_text()
    assert "restarting the run (2 of 3), on 2 ranks instead of 4" in text
    assert "Traceback" not in text
    before, after = whole.read_metrics(), run.read_metrics()
    assert [each["step"] for each in after] == list(range(1, STEPS + 1))
    for key in ("loss", "learning_rate", "num_tokens"):
        assert [each[key] for each in after] == [each[key] for each in before], key
    norms = [pytest.approx(each["grad_norm"], rel=1e-14) for each in before]
    assert [each["grad_norm"] for each in after] == norms


# -- on how many ranks, and how often


def _config(directory: Path, **changes: Any) -> Any:
    if not (directory / "run.yaml").exists():
        write_run(directory)
    values = {"checkpoint": "{every: 1}", **{name: str(value) for name, value in changes.items()}}
    return load_run(directory / "run.yaml", [f"{name}={value}" for name, value in values.items()])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"nproc": 4}, [4]),
        ({"nproc": 4, "elastic": "{min: 2}"}, [4, 2]),
        ({"nproc": 4, "elastic": "{}"}, [4, 2, 1]),
        ({"nproc": 8, "elastic": "{min: 2, max: 6}"}, [4, 2]),
        ({"nproc": 4, "elastic": "{min: 2, max: 3}"}, [2]),
        ({"nproc": 8, "tp_size": 2, "elastic": "{min: 2}"}, [8, 4, 2]),
    ],
    ids=str,
)
def test_a_run_may_have_as_many_ranks_as_fit(changes: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    assert find_rank_counts(_config(tmp_path, **changes)) == expected


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"max_restarts": 1, "checkpoint": "{}"}, ConfigError, "saves no checkpoints .* Set checkpoint.every"),
        ({"max_restarts": 1, "resume": "never"}, ConfigError, "resume=never would start over"),
        ({"elastic": "{min: 3}"}, ConfigError, "elastic.min=3, but this node starts 2 ranks"),
        ({"nproc": 3, "elastic": "{min: 3}", "batch_size": 8}, ConfigError, "batch_size=8 does not divide"),
        ({"elastic": "{min: 3, max: 2}"}, ConfigError, "min=3 is more than max=2"),
        ({"elastic": "{}", "dp_size": 2}, ConfigError, "all sizes are set; leave out dp_size=2"),
        ({"max_restarts": -1}, ConfigError, "max_restarts"),
    ],
    ids=str,
)
def test_restarts_that_cannot_be_respected_are_refused(changes, error, match, tmp_path):
    with pytest.raises(error, match=match):
        find_rank_counts(_config(tmp_path, **changes))


def _attempt(directory: Path, step: int | None) -> None:
    """What a attempt leaves that has done steps up to this one; None: none."""
    (directory / "out").mkdir(exist_ok=True)
    if step is not None:
        line = json.dumps({"step": step, "time": time.time()})
        (directory / "out" / "metrics.jsonl").write_text(f'{line}\n{{"step": incomplete')


def test_a_run_is_restarted_until_it_has_been_so_often(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    restarts = RestartPolicy(_config(tmp_path, max_restarts=2), [2])
    for step, again in ((3, True), (3, True), (9, False)):
        _attempt(tmp_path, step)
        assert restarts.prepare_restart(1) is again
    assert "not restarted: max_restarts=2 is reached" in capsys.readouterr().err
    for code in (0, 2, 130, 143):
        assert not RestartPolicy(_config(tmp_path, max_restarts=2), [2]).prepare_restart(code)


def test_what_fails_at_the_same_step_time_and_again_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    restarts = RestartPolicy(_config(tmp_path, max_restarts=99), [2])
    for step, again in ((3, True), (3, True), (4, True), (4, True), (4, False)):
        _attempt(tmp_path, step)
        assert restarts.prepare_restart(1) is again
    restarts = RestartPolicy(_config(tmp_path, max_restarts=99), [2])
    for again in (True, True, False):
        _attempt(tmp_path, None)
        assert restarts.prepare_restart(1) is again


def test_ranks_are_fewer_after_a_failure_at_once_and_as_many_as_may_be_after_steps(tmp_path, monkeypatch):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    restarts = RestartPolicy(_config(tmp_path, max_restarts=99), [4, 2, 1])
    found = []
    for step in (None, None, 3, None, None, None, None):
        _attempt(tmp_path, step)
        found.append((restarts.world_size, restarts.prepare_restart(1)))
    assert found == [(4, True), (2, True), (1, True), (4, True), (2, True), (1, True), (1, True)]
    assert waited == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 3.0]
    _attempt(tmp_path, None)
    assert not restarts.prepare_restart(1)
