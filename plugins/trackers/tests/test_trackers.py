"""Names and parameters, options and what is wrong with them, numbers that are not finite, and servers that go away."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from read_back import (
    mlflow_points,
    tensorboard_hparams,
    tensorboard_points,
    trackio_points,
    trackio_rows,
    wandb_points,
    wandb_records,
    without_trackers_of_the_environment,
)

from meshwright.base.errors import ConfigError
from meshwright.events.run import RunInfo, RunSummary, SavedCheckpoint
from meshwright.events.step import StepResult
from meshwright.strategy.registry import get_registry
from meshwright_run.observers import chosen, list_trackers, tracking
from meshwright_trackers.config import MLflowConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from meshwright_trackers.plugin import Library, build_mlflow, build_tensorboard, build_trackio, build_wandb
from meshwright_trackers.tracker import Background, parameters, step_metrics

PATIENCE_S = 240


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name, value in without_trackers_of_the_environment().items():
        monkeypatch.setenv(name, value)


def _run(directory: Path, *, start: int = 0, config: Mapping[str, Any] | None = None) -> RunInfo:
    return RunInfo(
        id="0123456789abcdef",
        name="tiny",
        strategy="fsdp2",
        mesh="dp_shard=2",
        world_size=2,
        rank=0,
        start=start,
        steps=9,
        parameters=12,
        device="cpu",
        directory=directory,
        config=config or {"optimizer": {"lr": 0.1}},
        version="0.1.0",
    )


def _step(step: int, loss: float = 2.0, **more: Any) -> StepResult:
    values = {"steps": 9, "grad_norm": 1.5, "learning_rate": 0.1, "num_tokens": 8, "seconds": 0.5, "rank": 0}
    return StepResult(step=step, loss=loss, **{**values, "ended": 1000.0 + step, **more})


def _ended(run: RunInfo, step: int, reason: Any = "done") -> RunSummary:
    return RunSummary(run=run, reason=reason, step=step, steps=9, seconds=3.0, loss=2.0, evaluations={}, rank=0)


def test_every_number_of_a_step_has_a_name_and_what_is_not_known_has_none() -> None:
    bare = step_metrics(_step(1))
    assert bare == {
        "train/loss": 2.0,
        "train/grad_norm": 1.5,
        "train/learning_rate": 0.1,
        "train/tokens": 8.0,
        "speed/tokens_per_second": 16.0,
        "speed/tokens_per_second_per_device": 16.0,
        "time/step": 0.5,
    }
    rich = _step(
        1,
        sums={"rewards": 3.0},
        evaluations={"held_out": 2.5},
        times={"data": 0.1},
        learning_rates={"decay": 0.1, "1": 0.2},
        norms={"model.layers.0": 0.7},
        memory={"allocated": 5},
        world_size=2,
        flops=30.0,
        peak_flops=60.0,
    )
    assert step_metrics(rich) == bare | {
        "speed/tokens_per_second_per_device": 8.0,
        "sum/rewards": 3.0,
        "eval/held_out": 2.5,
        "time/data": 0.1,
        "train/learning_rate/decay": 0.1,
        "train/learning_rate/1": 0.2,
        "norm/model.layers.0": 0.7,
        "memory/allocated": 5.0,
        "train/flops": 30.0,
        "speed/mfu": 0.5,
    }


def test_parameters_are_the_run_file_with_dots_and_no_secret_of_a_tracker() -> None:
    config = {
        "model": {"hidden_size": 16, "rope": {}},
        "data": {"sources": [{"path": "a"}, {"path": "b"}], "columns": ["x", "y"]},
        "nproc": None,
        "trackers": [{"name": "trackio", "server_url": "http://x/?write_token=secret"}],
    }
    assert parameters(_run(Path(), config=config)) == {
        "model.hidden_size": 16,
        "model.rope": "{}",
        "data.sources.0.path": "a",
        "data.sources.1.path": "b",
        "data.columns": '["x", "y"]',
        "nproc": None,
        "run.id": "0123456789abcdef",
        "run.strategy": "fsdp2",
        "run.mesh": "dp_shard=2",
        "run.world_size": 2,
        "run.parameters": 12,
        "run.device": "cpu",
        "run.version": "0.1.0",
    }


def test_the_four_trackers_are_known_and_nothing_of_them_is_imported_before_they_are_built() -> None:
    code = (
        "import sys\n"
        "from meshwright_trackers.plugin import register_trackers\n"
        "specs = register_trackers()\n"
        "for spec in specs: spec.config_cls()\n"
        "heavy = {'torch', 'tensorboard', 'wandb', 'mlflow', 'trackio'} & set(sys.modules)\n"
        "print([spec.name for spec in specs], heavy)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told == "['tensorboard', 'wandb', 'mlflow', 'trackio'] set()\n"
    assert {"tensorboard", "wandb", "mlflow", "trackio"} <= set(list_trackers())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("tensorbord", "Did you mean 'tensorboard'?"),
        ({"name": "wandb", "mode": "ofline"}, "mode: Input should be 'online', 'offline' or 'disabled'"),
        ({"name": "mlflow", "runname": "x"}, "runname: unknown key. Did you mean 'run_name'?"),
        ({"name": "mlflow", "flush_timeout_s": 0.0}, "flush_timeout_s: Input should be greater than 0"),
        ({"name": "trackio", "project": ""}, "project: String should have at least 1 character"),
    ],
)
def test_what_is_wrong_in_the_run_file_is_told_when_it_is_planned(asked: Any, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        chosen([asked])
    assert told in str(error.value)


def test_a_library_that_is_missing_or_too_old_is_told_with_the_line_that_installs_it() -> None:
    line = "pip install -c constraints.txt -e 'plugins/trackers[wandb]'"
    with pytest.raises(ConfigError) as error:
        Library("wandb", ("wandb-of-nobody",), ("wandb_of_nobody",), (0, 31)).check()
    assert "tracker 'wandb' needs wandb_of_nobody, which is not installed" in str(error.value)
    assert line in str(error.value)
    with pytest.raises(ConfigError) as error:
        Library("wandb", ("pytest",), ("pytest",), (999, 0)).check()
    assert "needs version 999.0 or later" in str(error.value)
    assert line in str(error.value)


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
    # A first sitting that has failed leaves no verdict, which TensorBoard would keep.
    _, verdict = tensorboard_hparams(tmp_path / "logs")
    assert verdict.status == 1  # SUCCESS


def test_what_tensorboard_is_told_can_be_seen_while_the_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    tracker = build_tensorboard(TensorBoardConfig(), _run(tmp_path))
    for step in range(1, 4):
        tracker.on_step_end(_step(step))
    end = time.monotonic() + PATIENCE_S
    while len(tensorboard_points(tmp_path / "tensorboard").get("train/loss", [])) < 3:
        assert time.monotonic() < end, "nothing is seen"
        time.sleep(0.1)
    tracker.close()


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
    while not any(each.WhichOneof("record_type") == "exit" for each in wandb_records(path)):
        assert time.monotonic() < end, "the end is not written"
        time.sleep(0.05)
    (_, nan), (_, inf) = wandb_points(path)["train/loss"]
    assert math.isnan(nan)
    assert inf == math.inf
    records = wandb_records(path)
    run = next(each.run for each in records if each.WhichOneof("record_type") == "run")
    assert (run.project, run.entity, run.display_name, run.run_group) == ("p", "e", "n", "g")
    assert (run.job_type, list(run.tags), run.notes) == ("j", ["t"], "x")
    kinds = [each.WhichOneof("record_type") for each in records]
    assert "preempting" in kinds
    assert next(each.exit.exit_code for each in records if each.WhichOneof("record_type") == "exit") == 1


@pytest.mark.slow
def test_a_wandb_run_that_is_disabled_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    tracker = build_wandb(WandbConfig(mode="disabled"), _run(tmp_path))
    tracker.on_step_end(_step(1))
    tracker.on_run_end(_ended(_run(tmp_path), 1))
    assert not list(tmp_path.iterdir())


def _mlflow_run(uri: str, experiment: str = "meshwright") -> tuple[Any, Any]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


@pytest.mark.slow
def test_mlflow_goes_on_with_its_run_and_keeps_options_that_have_changed(tmp_path: Path) -> None:
    for library in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(library)
    uri = f"sqlite:///{tmp_path / 'any.db'}"
    config = MLflowConfig(tracking_uri=uri, experiment="e", run_name="n", tags={"a": "b"})
    first = build_mlflow(config, _run(tmp_path, config={"lr": 0.1, "long": "x" * 9000, "odd*key": [1]}))
    first.on_step_end(_step(1, 0.1 + 0.2, evaluations={"a+b": 1e-300}))
    first.on_step_end(_step(2, math.nan))
    first.on_checkpoint(SavedCheckpoint(2, tmp_path / "two", 0.5, 0, is_best=True))
    first.on_run_end(_ended(_run(tmp_path), 2, "signal"))
    client, run = _mlflow_run(uri, "e")
    assert run.info.status == "KILLED"
    second = build_mlflow(config, _run(tmp_path, start=2, config={"lr": 0.2, "more": 1}))
    second.on_step_end(_step(3, 1 / 3))
    second.close()
    client, run = _mlflow_run(uri, "e")
    assert (run.info.status, run.info.run_name, run.data.tags["a"]) == ("FAILED", "n", "b")
    points = mlflow_points(client, run.info.run_id)
    (_, one), (_, nan), (_, three) = points["train/loss"]
    assert (one, math.isnan(nan), three) == (0.1 + 0.2, True, 1 / 3)
    assert points["eval/a_2b_b"] == [(1, 1e-300)]
    assert (run.data.params["lr"], run.data.tags["changed.lr"], run.data.params["more"]) == ("0.1", "0.2", "1")
    assert len(run.data.params["long"]) == 6000
    assert run.data.params["odd_2a_key"] == "[1]"
    assert run.data.tags["meshwright.checkpoint/best"] == str(tmp_path / "two")
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [each.timestamp for each in history] == [1001000, 1002000, 1003000]


@pytest.mark.slow
def test_a_file_store_of_mlflow_takes_the_same_where_mlflow_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(library)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    tracker = build_mlflow(MLflowConfig(), _run(tmp_path))
    tracker.on_step_end(_step(1, 0.1 + 0.2))
    tracker.on_run_end(_ended(_run(tmp_path), 1))
    client, run = _mlflow_run((tmp_path / "mlruns").as_uri())
    assert mlflow_points(client, run.info.run_id)["train/loss"] == [(1, 0.1 + 0.2)]
    assert run.info.status == "FINISHED"


IN_A_PROCESS = """
import math, sys
sys.path[:0] = [{here!r}]
from pathlib import Path
from meshwright_trackers.config import TrackioConfig
from meshwright_trackers.plugin import build_trackio
from test_trackers import _ended, _run, _step

