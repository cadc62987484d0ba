"""What would make a run fit: changes of the run file that have been planned."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.errors import MeshwrightError
from ...base.validation import validated
from ...train.run_file import RunConfig, assigned
from ..device import Device
from ..job import job_of
from ..planned import plan

CHANGES: tuple[tuple[str, ...], ...] = (
    ("strategy_config.activation_checkpointing=full",),
    ("micro_batch_size=1", "strategy_config.activation_checkpointing=full"),
    ("strategy=fsdp2", "strategy_config={activation_checkpointing: full}", "micro_batch_size=1"),
)
"""From what costs little to what costs more; each is tried by itself."""


def advice(config: RunConfig, world_size: int, device: Device) -> str:
    """A sentence: the first changes under which a run fits, or how near the best of them comes."""
    nearest: tuple[int, Sequence[str]] | None = None
    for changes in CHANGES:
        try:
            changed = validated(RunConfig, assigned(config.model_dump(by_alias=True), changes), where="the run file")
            found = plan(job_of(changed, world_size), device, [0])
        except MeshwrightError:
            continue
        if found["fits"]:
            return f"It fits with {_flags(changes)}."
        needed = found["peak_reserved_bytes"]
        nearest = min(nearest or (needed, changes), (needed, changes), key=lambda each: each[0])
    if nearest is None:
        return "Use more ranks, or a smaller model."
    return f"{_flags(nearest[1])} would still need {nearest[0] / 2**30:,.1f} GiB. Use more ranks, or a smaller model."


def _flags(changes: Sequence[str]) -> str:
    return " ".join(f"--set {change!r}" if " " in change else f"--set {change}" for change in changes)
