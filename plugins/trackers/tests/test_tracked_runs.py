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
    WandbFile,
    accumulated,
    mlflow_run,
    tensorboard_hparams,
    tensorboard_points,
    trackio_points,
    trackio_rows,
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
TRACKERS = [
    "tensorboard",
    {"name": "wandb", "mode": "offline", "project": "models", "tags": ["tiny"]},
    {"name": "mlflow", "experiment": "models", "tags": {"kind": "tiny"}},
    {"name": "trackio", "project": "models"},
]


@dataclass(frozen=True)
class Runs:
    """What is left of both attempts, each of which has written `attempts` to metrics.jsonl."""

    directory: Path
    attempts: tuple[list[dict[str, Any]], list[dict[str, Any]]]
    id: str

    @property
    def out(self) -> Path:
        return self.directory / "out"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    directory = tmp_path_factory.mktemp("tracked")
    run_file = write_run(directory)
    values = yaml.safe_load(run_file.read_text())
    # A save that was not done yet when the first attempt fails would be another run.
    checkpoint = {"every": SAVED, "asynchronous": False}
    values |= {"steps": STEPS, "sample": None, "eval": {"every": 2, "max_sequences": 4}, "checkpoint": checkpoint}
    run_file.write_text(yaml.safe_dump(values | {"objective": "failing", "trackers": TRACKERS}))
    (directory / "reported.py").write_text(OBJECTIVE)
    metadata = directory / "reported-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: reported\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[meshwright]\ntold = reported\n")
    (directory / "fails").touch()
    first = _trained(directory, code=2)
    (directory / "fails").unlink()
    second = _trained(directory, code=0)[SAVED:]
    assert [[line["step"] for line in lines] for lines in (first, second)] == [[1, 2, 3, 4], [4, 5, 6]]
    start = json.loads((directory / "out" / "events.jsonl").read_text().splitlines()[0])
    return Runs(directory, (first, second), start["id"])


def _trained(directory: Path, code: int) -> list[dict[str, Any]]:
    """Train, and give the lines of metrics.jsonl."""
    kept = without_trackers_of_the_environment()
    environment = {name: value for name, value in kept.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"PYTHONPATH": f"{directory}:{environment.get('PYTHONPATH', '')}", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"TRACKIO_DIR": str(directory / "trackio")}
    command = [sys.executable, "-m", "meshwright", "train", str(directory / "run.yaml")]
    options: Any = {"cwd": directory, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, check=False, **options)
    assert done.returncode == code, done.stderr
    return [json.loads(line) for line in (directory / "out" / "metrics.jsonl").read_text().splitlines()]


def _points(lines: list[dict[str, Any]]) -> Points:
    """The numbers of lines under the names of trackers."""
    names = {f"tokens_per_second{of}": f"speed/tokens_per_second{of}" for of in ("", "_per_device")}
    names |= {name: f"train/{name}" for name in ("loss", "grad_norm", "learning_rate", "flops")}
    names |= {"num_tokens": "train/tokens", "seconds": "time/step"}
    groups = {"eval": "evaluations", "sum": "sums", "time": "times", "memory": "memory", "norm": "norms"}
    found: Points = {}
    for line in lines:
        values = {to: line[name] for name, to in names.items() if name in line}
        rates = line["learning_rates"] if len(line["learning_rates"]) > 1 else {}
        values |= {f"train/learning_rate/{name}": value for name, value in rates.items()}
        values |= {f"{to}/{name}": value for to, key in groups.items() for name, value in line.get(key, {}).items()}
        for name, value in values.items():
            found.setdefault(name, []).append((line["step"], value))
    return found


def _split(points: Points) -> tuple[Points, list[int]]:
    """Points of steps, and the steps after which checkpoints were reported."""
    of_steps = {name: sorted(each) for name, each in points.items() if not name.startswith(("checkpoint/", "end/"))}
    return of_steps, [step for step, _ in points["checkpoint/seconds"]]