directory = Path({directory!r})
"""


def _script(directory: Path, code: str) -> str:
    return IN_A_PROCESS.format(here=str(Path(__file__).parent), directory=str(directory)) + code


TRACKIO = """
chosen = TrackioConfig(project="p", name="n", group="g")
plain = TrackioConfig(project="p")
for config, start in [(plain, 0), (plain, 0), (chosen, 0), (chosen, 0), (chosen, 2)]:
    tracker = build_trackio(config, _run(directory, start=start))
    tracker.on_step_end(_step(start + 1, math.nan))
    tracker.on_step_end(_step(start + 2, 0.1 + 0.2))
    tracker.on_run_end(_ended(_run(directory), start + 2))
"""


@pytest.mark.slow
def test_trackio_goes_on_with_a_run_of_its_id_and_with_one_of_a_chosen_name_only_where_ours_goes_on(
    tmp_path: Path,
) -> None:
    pytest.importorskip("trackio")
    code = _script(tmp_path, TRACKIO)
    environment = without_trackers_of_the_environment() | {"TRACKIO_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=PATIENCE_S)
    rows = trackio_rows(tmp_path, "p")
    steps: dict[str, list[int]] = {}
    for name, step, values in rows:
        if "train/loss" in values:
            steps.setdefault(name, []).append(step)
    assert steps == {"tiny-01234567": [1, 2, 1, 2], "n": [1, 2, 1, 2, 3, 4]}
    assert trackio_points(tmp_path, "p")["train/loss"][0] == (2, 0.1 + 0.2)
    assert rows[0][2]["train/loss"] == "NaN"
    import sqlite3

    with sqlite3.connect(tmp_path / "p.db") as database:
        ids = [name for (name,) in database.execute("select run_name from configs order by id")]
        groups = {json.loads(config)["_Group"] for (config,) in database.execute("select config from configs")}
    # Two runs of the chosen name, of which the last has gone on.
    assert ids == ["tiny-01234567", "n", "n"]
    assert groups == {None, "g"}


TRACKIO_SERVER = """
import sys, time, trackio
trackio.init(project="other").finish()
server = trackio.show(open_browser=False, block_thread=False)
print("URL", server[3], flush=True)
sys.stdin.read()
"""
TRACKIO_CLIENT = """
run = _run(directory)
tracker = build_trackio(TrackioConfig(project="p", server_url={url!r}), run)
tracker.on_step_end(_step(1, 1 / 3))
tracker.on_run_end(_ended(run, 1))
"""


@pytest.mark.slow
def test_a_server_of_trackio_has_what_the_run_has_told(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    environment = without_trackers_of_the_environment()
    server = subprocess.Popen(
        [sys.executable, "-c", TRACKIO_SERVER],
        env=environment | {"TRACKIO_DIR": str(theirs)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        url = next(line.split()[1] for line in server.stdout if line.startswith("URL "))
        code = _script(tmp_path, TRACKIO_CLIENT.format(url=url))
        told = environment | {"TRACKIO_DIR": str(ours)}
        subprocess.run([sys.executable, "-c", code], env=told, check=True, timeout=PATIENCE_S)
        end = time.monotonic() + PATIENCE_S
        while not (theirs / "p.db").exists() or "train/loss" not in trackio_points(theirs, "p"):
            assert time.monotonic() < end, "the server has nothing"
            time.sleep(0.1)
    finally:
        server.kill()
        server.communicate()
    assert trackio_points(theirs, "p")["train/loss"] == [(1, 1 / 3)]


def test_trackio_is_given_where_to_log_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    given: dict[str, Any] = {}
    monkeypatch.setattr(trackio, "init", lambda **values: given.update(values))
    build_trackio(TrackioConfig(space_id="team/board", private=True, system_metrics=True), _run(tmp_path))
    assert (given["space_id"], given["private"]) == ("team/board", True)
    assert (given["auto_log_cpu"], given["auto_log_gpu"]) == (True, True)
    build_trackio(TrackioConfig(server_url="http://127.0.0.1:1/?write_token=x"), _run(tmp_path))
    assert given["server_url"] == "http://127.0.0.1:1/?write_token=x"
    assert (given["auto_log_cpu"], given["auto_log_gpu"]) == (False, False)


def test_what_is_sent_in_the_background_is_sent_in_order_and_what_fails_is_raised_once() -> None:
    sent: list[int] = []
    goes = threading.Event()

    def send(items: Sequence[int]) -> None:
        goes.wait(PATIENCE_S)
        if 3 in items:
            raise ConnectionError("gone")
        sent.extend(items)

    background = Background(send, name="test")
    background.put(1)
    background.put(2)
    with pytest.raises(TimeoutError, match=r"not been taken after 0\.01 s"):
        background.finish(0.01)
    goes.set()
    background.finish(PATIENCE_S)
    assert sent == [1, 2]
    failing = Background(send, name="test")
    failing.put(3)
    with pytest.raises(ConnectionError, match="gone"):
        failing.finish(PATIENCE_S)
    failing.put(5)
    failing.finish(PATIENCE_S)
    assert sent == [1, 2]


@dataclass(frozen=True)
class Server:
    """MLflow's server application in a process of its own, and where it answers."""

    process: subprocess.Popen[bytes]
    uri: str


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    for library in ("mlflow", "sqlalchemy", "alembic", "flask", "flask_cors", "graphene"):
        pytest.importorskip(library)
    folder, script = tmp_path_factory.mktemp("server"), Path(__file__).with_name("mlflow_server.py")
    port_file = folder / "port"
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder), str(port_file)],
        env=without_trackers_of_the_environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + PATIENCE_S
        while not port_file.exists():
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() < end, "the server did not answer"
            time.sleep(0.05)
        yield Server(process, f"http://127.0.0.1:{port_file.read_text()}")
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_server_of_mlflow_has_all_that_the_run_has_told(tmp_path: Path, server: Server) -> None:
    run, hook = _run(tmp_path), get_registry().hook
    uri = server.uri.replace("http://", "http://user:password@")
    with tracking(chosen([{"name": "mlflow", "tracking_uri": uri, "experiment": "all"}]), run):
        for step in range(1, 4):
            hook.on_step_end(result=_step(step, 1 / step))
        hook.on_run_end(summary=_ended(run, 3))
    client, found = _mlflow_run(server.uri, "all")
    assert mlflow_points(client, found.info.run_id)["train/loss"] == [(step, 1 / step) for step in range(1, 4)]
    assert found.info.status == "FINISHED"


