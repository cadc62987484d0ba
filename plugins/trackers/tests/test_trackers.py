"""Names and parameters, options and what is wrong with them, numbers that are not finite, and servers that go away."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from read_back import (
    WandbFile,
    mlflow_run,
    tensorboard_hparams,
    tensorboard_points,
    trackio_points,
    trackio_rows,
    without_trackers_of_the_environment,
)

from meshwright.base.errors import ConfigError
from meshwright.events.run import RunInfo, RunSummary, SavedCheckpoint
from meshwright.events.step import StepResult
from meshwright_run.observers import attach_trackers, list_trackers, resolve_trackers
from meshwright_trackers.config import MLflowConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from meshwright_trackers.plugin import TrackerLibrary, build_mlflow, build_tensorboard, build_trackio, build_wandb
from meshwright_trackers.tracker import BackgroundSender, collect_step_metrics, flatten_parameters

PATIENCE_S = 240


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name, value in without_trackers_of_the_environment().items():
        monkeypatch.setenv(name, value)


def _run(directory: Path, *, start: int = 0, config: Mapping[str, Any] | None = None) -> RunInfo:
    values: dict[str, Any] = {"id": "0123456789abcdef", "name": "tiny", "strategy": "fsdp2", "mesh": "dp_shard=2"}
    values |= {"world_size": 2, "rank": 0, "num_steps": 9, "num_parameters": 12, "device": "cpu", "version": "0.1.0"}
    return RunInfo(**values, start_step=start, directory=directory, config=config or {"optimizer": {"lr": 0.1}})


def _step(step: int, loss: float = 2.0, **more: Any) -> StepResult:
    values = {"num_steps": 9, "grad_norm": 1.5, "learning_rate": 0.1, "num_tokens": 8, "seconds": 0.5, "rank": 0}
    return StepResult(step=step, loss=loss, **{**values, "end_time": 1000.0 + step, **more})


def _ended(run: RunInfo, step: int, reason: Any = "done") -> RunSummary:
    return RunSummary(run=run, reason=reason, step=step, num_steps=9, seconds=3.0, loss=2.0, evaluations={}, rank=0)


def test_what_is_not_known_of_a_step_has_no_name() -> None:
    bare = {"train/loss": 2.0, "train/grad_norm": 1.5, "train/learning_rate": 0.1, "train/tokens": 8.0}
    bare |= {"speed/tokens_per_second": 16.0, "speed/tokens_per_second_per_device": 16.0, "time/step": 0.5}
    assert collect_step_metrics(_step(1)) == bare
    reported = collect_step_metrics(
        _step(1, block_grad_norms={"model.layers.0": 0.7}, world_size=2, flops=30.0, peak_flops=60.0)
    )
    known = {"norm/model.layers.0": 0.7, "train/flops": 30.0, "speed/mfu": 0.5}
    assert reported == bare | known | {"speed/tokens_per_second_per_device": 8.0}


def test_parameters_are_the_run_file_with_dots_and_no_secret_of_a_tracker() -> None:
    config = {
        "model": {"hidden_size": 16, "rope": {}},
        "data": {"sources": [{"path": "a"}, {"path": "b"}], "columns": ["x", "y"]},
        "nproc": None,
        "trackers": [{"name": "trackio", "server_url": "http://x/?write_token=secret"}],
    }
    options = {"model.hidden_size": 16, "model.rope": "{}", "data.sources.0.path": "a", "data.sources.1.path": "b"}
    options |= {"data.columns": '["x", "y"]', "nproc": None}
    reported = flatten_parameters(_run(Path(), config=config))
    assert {name: value for name, value in reported.items() if not name.startswith("run.")} == options
    assert (reported["run.id"], reported["run.mesh"]) == ("0123456789abcdef", "dp_shard=2")


def test_the_four_trackers_are_known_and_nothing_of_them_is_imported_before_they_are_built() -> None:
    code = (
        "import sys\n"
        "from meshwright_trackers.plugin import register_trackers\n"
        "specs = register_trackers()\n"
        "for spec in specs: spec.config_cls()\n"
        "heavy = {'torch', 'tensorboard', 'wandb', 'mlflow', 'trackio'} & set(sys.modules)\n"
        "print([spec.name for spec in specs], heavy)"
    )
    reported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert reported == "['tensorboard', 'wandb', 'mlflow', 'trackio'] set()\n"
    assert {"tensorboard", "wandb", "mlflow", "trackio"} <= set(list_trackers())


def test_what_is_wrong_in_the_run_file_is_reported_when_it_is_planned() -> None:
    for asked, reported in (
        ({"name": "wandb", "mode": "ofline"}, "mode: Input should be 'online', 'offline' or 'disabled'"),
        ({"name": "mlflow", "runname": "x"}, "runname: unknown key. Did you mean 'run_name'?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(reported)):
            resolve_trackers([asked])


def test_a_library_that_is_missing_or_too_old_is_reported_with_the_line_that_installs_it() -> None:
    for distribution, version, reported in (
        ("wandb_of_nobody", (0, 31), "tracker 'wandb' needs wandb_of_nobody, which is not installed"),
        ("pytest", (999, 0), "needs version 999.0 or later"),
    ):
        with pytest.raises(ConfigError, match=f"{reported}.*{re.escape('plugins/trackers[wandb]')}"):
            TrackerLibrary("wandb", (distribution,), (distribution,), version).check()


def test_tensorboard_takes_what_is_not_finite_and_voids_what_is_done_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = TensorBoardConfig(log_dir=str(tmp_path / "logs"))
    first = build_tensorboard(config, _run(tmp_path))
    for step, loss in enumerate([1.0, math.nan, math.inf, 4.0], start=1):
        first.on_step_end(_step(step, loss))
    first.close()
    second = build_tensorboard(config, _run(tmp_path, start=2))
    second.on_step_end(_step(3, -math.inf))
    second.on_run_end(_ended(_run(tmp_path), 3))
    (_, one), (_, nan), (_, inf) = tensorboard_points(tmp_path / "logs")["train/loss"]
    assert (one, math.isnan(nan), inf) == (1.0, True, -math.inf)
    # A first attempt that has failed leaves no verdict, which TensorBoardTracker would keep.
    _, verdict = tensorboard_hparams(tmp_path / "logs")
    assert verdict.status == 1  # SUCCESS


@pytest.mark.slow
def test_wandb_has_what_is_not_finite_and_the_options_and_a_run_that_a_signal_has_ended(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    config = WandbConfig(
        project="p", entity="e", name="n", group="g", job_type="j", tags=["t"], notes="x", mode="offline",
        dir=str(tmp_path),
    )  # fmt: skip
    tracker = build_wandb(config, _run(tmp_path / "elsewhere"))
    tracker.on_step_end(_step(1, math.nan))
    tracker.on_step_end(_step(2, math.inf))
    tracker.on_run_end(_ended(_run(tmp_path), 2, "signal"))
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # Written by a process of W&B's own, which this one does not wait for.
    end = time.monotonic() + PATIENCE_S
    while not WandbFile(path).of("exit"):
        assert time.monotonic() < end, "the end is not written"
        time.sleep(0.05)
    file = WandbFile(path)
    (_, nan), (_, inf) = file.points()["train/loss"]
    assert (math.isnan(nan), inf) == (True, math.inf)
    (run,), (exited,) = file.of("run"), file.of("exit")
    assert (run.project, run.entity, run.display_name, run.run_group) == ("p", "e", "n", "g")
    assert (run.job_type, list(run.tags), run.notes) == ("j", ["t"], "x")
    assert (len(file.of("preempting")), exited.exit_code) == (1, 1)
    nothing = _run(tmp_path / "disabled")
    (tmp_path / "disabled").mkdir()
    disabled = build_wandb(WandbConfig(mode="disabled"), nothing)
    disabled.on_step_end(_step(1))
    disabled.on_run_end(_ended(nothing, 1))
    assert not list((tmp_path / "disabled").iterdir())


@pytest.mark.slow
def test_mlflow_continues_with_its_run_and_keeps_options_that_have_changed(tmp_path: Path) -> None:
    mlflow, *_ = (pytest.importorskip(library) for library in ("mlflow", "sqlalchemy", "alembic"))
    uri = f"sqlite:///{tmp_path / 'any.db'}"
    config = MLflowConfig(tracking_uri=uri, experiment="e", run_name="n", tags={"a": "b"})
    first = build_mlflow(config, _run(tmp_path, config={"lr": 0.1, "long": "x" * 9000, "odd*key": [1]}))
    first.on_step_end(_step(1, 0.1 + 0.2, evaluations={"a+b": 1e-300}))
    first.on_step_end(_step(2, math.nan))
    first.on_checkpoint(SavedCheckpoint(2, tmp_path / "two", 0.5, 0, is_best=True))
    first.on_run_end(_ended(_run(tmp_path), 2, "signal"))
    assert mlflow_run(uri, "e")[0].info.status == "KILLED"
    second = build_mlflow(config, _run(tmp_path, start=2, config={"lr": 0.2, "more": 1}))
    second.on_step_end(_step(3, 1 / 3))
    second.close()
    run, points = mlflow_run(uri, "e")
    assert (run.info.status, run.info.run_name, run.data.tags["a"]) == ("FAILED", "n", "b")
    (_, one), (_, nan), (_, three) = points["train/loss"]
    assert (one, math.isnan(nan), three) == (0.1 + 0.2, True, 1 / 3)
    assert points["eval/a_2b_b"] == [(1, 1e-300)]
    assert (run.data.params["lr"], run.data.tags["changed.lr"], run.data.params["more"]) == ("0.1", "0.2", "1")
    assert len(run.data.params["long"]) == 6000
    assert run.data.params["odd_2a_key"] == "[1]"
    assert run.data.tags["meshwright.checkpoint/best"] == str(tmp_path / "two")
    history = mlflow.MlflowClient(tracking_uri=uri).get_metric_history(run.info.run_id, "train/loss")
    assert [each.timestamp for each in history] == [1001000, 1002000, 1003000]


@pytest.mark.slow
def test_the_end_of_a_run_waits_for_mlflow_no_longer_than_it_is_reported_to_and_a_server_has_to_be_there(
    tmp_path: Path,
) -> None:
    for library in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(library)
    run, path = _run(tmp_path), tmp_path / "any.db"
    tracker = build_mlflow(MLflowConfig(tracking_uri=f"sqlite:///{path}", flush_timeout_s=0.5), run)
    with closing(sqlite3.connect(path, isolation_level=None)) as held:
        held.execute("begin exclusive")
        began = time.monotonic()
        tracker.on_step_end(_step(1))
        assert time.monotonic() - began < 0.5
        with pytest.raises(TimeoutError, match=r"not sent within 0\.5 s"):
            tracker.on_run_end(_ended(run, 1))
    asked = [{"name": "mlflow", "tracking_uri": "http://user:password@127.0.0.1:1"}]
    with (
        pytest.raises(ConfigError, match="tracker 'mlflow' cannot be started"),
        attach_trackers(resolve_trackers(asked), run),
    ):
        pass


TRACKIO = """
import math, sys
sys.path[:0] = [sys.argv[1]]
from pathlib import Path
from meshwright_trackers.config import TrackioConfig
from meshwright_trackers.plugin import build_trackio
from test_trackers import _ended, _run, _step

