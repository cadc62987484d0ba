"""Options of the trackers. Imports none of their libraries."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from meshwright.plugin import FrozenModel

Text = Annotated[str, Field(min_length=1)]


class TensorBoardConfig(FrozenModel):
    """Options of `tensorboard`."""

    log_dir: Text | None = Field(
        default=None, description="Directory of the event files. null: output_dir/tensorboard."
    )


class WandbConfig(FrozenModel):
    """Options of `wandb`."""

    project: Text | None = Field(
        default=None, description="Project of the run. null: WANDB_PROJECT, or wandb's default."
    )
    entity: Text | None = Field(
        default=None, description="User or team. null: WANDB_ENTITY, or the default of the account."
    )
    name: Text | None = Field(default=None, description="Display name of the run. null: the name of output_dir.")
    group: Text | None = Field(default=None, description="Group of the run; runs of a group are shown together.")
    job_type: Text | None = Field(default=None, description="Kind of run in its group, such as train.")
    tags: list[Text] = Field(default=[], description="Tags of the run.")
    notes: Text | None = Field(default=None, description="Description of the run.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        default=None,
        description="online: send values immediately. offline: write files, which `wandb sync` sends. disabled: log "
        "nothing. null: WANDB_MODE, or online.",
    )
    dir: Text | None = Field(
        default=None, description="Directory in which wandb creates its directory `wandb`. null: output_dir."
    )


class MLflowConfig(FrozenModel):
    """Options of `mlflow`."""

    tracking_uri: Text | None = Field(
        default=None,
        description="URI of a server, or of a file store such as sqlite:///mlflow.db. null: MLFLOW_TRACKING_URI, or a "
        "store in output_dir/mlflow.db.",
    )
    experiment: Text = Field(
        default="meshwright", description="Experiment of the run, which is created if it does not exist."
    )
    run_name: Text | None = Field(default=None, description="Display name of the run. null: the name of output_dir.")
    tags: dict[str, str] = Field(default={}, description="Tags of the run.")
    flush_timeout_s: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Maximum time that the end of the run waits until all values are sent [s].",
    )


class TrackioConfig(FrozenModel):
    """Options of `trackio`."""

    project: Text = Field(default="meshwright", description="Project of the run.")
    name: Text | None = Field(
        default=None, description="Name of the run. null: the name of output_dir with a part of the run's id."
    )
    group: Text | None = Field(default=None, description="Group of the run; runs of a group are shown together.")
    space_id: Text | None = Field(
        default=None, description="Space of the Hugging Face Hub to log to. null: a local file."
    )
    private: bool | None = Field(
        default=None, description="Whether a newly created Space is private. null: the owner's default."
    )
    server_url: Text | None = Field(
        default=None, description="URL of a self-hosted trackio server to log to, with its write token."
    )
    system_metrics: bool = Field(
        default=False, description="Let trackio log the host's CPU, memory and GPU utilization."
    )
