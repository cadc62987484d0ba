"""Sections of the run file: the schedule, evaluation, the sample, and checkpoints. No torch in this module."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from ..base.validation import FrozenModel
from ..files.paths import PathText
from ..launch.stopping import StopName
from ..mesh.sizes import Size

HELD_OUT = "held_out"
"""The set that is held out of the sources."""
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class ScheduleConfig(FrozenModel):
    """A learning-rate schedule of transformers.get_scheduler."""

    name: str = Field(default="cosine", description="Schedule name, such as cosine, linear or constant_with_warmup.")
    warmup_steps: int = Field(default=0, ge=0, lt=2**31, description="Steps of linear warm-up.")
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="Warm-up as a share of all steps, rounded up; in the place of warmup_steps."
    )
    options: dict[str, Any] = Field(default={}, description="Further arguments of the schedule, such as num_cycles.")

    @model_validator(mode="after")
    def _warms_up_one_way(self) -> ScheduleConfig:
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} say different things; leave "
                f"one of the two out"
            )
        return self

    def over(self, steps: int) -> ScheduleConfig:
        """The same with its warm-up in steps, of a run that has so many."""
        if self.warmup_ratio is None:
            return self
        # As it is written: 0.07 of 100 steps are 7, and not 8.
        warmup_steps = math.ceil(Fraction(str(self.warmup_ratio)) * steps)
        return self.model_copy(update={"warmup_steps": warmup_steps, "warmup_ratio": None})


class EarlyStoppingConfig(FrozenModel):
    """Ends a run whose loss on a set no longer falls."""

    set: str = Field(default=HELD_OUT, description="Which set; held_out, or a name of data.eval_sets.")
    patience: Size = Field(default=3, description="So many evaluations in a row without a lower loss end the run.")
    min_delta: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="By how much a lower loss must be lower."
    )


class EvalConfig(FrozenModel):
    """Losses on held-out sets."""

    every: Size | None = Field(default=None, description="Steps between evaluations; null: only at the end.")
    sequences: Size | None = Field(
        default=None,
        description="Sequences of each set to evaluate on, spread over it, or all where it has less; null: all.",
    )
    early_stopping: EarlyStoppingConfig | None = Field(default=None, description="When to end before; null: never.")


class SampleConfig(FrozenModel):
    """The text generated at the end."""

    prompt: str | None = Field(
        default=None,
        description="Text to continue; null: the beginning of a held-out document, or a held-out conversation up to "
        "its first answer.",
    )
    max_new_tokens: Size = Field(default=80)
    temperature: float = Field(default=0.7, ge=0, allow_inf_nan=False, description="0: the likeliest token each time.")


class PlanConfig(FrozenModel):
    """What is known of a run before it begins; see docs/plan.md."""

    enabled: bool = Field(
        default=True,
        description="Plan memory, traffic and time before the ranks start, and compare them with the third step.",
    )
    device: str | None = Field(
        default=None,
        description="What the run is on: a name, such as h100-80gb, or a YAML file of your own; null: what is found. "
        "Times are told of devices that are known or named.",
    )
    when_too_large: Literal["refuse", "warn"] = Field(
        default="refuse", description="What becomes of a run that would not fit into the memory of its device."
    )


class MetricsConfig(FrozenModel):
    """What is measured of a run beside losses, norms and rates; see docs/fit.md."""

    ranks: bool = Field(
        default=True, description="A file of each rank in output_dir/ranks, with its times and memory by step."
    )
    norms_every: Size | None = Field(
        default=None,
        description="Steps between those in which norms of the gradients are measured by block; null: none.",
    )
    communication_every: Size | None = Field(
        default=None, description="Steps between those in which exposed communication is measured; null: none."
    )
    timeline_every: Size | None = Field(
        default=100,
        description="Steps between those in which ranks of a pipeline note when they compute what; null: none.",
    )


class KeepBestConfig(FrozenModel):
    """Checkpoints that are kept because their loss is low."""

    set: str = Field(default=HELD_OUT, description="The loss of which set; held_out, or a name of data.eval_sets.")
    n: Size = Field(default=1, description="How many.")


class SaveOnConfig(FrozenModel):
    """An occasion to save a checkpoint."""

    time: Annotated[str, Field(pattern=r"^(\d+\.?\d*|\.\d+)[smh]$")] = Field(
        description="So long after the last one, or the start, by the clock of the first rank: 90s, 20m or 1.5h."
    )

    @field_validator("time")
    @classmethod
    def _is_above_0(cls, value: str) -> str:
        if not float(value[:-1]):
            raise ValueError("must be above 0")
        return value

    @property
    def seconds(self) -> float:
        return float(self.time[:-1]) * _SECONDS[self.time[-1]]


class OnSignalConfig(FrozenModel):
    """What a signal does that announces the end of a job: the run stops after its step, and saves."""

    signals: list[StopName] = Field(
        default=["SIGTERM", "SIGUSR1"], description="Which; []: none, so that each ends the run at once."
    )
    exit_code: int = Field(
        default=143, ge=0, le=255, description="Of each rank, and of the command, when it has stopped so."
    )


class CheckpointConfig(FrozenModel):
    """Checkpoints; after the last step, too, if there are any. See docs/storage.md."""

    every: Size | None = Field(
        default=None, description="Steps between checkpoints; null: as the next two say, or none."
    )
    save_on: list[SaveOnConfig] = Field(default=[], description="Further occasions, such as [{time: 20m}].")
    keep_best: KeepBestConfig | None = Field(
        default=None,
        description="Save after each evaluation that is among the best n, and keep these, too: {set: held_out, n: 1}.",
    )
    keep_last: Size | None = Field(default=2, description="How many of the newest are kept; null: all.")
    keep_every: Size | None = Field(default=None, description="Those of steps that are multiples of it are kept, too.")
    asynchronous: bool = Field(default=True, description="Go on training while one is written.")
    on_error: Literal["stop", "continue"] = Field(
        default="stop",
        description="What to do when one, or metrics.jsonl, cannot be written; what was there is kept either way.",
    )
    retries: Annotated[int, Field(ge=0, le=100)] = Field(
        default=3,
        description="Attempts after the first, half a second later and then twice as long each time, at most 30 s, "
        "where an error may be gone a moment later: EIO, ESTALE, time-outs, and those of a server.",
    )
    to: PathText | None = Field(
        default=None,
        description="Where they go: a URL of fsspec, such as s3://bucket/prefix, or a directory; null: "
        "output_dir/checkpoints. Another run has another.",
    )
    key_file: PathText | None = Field(
        default=None,
        description="A file with a secret of at least 32 bytes, the same on all nodes: checkpoints are signed with it, "
        "and others are refused; null: neither.",
    )
    on_signal: OnSignalConfig | None = Field(
        default=None,
        description="Save when a signal asks the run to stop; the same command goes on. null: on SIGTERM and SIGUSR1, "
        "if checkpoints are saved otherwise.",
    )

    @property
    def saves(self) -> bool:
        """Whether there are any."""
        occasions = (self.every, self.keep_best, self.on_signal and self.on_signal.signals)
        return bool(self.save_on) or any(occasions)

    @property
    def stops_on(self) -> OnSignalConfig:
        """`on_signal`, written out."""
        return self.on_signal or OnSignalConfig(signals=["SIGTERM", "SIGUSR1"] if self.saves else [])

    @property
    def after_s(self) -> float | None:
        """Seconds between checkpoints; None where the clock does not count."""
        return min((each.seconds for each in self.save_on), default=None)
