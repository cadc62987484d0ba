"""A run on two ranks with all four trackers, which fails and is resumed, and what lies in their files then."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from read_back import (
    Points,
    accumulated,
    mlflow_points,
    tensorboard_hparams,
    tensorboard_points,
    trackio_points,
    trackio_rows,
    wandb_config,
    wandb_points,
    wandb_records,
    wandb_summary,
    without_trackers_of_the_environment,
)
from support.commands import LAUNCHER_VARIABLES, write_run

for library in ("tensorboard", "wandb", "mlflow", "sqlalchemy", "alembic", "trackio"):
    pytest.importorskip(library)

pytestmark = pytest.mark.slow
STEPS, SAVED, FAILS_IN = 6, 3, 5
OBJECTIVE = f"""
from pathlib import Path

from meshwright import hookimpl
from meshwright.plugin import ObjectiveConfig

HERE = Path(__file__).parent


class Failing(ObjectiveConfig):
    name = "failing"

    def __call__(self, tokens, batch):
        metrics = HERE / "out" / "metrics.jsonl"
        done = len(metrics.read_text().splitlines()) if metrics.is_file() else 0
        if done == {FAILS_IN - 1} and (HERE / "fails").exists():
            raise RuntimeError("no more of this")
        return -tokens.log_probs.sum(), {{"rows": tokens.log_probs.new_tensor(float(len(tokens.log_probs)))}}


@hookimpl
def register_objectives():
    return [Failing]
"""


@dataclass(frozen=True)
class Runs:
    """What is left of both sittings.

    Attributes:
        sittings: the lines of metrics.jsonl that each has written.
    """

    directory: Path
    sittings: tuple[list[dict[str, Any]], list[dict[str, Any]]]
    id: str
    messages: tuple[str, str]

    @property
    def out(self) -> Path:
        return self.directory / "out"

    @property
    def wandb_files(self) -> list[Path]:
        return sorted(self.out.glob("wandb/offline-run-*/*.wandb"))

    def points(self, *, is_step_redone: bool) -> Points:
        """What was told of the steps; the one that was done again both times, or as it was the second time."""
        first, second = self.sittings
        lines = first + second if is_step_redone else first[:SAVED] + second
        found: Points = {}
        for line in lines:
            for name, value in _named(line).items():
                found.setdefault(name, []).append((line["step"], value))
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("tracked")
    run_file = write_run(directory)
    values = yaml.safe_load(run_file.read_text())
    # A save that was not done yet when the first sitting fails would be another run.
    checkpoint = {"every": SAVED, "asynchronous": False}
    values |= {"steps": STEPS, "sample": None, "eval": {"every": 2, "sequences": 4}, "checkpoint": checkpoint}
    values["objective"] = "failing"
    values["trackers"] = [
        "tensorboard",
        {"name": "wandb", "mode": "offline", "project": "models", "tags": ["tiny"]},
        {"name": "mlflow", "experiment": "models", "tags": {"kind": "tiny"}},
        {"name": "trackio", "project": "models"},
    ]
    run_file.write_text(yaml.safe_dump(values))
    (directory / "told.py").write_text(OBJECTIVE)
    metadata = directory / "told-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: told\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[meshwright]\ntold = told\n")
    (directory / "fails").touch()
    failed = _train(directory)
    assert failed.returncode == 2, failed.stderr
    first = _lines(directory)
    (directory / "fails").unlink()
    resumed = _train(directory)
    assert resumed.returncode == 0, resumed.stderr
    second = _lines(directory)[SAVED:]
    assert [line["step"] for line in first] == [1, 2, 3, 4]
    assert [line["step"] for line in second] == [4, 5, 6]
    start = json.loads((directory / "out" / "events.jsonl").read_text().splitlines()[0])
    return Runs(directory, (first, second), start["id"], (failed.stderr, resumed.stderr))


def _train(directory: Path) -> subprocess.CompletedProcess[str]:
    kept = without_trackers_of_the_environment()
    environment = {name: value for name, value in kept.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"PYTHONPATH": str(directory)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    environment["TRACKIO_DIR"] = str(directory / "trackio")
    return subprocess.run(
        [sys.executable, "-m", "meshwright", "train", str(directory / "run.yaml")],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]


def _named(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line under the names of trackers."""
    found = {
        "train/loss": line["loss"],
        "train/grad_norm": line["grad_norm"],
        "train/learning_rate": line["learning_rate"],
        "train/tokens": line["num_tokens"],
        "speed/tokens_per_second": line["tokens_per_second"],
        "speed/tokens_per_second_per_device": line["tokens_per_second_per_device"],
        "time/step": line["seconds"],
    }
    rates = line["learning_rates"] if len(line["learning_rates"]) > 1 else {}
    found |= {f"train/learning_rate/{name}": value for name, value in rates.items()}
    found |= {"train/flops": line["flops"]} if "flops" in line else {}
    groups = {"eval": "evaluations", "sum": "sums", "time": "times", "memory": "memory", "norm": "norms"}
    return found | {f"{to}/{name}": v for to, key in groups.items() for name, v in line.get(key, {}).items()}


