"""One optimizer step of a loop: draw, forward and backward, clip, judge, step."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...base.errors import BatchError, NotFiniteError, TrainingError
from ...events.step import StepResult
from ...mesh.mesh import Mesh
from ...strategy.contract import StrategyManager
from ...tensors.ops import is_accelerator, moments_of
from .ahead import Ahead
from .bad_steps import Bad, BadStepConfig, BadSteps, Rewinds
from .batches import Passes, state_of_rank, step_seed
from .extension import Moment
from .options import Loop
from .stopwatch import Stopwatch

_STATM = Path("/proc/self/statm")
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes in the unit of getrusage."""


def begun_ahead(manager: StrategyManager, loop: Loop) -> Ahead:
    """Return what draws the microbatches of a loop."""
    batches = loop.batches
    if not callable(batches):
        batches = _passes(loop, manager.mesh)
    return Ahead(manager, batches, seed=loop.seed, objective=loop.objective, signals=loop.signals)


def _passes(loop: Loop, mesh: Mesh) -> Passes:
    source, run_seed = loop.batches, loop.seed
    if not isinstance(source, Iterable):
        raise BatchError(f"batches must be a function of the step, or an iterable, not {type(source).__name__}.")
    state = state_of_rank((loop.state or {}).get("batches"), mesh)
    seed = None if run_seed is None else lambda step: step_seed(run_seed, step, mesh.data_rank)
    return Passes(source, accumulate=loop.accumulate, state=state, seed=seed)


def train_step(
    manager: StrategyManager,
    loop: Loop,
    step: int,
    ahead: Ahead | None = None,
    stopwatch: Stopwatch | None = None,
    bad_steps: BadSteps | None = None,
    *,
    look: Callable[[Moment], None] = lambda _: None,
) -> StepResult:
    """Run one optimizer step, counted from 0; see `fit`.

    Args:
        ahead: of the loop; draws the next step within this one. None: nothing is drawn ahead.
        stopwatch: of the loop.
        bad_steps: of the loop; None: a bad step is an error.
        look: called when the gradients are "whole", and when they are "clipped".
    """
    stopwatch = stopwatch or Stopwatch(moments_of(manager.mesh.device), manager.mesh.world.progress)
    stopwatch.begin(step + 1)
    bad_steps = bad_steps or BadSteps(BadStepConfig())
    draw = step + bad_steps.left_out
    microbatches, num_tokens = (ahead or begun_ahead(manager, loop)).take(draw)
    stopwatch.end("data", "forward_backward")
    loss = manager.forward_backward(microbatches, num_tokens=num_tokens, objective=loop.objective)
    sums, norms = manager.last_sums, _norms(manager, loop, step + 1, stopwatch)
    look("whole")
    grad_norm = manager.clip_grad_norm(loop.max_grad_norm, loop.grad_norm_type)
    look("clipped")
    stopwatch.end("clip", "read" if ahead is None else "data")
    if ahead is not None:
        if step + 1 < loop.num_steps:
            ahead.begin(draw + 1)
        stopwatch.end("data", "read")
    loss_value, norm_value, sum_values, bad = _judged(manager, bad_steps, step + 1, loss, grad_norm, sums)
    stopwatch.end("read", "optimizer")
    scheduled = _stepped(manager, loop, step + 1, bad, rewinds=bad_steps.config.do == "rewind")
    stopwatch.end("optimizer")
    return StepResult(
        step=step + 1,
        steps=loop.num_steps,
        loss=loss_value,
        grad_norm=norm_value,
        learning_rate=float(scheduled[0]),
        num_tokens=int(num_tokens),
        seconds=stopwatch.seconds,
        rank=manager.mesh.rank,
        sums=sum_values,
        ended=time.time(),
        times=stopwatch.take(),
        learning_rates=_by_group(manager, scheduled),
        norms=norms,
        memory=memory_now(manager.mesh.device),
        skipped="" if bad is None else bad.reason,
        world_size=manager.mesh.world.size,
    )


def _norms(manager: StrategyManager, loop: Loop, step: int, stopwatch: Stopwatch) -> dict[str, float]:
    """Measure norms of the gradients by block right after the backward pass, in steps that ask for it."""
    if loop.norms_every is None or step % loop.norms_every:
        stopwatch.end("forward_backward", "clip")
        return {}
    stopwatch.end("forward_backward", "norms")
    norms = manager.gradient_norms()
    stopwatch.end("norms", "clip")
    return norms