@pytest.mark.slow
def test_the_end_of_a_run_waits_for_mlflow_no_longer_than_it_is_told_to(tmp_path: Path, server: Server) -> None:
    config = MLflowConfig(tracking_uri=server.uri, experiment="stopped", flush_timeout_s=0.5)
    tracker = build_mlflow(config, _run(tmp_path))
    server.process.send_signal(signal.SIGSTOP)
    try:
        start = time.monotonic()
        tracker.on_step_end(_step(1))
        assert time.monotonic() - start < 0.5
        with pytest.raises(TimeoutError, match=r"not been taken after 0\.5 s"):
            tracker.on_run_end(_ended(_run(tmp_path), 1))
    finally:
        server.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_server_of_mlflow_that_is_killed_is_told_once_and_ends_no_run(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run, hook = _run(tmp_path), get_registry().hook
    asked = [{"name": "mlflow", "tracking_uri": server.uri, "experiment": "killed"}]
    with warnings.catch_warnings(record=True) as told, tracking(chosen(asked), run):
        warnings.simplefilter("always")
        hook.on_step_end(result=_step(1))
        server.process.kill()
        server.process.wait()
        end, step = time.monotonic() + PATIENCE_S, 2
        while not _of_trackers(told):
            assert time.monotonic() < end, "nobody was told"
            hook.on_step_end(result=_step(step))
            step += 1
            time.sleep(0.02)
        hook.on_step_end(result=_step(step))
        hook.on_run_end(summary=_ended(run, step))
    (message,) = _of_trackers(told)
    assert "tracker 'mlflow' has failed in on_step_end and is left aside" in message
    with pytest.raises(ConfigError, match="tracker 'mlflow' cannot be started"), tracking(chosen(asked), run):
        pass


def _of_trackers(told: Sequence[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in told if str(each.message).startswith("tracker ")]


def test_configs_are_read_from_their_own_data() -> None:
    for config in (TensorBoardConfig(), WandbConfig(tags=["a"]), MLflowConfig(tags={"a": "b"}), TrackioConfig()):
        assert type(config).model_validate(config.to_dict()) == config


def test_run_files_of_the_docs_are_valid() -> None:
    docs = Path(__file__).parents[3] / "docs" / "trackers.md"
    for page in (docs, Path(__file__).parents[1] / "README.md"):
        blocks = [block.split("```")[0] for block in page.read_text(encoding="utf-8").split("```yaml\n")[1:]]
        assert blocks
        for block in blocks:
            assert chosen(yaml.safe_load(block)["trackers"])


def test_each_option_is_in_the_docs_with_a_test_that_is_there() -> None:
    page = (Path(__file__).parents[3] / "docs" / "trackers.md").read_text(encoding="utf-8")
    for config in (TensorBoardConfig, WandbConfig, MLflowConfig, TrackioConfig):
        for option in config.model_fields:
            assert f"`{option}`" in page, option
    here = Path(__file__).read_text(encoding="utf-8")
    for name in set(re.findall(r"`(test_\w+)`", page)):
        assert f"def {name}(" in here, name