def _of_steps(points: Points) -> Points:
    return {name: found for name, found in points.items() if not name.startswith(("checkpoint/", "end/"))}


def _float32(points: Points) -> Points:
    return {
        name: [(step, struct.unpack("f", struct.pack("f", value))[0]) for step, value in found]
        for name, found in points.items()
    }


def test_tensorboard_has_every_step_once_in_float32_and_what_was_done_again_as_it_was_last(runs: Runs) -> None:
    assert _of_steps(tensorboard_points(runs.out / "tensorboard")) == _float32(runs.points(is_step_redone=False))
    assert len(list((runs.out / "tensorboard").iterdir())) == 2
    assert "eval/held_out" in runs.points(is_step_redone=False)
    assert "sum/rows" in runs.points(is_step_redone=False)


def test_tensorboard_has_the_run_file_as_hyperparameters_and_how_the_run_has_ended(runs: Runs) -> None:
    start, end = tensorboard_hparams(runs.out / "tensorboard")
    assert start.hparams["optimizer.lr"].number_value == 1e-3
    assert start.hparams["run.id"].string_value == start.group_name == runs.id
    assert end.status == 1  # SUCCESS
    texts = accumulated(runs.out / "tensorboard").Tensors("end")
    assert b"end/reason | done" in texts[-1].tensor_proto.string_val[0]


def test_wandb_has_every_step_to_the_last_bit_in_a_file_for_each_sitting_of_one_run(runs: Runs) -> None:
    files = runs.wandb_files
    assert len(files) == 2
    for path, lines in zip(files, runs.sittings, strict=True):
        assert path.stem == f"run-{runs.id}"
        found = _of_steps(wandb_points(path))
        expected: Points = {}
        for line in lines:
            for name, value in _named(line).items():
                expected.setdefault(name, []).append((line["step"], value))
        assert found == expected


def test_wandb_is_told_of_options_checkpoints_and_whether_the_run_has_failed(runs: Runs) -> None:
    failed, done = runs.wandb_files
    assert wandb_config(done)["model.num_hidden_layers"] == 2
    assert wandb_config(done)["run.mesh"] == "dp_shard=2"
    codes = [
        [record.exit.exit_code for record in wandb_records(path) if record.WhichOneof("record_type") == "exit"]
        for path in runs.wandb_files
    ]
    assert codes == [[1], [0]]
    assert wandb_summary(failed)["end/reason"] == "failed"
    assert "no more of this" in wandb_summary(failed)["fault"]
    assert wandb_summary(done)["end/reason"] == "done"
    assert wandb_summary(done)["checkpoint/last"] == str(runs.out / "checkpoints" / f"step-{STEPS:08d}")
    run = next(record.run for record in wandb_records(done) if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, list(run.tags), run.resume) == ("models", "out", ["tiny"], True)


def test_mlflow_has_one_run_with_every_step_to_the_last_bit(runs: Runs) -> None:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{runs.out / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("models")
    found = client.search_runs([experiment.experiment_id])
    assert [each.data.tags["meshwright.run_id"] for each in found] == [runs.id]
    (run,) = found
    points = {name: sorted(each) for name, each in runs.points(is_step_redone=True).items()}
    assert {n: sorted(p) for n, p in _of_steps(mlflow_points(client, run.info.run_id)).items()} == points
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "out"
    assert run.data.params["strategy"] == "fsdp2"
    tags = run.data.tags
    assert (tags["kind"], tags["meshwright.end/reason"]) == ("tiny", "done")
    assert "no more of this" in tags["meshwright.fault"]
    assert tags["meshwright.checkpoint/last"].endswith(f"step-{STEPS:08d}")


def test_trackio_has_one_run_with_every_step_to_the_last_bit(runs: Runs) -> None:
    rows = trackio_rows(runs.directory / "trackio", "models")
    assert {name for name, _, _ in rows} == {f"out-{runs.id[:8]}"}
    assert _of_steps(trackio_points(runs.directory / "trackio", "models")) == runs.points(is_step_redone=True)
    texts = {name: value for _, _, values in rows for name, value in values.items() if isinstance(value, str)}
    assert texts["end/reason"] == "done"
    assert "no more of this" in texts["fault"]


def test_checkpoints_are_metrics_of_their_step_in_all_trackers(runs: Runs) -> None:
    everywhere = [
        tensorboard_points(runs.out / "tensorboard"),
        wandb_points(runs.wandb_files[0]) | {"": wandb_points(runs.wandb_files[1])["checkpoint/seconds"]},
        trackio_points(runs.directory / "trackio", "models"),
    ]
    for points in everywhere:
        steps = [step for step, _ in points["checkpoint/seconds"] + points.get("", [])]
        assert steps == [SAVED, STEPS]


def test_no_tracker_leaves_anything_where_the_command_was_given(runs: Runs) -> None:
    known = {"0.txt", "1.txt", "lines.jsonl", "run.yaml", "told.py", "told-1.0.dist-info", "cache", "out", "trackio"}
    assert {path.name for path in runs.directory.iterdir()} == known
