"""Runs of a tiny model within one process or a pool, in one directory."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import leave_launcher

from meshwright.base.errors import MeshwrightError
from meshwright.checkpoint.manifest import list_steps
from meshwright.events.step import StepResult
from meshwright.strategy.hooks import hookimpl
from meshwright.strategy.registry import get_registry
from meshwright_run.metrics_report import NONDETERMINISTIC_FIELDS
from meshwright_run.run_file import load_run
from meshwright_run.run_rank import run_rank
from meshwright_testing import pool

STEPS, EVERY, TOLERANCE = 8, 2, 1e-9


class SimulatedKill(BaseException):
    """What no handler catches."""


class KillObserver:
    def __init__(self, step: int | None) -> None:
        self.step = step

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        if result.step == self.step:
            raise SimulatedKill


@contextmanager
def without_launcher() -> Iterator[pytest.MonkeyPatch]:
    """Run a rank whose process group exists, without warnings and without a launcher to report to."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        leave_launcher(patch)
        yield patch


def run_rank_capturing(path: str, kill_after: int | None) -> tuple[str, str, int]:
    """What a rank prints, its error and exit code."""
    error, code = "", 0
    with (
        redirect_stdout(io.StringIO()) as output,
        get_registry().observing(KillObserver(kill_after)),
        without_launcher(),
    ):
        try:
            run_rank(None, load_run(path))
        except MeshwrightError as caught:
            error, code = str(caught), caught.exit_code
        except SimulatedKill:
            error, code = "killed", 137
    return output.getvalue(), error, code


class RunWorkspace:
    """Runs in one directory."""

    def __init__(self, workplace: Path, directory: Path) -> None:
        self.workplace, self.directory = workplace, directory
        self.out = directory / "out"
        self.root = self.out / "checkpoints"

    def write_run_file(self, **changes: Any) -> Path:
        values = yaml.safe_load((self.workplace / "run.yaml").read_text())
        values |= {"strategy": "single", "strategy_config": {}, "nproc": 1, "output_dir": str(self.out)}
        values |= {"steps": STEPS, "sample": None, "eval": {"max_sequences": 2}, "timeout_s": 4}
        values |= {"checkpoint": {"every": EVERY, "keep_last": None, "asynchronous": False}}
        values |= {"optimizer": {"lr": 1e-2, "weight_decay": 0.1}, "schedule": {"warmup_steps": 1}}
        # With the weights of `_handwritten`.
        values["model"] |= {"dtype": "float64", "init": "transformers"}
        values |= changes
        path = self.directory / "run.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    def run(self, *, ranks: int = 1, kill_after: int | None = None, **changes: Any) -> tuple[str, str, int]:
        return pool(ranks).run(run_rank_capturing, str(self.write_run_file(**changes)), kill_after)[0]

    def run_successfully(self, **changes: Any) -> str:
        output, error, code = self.run(**changes)
        assert code == 0, error
        return output

    def read_metrics(self, directory: Path | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in ((directory or self.out) / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in NONDETERMINISTIC_FIELDS} for line in lines]

    def list_steps(self, root: Path | None = None) -> list[int]:
        return [step for step, _ in list_steps(root or self.root)]

    def read_contents(self) -> dict[str, bytes]:
        """All that is there, except for the lock."""
        paths = [path for path in self.out.rglob("*") if path.is_file() and not path.name.startswith(".lock")]
        return {str(path.relative_to(self.out)): path.read_bytes() for path in paths}