directory = Path(sys.argv[2])
chosen = TrackioConfig(project="p", name="n", group="g")
plain = TrackioConfig(project="p")
for config, start in [(plain, 0), (plain, 0), (chosen, 0), (chosen, 0), (chosen, 2)]:
    tracker = build_trackio(config, _run(directory, start=start))
    tracker.on_step_end(_step(start + 1, math.nan))
    tracker.on_step_end(_step(start + 2, 0.1 + 0.2))
    tracker.on_run_end(_ended(_run(directory), start + 2))
"""


@pytest.mark.slow
def test_trackio_continues_with_a_run_of_its_id_and_with_one_of_a_chosen_name_only_where_ours_continues(
    tmp_path: Path,
) -> None:
    pytest.importorskip("trackio")
    environment = without_trackers_of_the_environment() | {"TRACKIO_DIR": str(tmp_path)}
    command = [sys.executable, "-c", TRACKIO, str(Path(__file__).parent), str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=PATIENCE_S)
    rows = trackio_rows(tmp_path, "p")
    steps: dict[str, list[int]] = {}
    for name, step, values in rows:
        if "train/loss" in values:
            steps.setdefault(name, []).append(step)
    assert steps == {"tiny-01234567": [1, 2, 1, 2], "n": [1, 2, 1, 2, 3, 4]}
    assert trackio_points(tmp_path, "p")["train/loss"][0] == (2, 0.1 + 0.2)
    assert rows[0][2]["train/loss"] == "NaN"
    with sqlite3.connect(tmp_path / "p.db") as database:
        found = database.execute("select run_name, config from configs order by id").fetchall()
    # Two runs of the chosen name, of which the last has continued.
    assert [(name, json.loads(config)["_Group"]) for name, config in found] == [
        ("tiny-01234567", None),
        *[("n", "g")] * 2,
    ]


def test_trackio_is_given_where_to_log_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    given: dict[str, Any] = {}
    monkeypatch.setattr(trackio, "init", lambda **values: given.update(values))
    build_trackio(TrackioConfig(space_id="team/board", private=True, system_metrics=True), _run(tmp_path))
    assert (given["space_id"], given["private"]) == ("team/board", True)
    assert (given["auto_log_cpu"], given["auto_log_gpu"]) == (True, True)
    build_trackio(TrackioConfig(server_url="http://127.0.0.1:1/?write_token=x"), _run(tmp_path))
    assert (given["server_url"], given["auto_log_cpu"]) == ("http://127.0.0.1:1/?write_token=x", False)


def test_what_is_sent_in_the_background_is_sent_in_order_and_what_fails_is_raised_once() -> None:
    sent: list[int] = []
    goes = threading.Event()

    def send(items: Sequence[int]) -> None:
        goes.wait(PATIENCE_S)
        if 3 in items:
            raise ConnectionError("gone")
        sent.extend(items)

    background = BackgroundSender(send, name="test")
    background.put(1)
    background.put(2)
    with pytest.raises(TimeoutError, match=r"not sent within 0\.01 s"):
        background.finish(0.01)
    goes.set()
    background.finish(PATIENCE_S)
    assert sent == [1, 2]
    failing = BackgroundSender(send, name="test")
    failing.put(3)
    with pytest.raises(ConnectionError, match="gone"):
        failing.finish(PATIENCE_S)
    failing.put(5)
    failing.finish(PATIENCE_S)
    assert sent == [1, 2]


def test_each_option_is_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "trackers.md").read_text(encoding="utf-8")
    for config in (TensorBoardConfig, WandbConfig, MLflowConfig, TrackioConfig):
        for option in config.model_fields:
            assert f"`{option}`" in page, option
