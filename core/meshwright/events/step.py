"""A finished optimizer step, as observers get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MEASURED = frozenset({"seconds", "ended", "times", "memory", "world_size", "peak_flops", "stragglers"})
"""The fields that clocks and machines tell; the others are the same when the run is repeated, on other ranks too."""


@dataclass(frozen=True)
class StepResult:
    """What hook `on_step_end` gets.

    [Note: parts of a step] Seconds are of this rank. On a CPU they are the host's. On an accelerator
    `forward_backward`, `norms`, `clip` and `optimizer` are the device's, between events in its stream, and `optimizer`
    is that of the step before, since the device is still at it when the step ends for the host; it is left out where
    that is not known. `read` is the host's wait for loss and norm. `save` is what saving after the step before has held
    the loop up by, and `evaluation` comes after the step's `seconds`, which have neither. `exposed_communication`, in
    steps in which it was measured, is within the others.
    """

    step: int
    """The step that has ended, from 1."""
    steps: int
    """Steps of the whole run."""
    loss: float
    """Mean over the step's tokens [nats], or an objective's sum over `num_tokens`."""
    grad_norm: float
    """Total norm before clipping."""
    learning_rate: float
    """Of this rank's first parameter group, during the step; what stepped is seen to have used it."""
    num_tokens: int
    """Unmasked targets of the global batch, or what else an objective counts."""
    seconds: float
    """Duration of the step, without evaluation."""
    rank: int
    sums: Mapping[str, float] = field(default_factory=dict)
    """See `StrategyManager.last_sums`; of the step."""
    evaluations: Mapping[str, float] = field(default_factory=dict)
    """Loss of each set by name, as `loss` is, in steps that evaluate."""
    ended: float = 0.0
    """When it ended [s since 1970]."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part: `data`, `forward_backward`, `clip`, `read`, `optimizer`; where there were such `norms`, `save`,
    `evaluation` and `exposed_communication`. See [Note: parts of a step]."""
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """As `learning_rate`, of each parameter group, by its name or else its number."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Norms of the gradients by block, before clipping, in steps that measure them; see
    `StrategyManager.gradient_norms`."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of this rank: `host` and `host_peak`, resident; on an accelerator `allocated`, `allocated_peak`, `reserved`
    and `reserved_peak` by torch's allocator. Peaks are since the process began, or were reset."""
    skipped: str = ""
    """Why the optimizer did not step, see `on_bad_step`; empty: it did."""
    world_size: int = 1
    """Ranks of the run."""
    flops: float | None = None
    """Floating-point operations of the model in this step, over all ranks, without recomputation; None: not known."""
    peak_flops: float | None = None
    """Floating-point operations a second that one device could do at most; None: not known, or a CPU."""
    stragglers: Sequence[Mapping[str, float]] = ()
    """On the first rank: `rank`, its own `seconds` of a step, `median` of all ranks, and `deviations` from that."""

    @property
    def held_out_loss(self) -> float | None:
        return self.evaluations.get("held_out")

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the part of what the devices could have done that the model needed.

        Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
        """
        if self.flops is None or self.peak_flops is None:
            return None
        return self.flops / (self.seconds * self.peak_flops * self.world_size)
