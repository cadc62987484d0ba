"""Options of the trackers. None of their libraries is imported here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from meshwright.plugin import FrozenModel

Text = Annotated[str, Field(min_length=1)]


class TensorBoardConfig(FrozenModel):
    """Options of `tensorboard`."""

    log_dir: Text | None = Field(
        default=None, description="Where event files are written; null: output_dir/tensorboard."
    )


class WandbConfig(FrozenModel):
    """Options of `wandb`."""

    project: Text | None = Field(default=None, description="null: what WANDB_PROJECT or the library says.")
    entity: Text | None = Field(default=None, description="User or team; null: what WANDB_ENTITY or the account says.")
    name: Text | None = Field(default=None, description="Of the run, for people; null: the name of output_dir.")
    group: Text | None = Field(default=None, description="Runs of one group are shown together.")
    job_type: Text | None = Field(default=None, description="Kind of run within its group, such as train.")
    tags: list[Text] = Field(default=[], description="Labels of the run.")
    notes: Text | None = Field(default=None, description="A longer description of the run.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        default=None,
        description="online: sent as it comes. offline: written to files, which `wandb sync` sends. disabled: nothing. "
        "null: what WANDB_MODE says, or else online.",
    )
    dir: Text | None = Field(default=None, description="The folder in which `wandb` makes its own; null: output_dir.")


class MLflowConfig(FrozenModel):
    """Options of `mlflow`."""

    tracking_uri: Text | None = Field(
        default=None,
        description="A server, or a store in a file such as sqlite:///mlflow.db; null: what MLFLOW_TRACKING_URI says, "
        "or else a store in output_dir/mlflow.db.",
    )
    experiment: Text = Field(default="meshwright", description="Which the run belongs to; made where there is none.")
    run_name: Text | None = Field(default=None, description="For people; null: the name of output_dir.")
    tags: dict[str, str] = Field(default={}, description="Tags of the run.")
    flush_timeout_s: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="What the end of the run waits for values that are not yet taken.",
    )


class TrackioConfig(FrozenModel):
    """Options of `trackio`."""

    project: Text = Field(default="meshwright", description="Which the run belongs to.")
    name: Text | None = Field(
        default=None, description="Of the run; null: the name of output_dir and a part of the run's id."
    )
    group: Text | None = Field(default=None, description="Runs of one group are shown together.")
    space_id: Text | None = Field(
        default=None, description="A Space of the Hugging Face Hub to log to; null: a local file."
    )
    private: bool | None = Field(
        default=None, description="Whether a Space that is made is private; null: as the owner's are."
    )
    server_url: Text | None = Field(
        default=None, description="A trackio server of your own to log to, with its write token."
    )
    system_metrics: bool = Field(
        default=False, description="Let trackio log use of processors, memory and GPUs of the host."
    )
