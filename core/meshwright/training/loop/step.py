"""One optimizer step of a loop: fetch the batch, forward and backward, clip, check, step; and the time of each phase.

[Note: device times] Phases whose work runs asynchronously on the device are timed between events in its stream. The
events are read after the host has waited for the step's loss; those of the optimizer are read one step later.
Never run on a GPU yet.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..._compat.torch import record_if_profiling
from ...base.errors import NonFiniteError, TrainingError
from ...events.step import PROFILER_PREFIX, StepResult
from ...strategy.contract import StrategyManager
from ...tensors.ops import is_accelerator, make_event_recorder
from .batches import BatchPrefetcher, build_prefetcher
from .extension import GradientStage
from .monitors import BadStepConfig, BadStepDetector, BadStepInfo, RollbackRequested
from .options import Loop

if TYPE_CHECKING:
    from ...mesh.progress import Progress


_STATM = Path("/proc/self/statm")
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in the unit of getrusage."""


def train_step(
    manager: StrategyManager,
    loop: Loop,
    step: int,
    prefetcher: BatchPrefetcher | None = None,
    stopwatch: Stopwatch | None = None,
    bad_step_detector: BadStepDetector | None = None,
    *,
    on_gradients: Callable[[GradientStage], None] = lambda _: None,
) -> StepResult:
    """Run one optimizer step, counted from 0; see `fit`. `prefetcher` fetches the next batch during this step.

    `on_gradients` is called with "whole" after backward and "clipped" after clipping. A bad step raises an error
    without `bad_step_detector`.
    """
    stopwatch = stopwatch or Stopwatch(make_event_recorder(manager.mesh.device), manager.mesh.world.progress)
    stopwatch.begin_step(step + 1)
    detector = bad_step_detector or BadStepDetector(BadStepConfig())
    draw = step + detector.num_skipped_batches
    microbatches, num_tokens = (prefetcher or build_prefetcher(manager, loop)).get_step(draw)
    stopwatch.end_phase("data", "forward_backward")
    loss = manager.forward_backward(microbatches, num_tokens=num_tokens, objective=loop.objective)
    sums, norms = manager.last_sums, dict[str, float]()
    measures = loop.grad_norms_every is not None and (step + 1) % loop.grad_norms_every == 0
    stopwatch.end_phase("forward_backward", "norms" if measures else "clip")
    if measures:
        norms = manager.gradient_norms()
        stopwatch.end_phase("norms", "clip")
    on_gradients("whole")
    grad_norm = manager.clip_grad_norm(loop.max_grad_norm, loop.grad_norm_type)
    on_gradients("clipped")
    stopwatch.end_phase("clip", "read" if prefetcher is None else "data")
    if prefetcher is not None:
        if step + 1 < loop.num_steps:
            prefetcher.prefetch(draw + 1)
        stopwatch.end_phase("data", "read")
    loss_value, norm_value, sum_values, bad = _read_and_check(manager, detector, step + 1, loss, grad_norm, sums)
    stopwatch.end_phase("read", "optimizer")
    scheduled = _step_optimizer(manager, loop, step + 1, bad, rolls_back=detector.config.action == "rollback")
    stopwatch.end_phase("optimizer")
    return StepResult(
        step=step + 1,
        num_steps=loop.num_steps,
        loss=loss_value,
        grad_norm=norm_value,
        learning_rate=float(scheduled[0]),
        num_tokens=int(num_tokens),
        seconds=stopwatch.seconds,
        rank=manager.mesh.rank,
        sums=sum_values,
        end_time=time.time(),
        times=stopwatch.pop_times(),
        learning_rates=dict(zip(_name_groups(manager.optimizer), map(float, scheduled), strict=False)),
        block_grad_norms=norms,
        memory=read_memory_usage(manager.mesh.device),
        skip_reason="" if bad is None else bad.reason,
        world_size=manager.mesh.world.size,
    )


def _name_groups(optimizer: Optimizer) -> list[str]:
    """Return the name of each parameter group, or its index if it has none or shares it."""
    names = [group.get("name") for group in optimizer.param_groups]
    return [name if name and names.count(name) == 1 else str(number) for number, name in enumerate(names)]


def _read_and_check(
    manager: StrategyManager,
    bad_step_detector: BadStepDetector,
    step: int,
    loss: Tensor,
    norm: Tensor,
    sums: Mapping[str, Tensor],
) -> tuple[float, float, dict[str, float], BadStepInfo | None]:
    """Read loss, norm and sums in one device synchronization, and check the step before the optimizer's step."""
    try:
        loss_value, norm_value, *sum_values = manager.read_scalars(loss, norm, *sums.values())
    except NonFiniteError as error:
        if bad_step_detector.config.action == "stop":
            raise
        return math.nan, math.nan, dict.fromkeys(sums, math.nan), bad_step_detector.record_bad_step(step, str(error))
    bad = bad_step_detector.check_step(step, loss_value, norm_value)
    return loss_value, norm_value, dict(zip(sums, sum_values, strict=True)), bad


