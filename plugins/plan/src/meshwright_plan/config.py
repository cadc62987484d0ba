"""The section `plan` of a run file. No torch in this module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from meshwright.plugin import FinitePositive, FrozenModel

if TYPE_CHECKING:
    from meshwright_run.run_file import RunConfig

LLAMA_3_FAILURES = 419 / (54 * 24 * 16_384)
"""Unexpected interruptions per GPU hour in the pre-training of Llama 3 405B."""
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


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


def asked_of(config: RunConfig) -> PlanConfig:
    """Return the section of a run."""
    return config.section(PlanConfig) or PlanConfig()
