"""The result of an optimizer step for observers, and the names of its parts in a profiler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PROFILER_PREFIX = "meshwright::"
"""Prefix of the names of steps and their parts in a profiler."""
WAIT_FOR_RANKS = f"{PROFILER_PREFIX}wait for ranks"
"""Name of the wait for a step's handshake, which a thread receives that profilers do not record."""
NONDETERMINISTIC_FIELDS = frozenset(
    {"seconds", "end_time", "times", "memory", "world_size", "peak_flops", "stragglers"}
)
"""Fields that depend on clocks and hardware. All others are equal if a run is repeated, on any number of ranks."""


@dataclass(frozen=True)
class StepResult:
    """Argument of the hook `on_step_end`.

    [Note: parts of a step] Times are those of this rank. On an accelerator, `forward_backward`, `norms`, `clip` and
    `optimizer` are device time between events in its stream; otherwise they are host time. On an accelerator,
    `optimizer` is the time of the previous step, since the device has not finished this one; it is missing if that is
    unknown. `read` is the host's wait for loss and norm. `save` is the time by which the save after the previous step
    delayed the loop. `evaluation` is after the step. The step's `seconds` include neither of these two.
    `measure_exposed_communication` is part of the other times.
    """

    step: int
    """Number of the completed step, starting at 1."""
    num_steps: int
    """Number of steps of the entire run."""
    loss: float
    """Mean over the step's tokens [nats], or an objective's sum divided by `num_tokens`."""
    grad_norm: float
    """Total norm before clipping."""
    learning_rate: float
    """Rate of this rank's first parameter group in this step."""
    num_tokens: int
    """Unmasked targets of the global batch, or what an objective counts instead."""
    seconds: float
    """Duration of the step, without evaluation [s]."""
    rank: int
    sums: Mapping[str, float] = field(default_factory=dict, repr=False)
    """See `StrategyManager.last_sums`."""
    evaluations: Mapping[str, float] = field(default_factory=dict)
    """Loss of each evaluation set by name, in steps that evaluate."""
    end_time: float = field(default=0.0, repr=False)
    """Unix time of the step's end [s]."""
    times: Mapping[str, float] = field(default_factory=dict, repr=False)
    """Time by part [s]: `data`, `forward_backward`, `clip`, `read` and `optimizer`; in steps that have them `norms`,
    `save`, `evaluation` and `measure_exposed_communication`. See [Note: parts of a step]."""
    learning_rates: Mapping[str, float] = field(default_factory=dict, repr=False)
    """`learning_rate` of each parameter group, by its name or index."""
    block_grad_norms: Mapping[str, float] = field(default_factory=dict, repr=False)
    """Gradient norms by block, before clipping, in steps that measure them; see `StrategyManager.gradient_norms`."""
    memory: Mapping[str, int] = field(default_factory=dict, repr=False)
    """Memory of this rank [bytes]: resident `host` and `host_peak`; of the accelerator's allocator `allocated`,
    `allocated_peak`, `reserved` and `reserved_peak`. Peaks are since process start, or since they were last reset."""
    skip_reason: str = ""
    """Why the optimizer did not step, see `on_bad_step`; empty if it did."""
    world_size: int = 1
    num_input_tokens: int | None = None
    """Tokens of the global batch, supervised or not, without padding; None: unknown."""
    flops: float | None = field(default=None, repr=False)
    """Floating-point operations of the model in this step, over all ranks, without recomputation; None: unknown."""
    peak_flops: float | None = field(default=None, repr=False)
    """Peak floating-point operations per second of one device; None: unknown, or a CPU."""
    stragglers: Sequence[Mapping[str, float]] = field(default=(), repr=False)
    """On rank 0, for each straggler: `rank`, its busy time per step `seconds`, `median` over all ranks, and
    `deviations` from it."""

    @property
    def held_out_loss(self) -> float | None:
        return self.evaluations.get("held_out")

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else math.nan

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens_per_second / self.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the model's operations as a fraction of the devices' peak.

        Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
        """
        if self.flops is None or self.peak_flops is None:
            return None
        return self.flops / (self.seconds * self.peak_flops * self.world_size)