def _step_optimizer(
    manager: StrategyManager, loop: Loop, step: int, bad: BadStepInfo | None, *, rolls_back: bool
) -> list[Any]:
    """Step the optimizer unless the step is bad, and return the learning rates of its groups."""
    scheduler, groups = loop.scheduler, manager.optimizer.param_groups
    scheduled = [group["lr"] for group in groups] if scheduler is None else scheduler.get_last_lr()
    if bad is None:
        with record_stepped_groups() as stepped:
            manager.optimizer_step()
        check_learning_rates(scheduled, stepped, step=step)
    else:
        manager.drop_gradients()
        if rolls_back:
            raise RollbackRequested(bad)
    if scheduler is not None:
        scheduler.step()
    return scheduled


@contextmanager
def record_stepped_groups() -> Iterator[list[dict[str, Any]]]:
    """Record the parameter groups of each optimizer that steps within the context, as they are at its step.

    A strategy may wrap the optimizer or step other optimizers instead; torch calls its global hook for all of them.
    Groups are copies; "params" is the number of parameters.
    Source: torch.optim.optimizer.register_optimizer_step_pre_hook.
    """
    groups: list[dict[str, Any]] = []

    def record(optimizer: Optimizer, *_: Any) -> None:
        groups.extend({**group, "params": len(group["params"])} for group in optimizer.param_groups)

    handle = register_optimizer_step_pre_hook(record)
    try:
        yield groups
    finally:
        handle.remove()


def check_learning_rates(scheduled: Sequence[Any], stepped: Sequence[Mapping[str, Any]], *, step: int) -> None:
    """Raise TrainingError if an optimizer stepped with a learning rate that is not the schedule's."""
    expected = {float(rate) for rate in scheduled}
    used = {float(group["lr"]) for group in stepped if group["params"] and "lr" in group}

    def listed(rates: set[float]) -> str:
        return ", ".join(f"{rate:.6g}" for rate in sorted(rates))

    if not used <= expected:
        raise TrainingError(
            f"step {step} was made with the learning rate {listed(used - expected)}, but the schedule says "
            f"{listed(expected)}. An optimizer of the strategy does not respect the parameter groups that the schedule "
            f"sets. Checkpoints of earlier steps in this process are wrong in the same way; resume under a strategy "
            f"that passes `meshwright check`, from a checkpoint before."
        )


def read_memory_usage(device: torch.device) -> dict[str, int]:
    """Return bytes in use by kind, see `StepResult.memory`, as far as the system reports them.

    Source: proc(5), getrusage(2), torch.accelerator.
    """
    usage = {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT}
    if _STATM.exists():
        usage["host"] = int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # The system samples peaks less often.
        usage["host_peak"] = max(usage["host_peak"], usage["host"])
    if is_accelerator(device):
        for kind in ("allocated", "reserved"):
            usage[kind] = getattr(torch.accelerator, f"memory_{kind}")(device)
            usage[f"{kind}_peak"] = getattr(torch.accelerator, f"max_memory_{kind}")(device)
    return usage


DEVICE_PHASES = ("forward_backward", "norms", "clip", "optimizer")
"""Phases that run on the device."""


def profiler_phase(name: str) -> AbstractContextManager[object]:
    """Label a phase of the run for torch's profiler. Without an active profiler it has no effect."""
    return record_if_profiling(PROFILER_PREFIX + name)


class Stopwatch:
    """Measure the consecutive phases of steps."""

    def __init__(
        self,
        record_event: Callable[[], Any] | None,
        progress: Progress | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._record_event, self._clock, self._progress = record_event, clock, progress
        self._times: dict[str, float] = defaultdict(float)
        self._pending_spans: list[tuple[str, Any, Any]] = []
        self._step_start = self._phase_start = clock()
        self._event: Any = None
        self._profiler_stack = ExitStack()

    def begin_step(self, step: int = 0, phase: str = "data") -> None:
        """Start a step, counted from 1, and its first phase."""
        if self._progress is not None:
            self._progress.begin_step(step, phase)
        self._enter_profiler_phase(phase)
        self._step_start = self._phase_start = self._clock()

    def end_phase(self, phase: str, next_phase: str | None = None) -> None:
        """End the current phase. A phase may occur several times in a step; its times add up."""
        if self._progress is not None:
            self._progress.enter_phase(next_phase or "callbacks")
        self._enter_profiler_phase(next_phase)
        now = self._clock()
        if self._record_event is not None:
            event = self._record_event()
            if phase in DEVICE_PHASES and self._event is not None:
                self._pending_spans.append((phase, self._event, event))
            self._event = event
        if self._record_event is None or phase not in DEVICE_PHASES:
            self._times[phase] += now - self._phase_start
        self._phase_start = now

    @property
    def seconds(self) -> float:
        """Host seconds from the start of the step to the end of its last phase."""
        return self._phase_start - self._step_start

    def _enter_profiler_phase(self, part: str | None) -> None:
        # A failed step leaves its last profiler range open; the next call closes it.
        self._profiler_stack.close()
        if part is not None:
            self._profiler_stack.enter_context(profiler_phase(part))

    def pop_times(self) -> dict[str, float]:
        """Return and clear the seconds by phase that are known so far; see [Note: device times]."""
        pending = []
        for part, start, end in self._pending_spans:
            if end.query():
                self._times[part] += start.elapsed_time(end) / 1e3
            else:
                pending.append((part, start, end))
        self._pending_spans = pending
        times, self._times = dict(self._times), defaultdict(float)
        return times