def _float32(points: Points) -> Points:
    return {
        name: [(step, struct.unpack("f", struct.pack("f", value))[0]) for step, value in found]
        for name, found in points.items()
    }


def test_every_tracker_has_every_step_to_the_last_bit_and_the_checkpoints(runs: Runs) -> None:
    first, second = runs.attempts
    redone = {name: sorted(each) for name, each in _points(first + second).items()}
    assert {"eval/held_out", "sum/rows"} <= redone.keys()
    assert _split(trackio_points(runs.directory / "trackio", "models")) == (redone, [SAVED, STEPS])
    assert _split(mlflow_run(f"sqlite:///{runs.out / 'mlflow.db'}", "models")[1]) == (redone, [SAVED, STEPS])
    # W&B has a file of one run for each attempt; TensorBoardTracker what was done again as it was last, in float32.
    files = sorted(runs.out.glob("wandb/offline-run-*/*.wandb"))
    for path, lines, saved in zip(files, runs.attempts, (SAVED, STEPS), strict=True):
        assert path.stem == f"run-{runs.id}"
        assert _split(WandbFile(path).points()) == (_points(lines), [saved])
    once = _float32(_points(first[:SAVED] + second))
    assert _split(tensorboard_points(runs.out / "tensorboard")) == (once, [SAVED, STEPS])


def test_tensorboard_has_the_run_file_as_hyperparameters_and_how_the_run_has_ended(runs: Runs) -> None:
    start, end = tensorboard_hparams(runs.out / "tensorboard")
    assert start.hparams["optimizer.lr"].number_value == 1e-3
    assert start.hparams["run.id"].string_value == start.group_name == runs.id
    assert end.status == 1  # SUCCESS
    texts = accumulated(runs.out / "tensorboard").Tensors("end")
    assert b"end/reason | done" in texts[-1].tensor_proto.string_val[0]


def test_wandb_mlflow_and_trackio_are_reported_options_checkpoints_and_whether_the_run_has_failed(runs: Runs) -> None:
    last = str(runs.out / "checkpoints" / f"step-{STEPS:08d}")
    failed, done = map(WandbFile, sorted(runs.out.glob("wandb/offline-run-*/*.wandb")))
    assert (done.config()["model.num_hidden_layers"], done.config()["run.mesh"]) == (2, "dp_shard=2")
    assert [each.exit_code for file in (failed, done) for each in file.of("exit")] == [1, 0]
    assert [file.summary()["end/reason"] for file in (failed, done)] == ["failed", "done"]
    assert "no more of this" in failed.summary()["fault"]
    assert done.summary()["checkpoint/last"] == last
    (run,) = done.of("run")
    assert (run.project, run.display_name, list(run.tags), run.resume) == ("models", "out", ["tiny"], True)
    run, _ = mlflow_run(f"sqlite:///{runs.out / 'mlflow.db'}", "models")
    tags = run.data.tags
    assert (run.info.status, run.info.run_name, run.data.params["strategy"]) == ("FINISHED", "out", "fsdp2")
    assert (tags["kind"], tags["meshwright.end/reason"], tags["meshwright.run_id"]) == ("tiny", "done", runs.id)
    assert "no more of this" in tags["meshwright.fault"]
    assert tags["meshwright.checkpoint/last"] == last
    rows = trackio_rows(runs.directory / "trackio", "models")
    assert {name for name, _, _ in rows} == {f"out-{runs.id[:8]}"}
    texts = {name: value for _, _, values in rows for name, value in values.items() if isinstance(value, str)}
    assert (texts["end/reason"], "no more of this" in texts["fault"]) == ("done", True)


def test_no_tracker_leaves_anything_where_the_command_was_given(runs: Runs) -> None:
    known = {
        "0.txt",
        "1.txt",
        "lines.jsonl",
        "run.yaml",
        "reported.py",
        "reported-1.0.dist-info",
        "cache",
        "out",
        "trackio",
    }
    assert {path.name for path in runs.directory.iterdir()} == known