def _judged(
    manager: StrategyManager, bad_steps: BadSteps, step: int, loss: Tensor, norm: Tensor, sums: Mapping[str, Tensor]
) -> tuple[float, float, dict[str, float], Bad | None]:
    """Read loss, norm and sums, and judge the step. This is the one wait for the device in a step; it comes before the
    optimizer's step, which keeps a bad gradient out of the parameters."""
    try:
        loss_value, norm_value, *sum_values = manager.read(loss, norm, *sums.values())
    except NotFiniteError as error:
        if bad_steps.config.do == "stop":
            raise
        return math.nan, math.nan, dict.fromkeys(sums, math.nan), bad_steps.bad(step, str(error))
    bad = bad_steps.judge(step, loss_value, norm_value)
    return loss_value, norm_value, dict(zip(sums, sum_values, strict=True)), bad


def _stepped(manager: StrategyManager, loop: Loop, step: int, bad: Bad | None, *, rewinds: bool) -> list[Any]:
    """Step the optimizer unless the step is bad, and return the learning rates of its groups.

    Raises:
        Rewinds: the step is bad, and takes the run back.
    """
    scheduler = loop.scheduler
    if scheduler is None:
        scheduled = [group["lr"] for group in manager.optimizer.param_groups]
    else:
        scheduled = scheduler.get_last_lr()
    if bad is None:
        with groups_stepped() as stepped:
            manager.optimizer_step()
        check_rates(scheduled, stepped, step=step)
    else:
        manager.drop_gradients()
        if rewinds:
            raise Rewinds(bad)
    if scheduler is not None:
        scheduler.step()
    return scheduled


def _by_group(manager: StrategyManager, rates: Sequence[float]) -> dict[str, float]:
    """Return learning rates by parameter group: under its name, if that is unique, or else its number."""
    names = [group.get("name") for group in manager.optimizer.param_groups]
    told = [name if name and names.count(name) == 1 else str(number) for number, name in enumerate(names)]
    return dict(zip(told, map(float, rates), strict=False))


@contextmanager
def groups_stepped() -> Iterator[list[dict[str, Any]]]:
    """Collect the parameter groups of each optimizer that steps within the context, as they are when it does.

    A strategy may wrap the optimizer, or step others in its place; torch calls its hook for all of them. Groups are
    copies; "params" is the number of parameters.
    Source: torch.optim.optimizer.register_optimizer_step_pre_hook.
    """
    found: list[dict[str, Any]] = []

    def note(optimizer: Optimizer, *_: Any) -> None:
        found.extend({**group, "params": len(group["params"])} for group in optimizer.param_groups)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def check_rates(scheduled: Sequence[Any], stepped: Sequence[Mapping[str, Any]], *, step: int) -> None:
    """Refuse to go on where a step was made with a learning rate that is not the schedule's.

    Args:
        scheduled: rates by parameter group.
        stepped: as `groups_stepped` collects them.
        step: number of the step, from 1.

    Raises:
        TrainingError: on the ranks that it happened on.
    """
    told = {float(rate) for rate in scheduled}
    used = {float(group["lr"]) for group in stepped if group["params"] and "lr" in group}
    if not used <= told:
        raise TrainingError(
            f"step {step} was made with the learning rate {_listed(used - told)}, but the schedule says "
            f"{_listed(told)}. An optimizer of the strategy does not heed the parameter groups that the schedule "
            f"sets. Checkpoints of earlier steps in this process are wrong in the same way; resume under a strategy "
            f"that passes `meshwright check`, from a checkpoint before."
        )


def _listed(rates: set[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in sorted(rates))


def memory_now(device: torch.device) -> dict[str, int]:
    """Return bytes in use by kind, see `StepResult.memory`, as far as the system tells.

    Source: proc(5), getrusage(2), torch.accelerator.
    """
    found = {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT}
    if _STATM.exists():
        found["host"] = int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        # The system counts peaks less often.
        found["host_peak"] = max(found["host_peak"], found["host"])
    if is_accelerator(device):
        found["allocated"] = torch.accelerator.memory_allocated(device)
        found["allocated_peak"] = torch.accelerator.max_memory_allocated(device)
        found["reserved"] = torch.accelerator.memory_reserved(device)
        found["reserved_peak"] = torch.accelerator.max_memory_reserved(device)
    return found
