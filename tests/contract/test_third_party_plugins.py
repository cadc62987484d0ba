"""A strategy, an objective, a tracker and a command of others, each installed from a wheel of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import write_run

PACKAGES = {
    "their_strategy": """
from meshwright import DataParallelManager, StrategyConfig, StrategySpec, hookimpl
import torch.distributed as dist


class SummingManager(DataParallelManager):
    def shard(self, model):
        return model.to(self.mesh.device)

    def after_backward(self, *, is_last):
        if is_last:
            for parameter in self.iter_trainable():
                dist.all_reduce(parameter.grad, group=self.mesh.group("dp_replicate"))


@hookimpl
def register_strategies():
    summary = "Copies of the model; gradients are summed one by one."
    axes = frozenset({"dp_replicate"})
    return [StrategySpec("summing", summary, axes=axes, config_cls=StrategyConfig, build=SummingManager)]
""",
    "their_objective": """
from typing import ClassVar

from meshwright import hookimpl
from meshwright.plugin import ObjectiveConfig


class Scaled(ObjectiveConfig):
    name: ClassVar[str] = "scaled"
    factor: float = 1.0

    def __call__(self, tokens, batch):
        return self.factor * -tokens.log_probs[tokens.mask].sum()


@hookimpl
def register_objectives():
    return [Scaled]
""",
    "their_tracker": """
from meshwright import FrozenModel, TrackerSpec, hookimpl


class FileConfig(FrozenModel):
    path: str


class ToFile:
    def __init__(self, path):
        self.path = path

    @hookimpl
    def on_step_end(self, result):
        with open(self.path, "a") as file:
            file.write(f"{result.step} {result.loss}\\n")


@hookimpl
def register_trackers():
    build = lambda config, run: ToFile(config.path)
    return [TrackerSpec("to_file", "Writes losses into a file.", config_cls=FileConfig, build=build)]
""",
    "their_command": """
import typer

from meshwright import hookimpl


@hookimpl
def register_commands(app: typer.Typer):
    @app.command()
    def greet(name: str):
        print(f"hello {name}")
""",
}
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1.0"

[project.entry-points.meshwright]
{name} = "{name}"

[tool.setuptools]
py-modules = ["{name}"]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables with which a process has all four packages."""
    directory = tmp_path_factory.mktemp("theirs")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    for name, code in PACKAGES.items():
        source = directory / name
        source.mkdir()
        (source / f"{name}.py").write_text(code, encoding="utf-8")
        (source / "pyproject.toml").write_text(PROJECT.format(name=name), encoding="utf-8")
        wheels = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory / "wheels"), str(source)]
        subprocess.run([*pip, *wheels], check=True, capture_output=True)
    installed = directory / "installed"
    wheels = sorted(map(str, (directory / "wheels").glob("*.whl")))
    assert len(wheels) == len(PACKAGES)
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(installed), *wheels], check=True)
    paths = [str(installed), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def meshwright(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "meshwright", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_plugins_of_others_are_installed_from_wheels_and_used_by_name(
    environment: dict[str, str], tmp_path: Path
) -> None:
    listed = meshwright(environment, "strategies")
    assert "summing\n" in listed
    assert "broken:" not in listed
    assert meshwright(environment, "greet", "you") == "hello you\n"
    run_file, reported = write_run(tmp_path), tmp_path / "reported.log"  # not .txt, which is the corpus
    options = {
        "strategy": "summing",
        "strategy_config": "{}",
        "objective": "{name: scaled, factor: 2.0}",
        "trackers": f"[{{name: to_file, path: {reported}}}]",
        "plan.enabled": "false",
    }
    sets = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    meshwright(environment, "train", str(run_file), *sets)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert [line.split() for line in reported.read_text(encoding="utf-8").splitlines()] == [
        [str(step), str(loss)] for step, loss in enumerate(losses, 1)
    ]
    # Twice the cross entropy of the reference.
    plain = [
        "strategy=single",
        "strategy_config={}",
        "nproc=1",
        f"output_dir={tmp_path / 'plain'}",
        "plan.enabled=false",
    ]
    meshwright(environment, "train", str(run_file), *(word for each in plain for word in ("--set", each)))
    first = json.loads((tmp_path / "plain" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert losses[0] == pytest.approx(2 * first["loss"], rel=1e-5)
