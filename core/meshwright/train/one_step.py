"""One optimizer step of a loop: draw, forward and backward, clip, judge, step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor

from ..base.errors import BatchError, NotFiniteError
from ..events.step import StepResult
from ..mesh.mesh import Mesh
from ..strategy.contract import StrategyManager
from ..tensors.ops import moments_of
from .ahead import Ahead
from .bad_steps import Bad, BadStepConfig, BadSteps, Rewinds
from .batches import Passes, state_of_rank
from .loop_options import Loop
from .memory import memory_now
from .rates import check_rates, groups_stepped
from .seeds import step_seed
from .stopwatch import Stopwatch

Moment: TypeAlias = Literal["whole", "clipped"]
"""Of the gradients of a step, between its backward and the optimizer's step."""


def _nothing(_: Moment) -> None:
    pass


def begun_ahead(manager: StrategyManager, loop: Loop) -> Ahead:
    """What draws the microbatches of a loop."""
    batches = loop.batches
    if not callable(batches):
        batches = _passes(loop, manager.mesh)
    return Ahead(manager, batches, seed=loop.seed, objective=loop.objective, signals=loop.signals)


def _passes(loop: Loop, mesh: Mesh) -> Passes:
    """The microbatches of a loop whose batches are no function."""
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
    look: Callable[[Moment], None] = _nothing,
) -> StepResult:
    """Run one optimizer step, counted from 0; see `fit`.

    Args:
        ahead: of the loop, to begin the next step in it; None: it is left to itself.
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
        flops=None if loop.flops_per_token is None else loop.flops_per_token * int(num_tokens),
        peak_flops=loop.peak_flops,
    )


def _norms(manager: StrategyManager, loop: Loop, step: int, stopwatch: Stopwatch) -> dict[str, float]:
    """Norms of the gradients by block, in steps that measure them, right behind the backward."""
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
    """Loss, norm and sums of a step, and whether it is bad. One wait for the device per step, before the optimizer's,
    which keeps a bad gradient out of the parameters."""
    try:
        loss_value, norm_value, *sum_values = manager.read(loss, norm, *sums.values())
    except NotFiniteError as error:
        if bad_steps.config.do == "stop":
            raise
        return math.nan, math.nan, dict.fromkeys(sums, math.nan), bad_steps.bad(step, str(error))
    bad = bad_steps.judge(step, loss_value, norm_value)
    return loss_value, norm_value, dict(zip(sums, sum_values, strict=True)), bad


def _stepped(manager: StrategyManager, loop: Loop, step: int, bad: Bad | None, *, rewinds: bool) -> list[Any]:
    """Make the optimizer's step, or leave it out; the rates of its groups.

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
    """Learning rates by parameter group: under its name, if it has one that no other has, or else its number."""
    names = [group.get("name") for group in manager.optimizer.param_groups]
    told = [name if name and names.count(name) == 1 else str(number) for number, name in enumerate(names)]
    return dict(zip(told, map(float, rates), strict=False))
