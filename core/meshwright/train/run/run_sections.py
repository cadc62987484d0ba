"""Sections of the run file: schedule, evaluation, sample, metrics, and where a run goes on. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ...base.validation import FrozenModel
from ...mesh.progress import MOST_STEPS
from ...mesh.sizes import Size
from ...optim.config import FinitePositive

HELD_OUT = "held_out"
"""The set that is held out of the sources."""
LLAMA_3_FAILURES = 419 / (54 * 24 * 16_384)
"""Unexpected interruptions per GPU hour in the pre-training of Llama 3 405B."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


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
    failures_per_rank_hour: float = Field(
        default=LLAMA_3_FAILURES,
        ge=0,
        allow_inf_nan=False,
        description="Failures of a rank in an hour, each of which ends the run; see docs/fleet.md. Default: those of "
        "Llama 3's GPUs, 419 of 16,384 in 54 days (arXiv:2407.21783, section 3.3.4).",
    )
    detection_s: Seconds | None = Field(
        default=None, description="Seconds until a failure is noticed. null: watchdog_s, or 60, assumed, without one."
    )
    restart_s: Seconds = Field(
        default=300.0,
        description="Seconds from then until all ranks are there again, without reading. Default: assumed; MegaScale "
        "noticed and examined failures in less than ten minutes (arXiv:2402.15627).",
    )
    disk_bandwidth: FinitePositive = Field(
        default=1e9,
        description="Bytes a second that a node writes to, or reads from, the storage of checkpoints. Default: the "
        "next one, of 2,048 nodes.",
    )
    disk_bandwidth_total: FinitePositive = Field(
        default=2e12,
        description="Bytes a second of all nodes together. Default: what the storage of Llama 3 sustained "
        "(arXiv:2407.21783, section 3.3.1).",
    )
    copy_bandwidth: FinitePositive = Field(
        default=4e9,
        description="Bytes a second that a rank copies from its device to the memory of the host. Default: assumed.",
    )


class StragglersConfig(FrozenModel):
    """When a rank is named that is slower than the others by itself; see docs/watchdog.md."""

    over: Annotated[Size, Field(le=MOST_STEPS)] = Field(
        default=20, description="The last steps of each rank, whose median counts."
    )
    deviations: float = Field(
        default=5.0,
        gt=0,
        allow_inf_nan=False,
        description="Median absolute deviations from the median of all ranks, scaled as a standard deviation is.",
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
    stragglers: StragglersConfig | None = Field(
        default=StragglersConfig(), description="Which ranks are named as slow, of 4 or more; null: none."
    )


Allowed = Literal[
    "optimizer.lr",
    "optimizer.weight_decay",
    "optimizer.no_decay",
    "schedule",
    "ema",
    "max_grad_norm",
    "grad_norm_type",
    "objective",
    "batch_size",
    "data",
    "seed",
]
"""What may differ in a resumed run."""


class ResumeConfig(FrozenModel):
    """From where a run goes on, and what may have changed."""

    source: str = Field(default="auto", alias="from", description="As the plain word: auto, never, or a checkpoint.")
    allow: list[Allowed] = Field(
        default=[],
        description="What may differ from what the run was started with. Each takes effect at once: rates and decay "
        "are those of the run file, a schedule is at the step that it goes on at, other data or another seed begin a "
        "new order, and another batch size goes on in the old one.",
    )


class ElasticConfig(FrozenModel):
    """How many ranks a run may have."""

    min: Annotated[Size, Field(le=4096)] = Field(default=1, description="At least so many.")
    max: Annotated[Size, Field(le=4096)] = Field(default=4096, description="At most so many, of those that nproc says.")

    @model_validator(mode="after")
    def _is_a_range(self) -> ElasticConfig:
        if self.min > self.max:
            raise ValueError(f"min={self.min} is more than max={self.max}; lower it")
        return self
