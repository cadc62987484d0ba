"""A finished optimizer step, as observers get it, and the names of its parts in a profiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PROFILER_PREFIX = "meshwright::"
"""Prefix of the names that the loop gives to steps and their parts in a profiler."""
WAIT_FOR_RANKS = f"{PROFILER_PREFIX}wait for ranks"
"""A wait for the other ranks' message about a step, which a thread receives that no profiler sees."""
NONDETERMINISTIC_FIELDS = frozenset(
    {"seconds", "end_time", "times", "memory", "world_size", "peak_flops", "stragglers"}
)
"""Fields that clocks and machines determine; the others are the same when a run is repeated, on any number of ranks."""


@dataclass(frozen=True)
class StepResult:
    """Argument of the hook `on_step_end`.

    [Note: parts of a step] Seconds are of this rank. On an accelerator `forward_backward`, `norms`, `clip` and
    `optimizer` are the device's time, between events in its stream, and the host's otherwise. `optimizer` is then that
    of the previous step, since the device has not finished this one; it is missing where that is unknown. `read` is the
    host's wait for loss and norm. `save` is the time for which saving after the previous step delayed the loop, and
    `evaluation` comes after the step; the step's `seconds` include neither. `measure_exposed_communication`, in steps
    in which it was measured, is part of the others.
    """

    step: int
    """The step that has ended, from 1."""
    num_steps: int
    """Steps of the whole run."""
    loss: float
    """Mean over the step's tokens [nats], or an objective's sum over `num_tokens`."""
    grad_norm: float
    """Total norm before clipping."""
    learning_rate: float
    """Of this rank's first parameter group, as used by the step."""
    num_tokens: int
    """Unmasked targets of the global batch, or what else an objective counts."""
    seconds: float
    """Duration of the step, without evaluation."""
    rank: int
    sums: Mapping[str, float] = field(default_factory=dict)
    """See `StrategyManager.last_sums`."""
    evaluations: Mapping[str, float] = field(default_factory=dict)
    """Loss of each evaluation set by name, in steps that evaluate."""
    end_time: float = 0.0
    """Time of its end [s since 1970]."""
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by part: `data`, `forward_backward`, `clip`, `read`, `optimizer`; `norms`, `save`, `evaluation` and
    `measure_exposed_communication` in steps that have them. See [Note: parts of a step]."""
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    """`learning_rate` of each parameter group, by its name or else its number."""
    block_grad_norms: Mapping[str, float] = field(default_factory=dict)
    """Gradient norms by block, before clipping, in steps that measure them; see `StrategyManager.gradient_norms`."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of this rank: resident `host` and `host_peak`; of an accelerator's allocator `allocated`, `allocated_peak`,
    `reserved` and `reserved_peak`. Peaks are since the start of the process, or since they were reset."""
    skip_reason: str = ""
    """Why the optimizer did not step, see `on_bad_step`; empty: it did."""
    world_size: int = 1
    flops: float | None = None
    """Floating-point operations of the model in this step, over all ranks, without recomputation; None: unknown."""
    peak_flops: float | None = None
    """Peak floating-point operations per second of one device; None: unknown, or a CPU."""
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
        """Model FLOPs utilization: the fraction of the devices' peak that the model's operations use.

        Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
        """
        if self.flops is None or self.peak_flops is None:
            return None
        return self.flops / (self.seconds * self.peak_flops * self.world_size)
