"""The entry point of the distribution meshwright-trackers: what it registers.

No library of a tracker is imported before it is built.
"""

from __future__ import annotations

from meshwright.events.run import RunInfo, TrackerSpec
from meshwright.strategy.hooks import hookimpl

from .config import MLflowConfig, TensorBoardConfig, TrackioConfig, WandbConfig
from .libraries import Library
from .tracker import Tracker

TENSORBOARD = Library("tensorboard", ("tensorboard",), ("tensorboard",), (2, 20))
WANDB = Library("wandb", ("wandb",), ("wandb",), (0, 31))
# Either has the client; the stores in files of databases need the two others.
MLFLOW = Library("mlflow", ("mlflow-skinny", "mlflow"), ("mlflow", "sqlalchemy", "alembic"), (3, 17))
TRACKIO = Library("trackio", ("trackio",), ("trackio",), (0, 43))


def build_tensorboard(config: TensorBoardConfig, run: RunInfo) -> Tracker:
    """Event files of TensorBoard."""
    from .tensorboard import TensorBoard

    return TensorBoard(config, run)


def build_wandb(config: WandbConfig, run: RunInfo) -> Tracker:
    """A run of Weights & Biases."""
    from .wandb import WeightsAndBiases

    return WeightsAndBiases(config, run)


def build_mlflow(config: MLflowConfig, run: RunInfo) -> Tracker:
    """A run of MLflow."""
    from .mlflow import MLflow

    return MLflow(config, run)


def build_trackio(config: TrackioConfig, run: RunInfo) -> Tracker:
    """A run of trackio."""
    from .trackio import Trackio

    return Trackio(config, run)


@hookimpl
def register_trackers() -> list[TrackerSpec]:
    """See `meshwright.strategy.hooks`."""
    return [
        TrackerSpec(
            name="tensorboard",
            summary="Event files, which TensorBoard shows.",
            config_cls=TensorBoardConfig,
            build=build_tensorboard,
            check=lambda config: TENSORBOARD.check(),
        ),
        TrackerSpec(
            name="wandb",
            summary="Weights & Biases, online or offline.",
            config_cls=WandbConfig,
            build=build_wandb,
            check=lambda config: WANDB.check(),
        ),
        TrackerSpec(
            name="mlflow",
            summary="MLflow: a server, or a store in a file.",
            config_cls=MLflowConfig,
            build=build_mlflow,
            check=lambda config: MLFLOW.check(),
        ),
        TrackerSpec(
            name="trackio",
            summary="trackio: a local file, a Space of the Hugging Face Hub, or a server.",
            config_cls=TrackioConfig,
            build=build_trackio,
            check=lambda config: TRACKIO.check(),
        ),
    ]
