"""Hooks of meshwright-trackers. The library of a tracker is imported only when the tracker is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from meshwright.plugin import ConfigError, FrozenModel, RunInfo, TrackerSpec, hookimpl

from .config import MLflowConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from .tracker import Tracker


@dataclass(frozen=True)
class TrackerLibrary:
    """Library of a tracker. One of the distributions and all of the modules must be installed."""

    tracker: str
    distributions: tuple[str, ...]
    modules: tuple[str, ...]
    min_version: tuple[int, int]

    def check(self) -> None:
        """Raise ConfigError if the library is missing or too old, without importing it."""
        remedy = (
            f"Install it from a clone of meshwright with: pip install -c constraints.txt -e "
            f"'plugins/trackers[{self.tracker}]', or leave {self.tracker} out of trackers."
        )
        missing = [name for name in self.modules if find_spec(name) is None]
        if missing:
            raise ConfigError(f"tracker {self.tracker!r} needs {', '.join(missing)}, which is not installed. {remedy}")
        found = next((found for name in self.distributions if (found := _get_version(name)) is not None), None)
        if found is not None and _parse_major_minor(found) < self.min_version:
            needed = ".".join(map(str, self.min_version))
            raise ConfigError(f"tracker {self.tracker!r} needs version {needed} or later, not {found}. {remedy}")


def _get_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _parse_major_minor(text: str) -> tuple[int, int]:
    major, minor, *_ = (*text.split("."), "0")
    return int(major), int(minor) if minor.isdecimal() else 0


TENSORBOARD = TrackerLibrary("tensorboard", ("tensorboard",), ("tensorboard",), (2, 20))
WANDB = TrackerLibrary("wandb", ("wandb",), ("wandb",), (0, 31))
# Both distributions include the client. Database stores in files need sqlalchemy and alembic.
MLFLOW = TrackerLibrary("mlflow", ("mlflow-skinny", "mlflow"), ("mlflow", "sqlalchemy", "alembic"), (3, 17))
TRACKIO = TrackerLibrary("trackio", ("trackio",), ("trackio",), (0, 43))


def _make_builder(module: str, name: str) -> Callable[[Any, RunInfo], Tracker]:
    def build(config: Any, run: RunInfo) -> Tracker:
        tracker: Tracker = getattr(importlib.import_module(f".{module}", __package__), name)(config, run)
        return tracker

    return build


build_tensorboard = _make_builder("tensorboard", "TensorBoardTracker")
build_wandb = _make_builder("wandb", "WandbTracker")
build_mlflow = _make_builder("mlflow", "MLflowTracker")
build_trackio = _make_builder("trackio", "TrackioTracker")


def _check(library: TrackerLibrary, config: FrozenModel) -> None:
    library.check()


@hookimpl
def register_trackers() -> list[TrackerSpec]:
    return [
        TrackerSpec(library.tracker, summary, config_cls, build, partial(_check, library))
        for library, summary, config_cls, build in (
            (TENSORBOARD, "Event files for TensorBoard.", TensorBoardConfig, build_tensorboard),
            (WANDB, "Weights & Biases, online or offline.", WandbConfig, build_wandb),
            (MLFLOW, "MLflow: a server, or a file store.", MLflowConfig, build_mlflow),
            (
                TRACKIO,
                "trackio: a local file, a Space of the Hugging Face Hub, or a server.",
                TrackioConfig,
                build_trackio,
            ),
        )
    ]
