"""The training loop: one for every strategy, of which it knows only the contract."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import TrainingError
from ..step.agreement import count_tokens
from ..strategy.contract import Batch, Objective, StepResult, StrategyManager
from ..strategy.registry import Registry, get_registry
from .ahead import Ahead
from .rates import check_rates, groups_stepped


@dataclass(frozen=True)
class Loop:
    """How long to train and what to do at each step.

    Attributes:
        steps: number of the last step.
        batches: `batches(step)` gives this rank's microbatches of a step, counted from 0.
        max_grad_norm: limit of the total gradient norm; None: measure only.
        grad_norm_type: p of the norm.
        held_out: this rank's microbatches of the held-out split; empty: no evaluation.
        eval_every: steps between evaluations; None: only after the last.
        start: steps already done, for a run that goes on.
        seed: random numbers of a step (dropout) follow from it, the step and the data rank alone, so that a run that
            goes on draws what it would have drawn; None: the generators go on as they are.
        save: `save(step)` after so many steps have been done, on all ranks; may be collective.
        save_every: steps between calls of it; it is called after the last step, too.
        objective: what is minimized, and evaluated; None: the token loss.
    """

    steps: int
    batches: Callable[[int], Sequence[Batch]]
    max_grad_norm: float | None = 1.0
    grad_norm_type: float = 2.0
    held_out: Sequence[Batch] = ()
    eval_every: int | None = None
    start: int = 0
    seed: int | None = None
    save: Callable[[int], None] | None = None
    save_every: int | None = None
    objective: Objective | None = None

    def evaluates_after(self, done: int) -> bool:
        """Whether the held-out loss is computed after so many steps."""
        return bool(self.held_out) and _is_due(done, self.eval_every, self.steps)

    def saves_after(self, done: int) -> bool:
        """Whether `save` is called after so many steps."""
        return self.save is not None and _is_due(done, self.save_every, self.steps)


def _is_due(done: int, every: int | None, steps: int) -> bool:
    return done == steps or (every is not None and done % every == 0)


def fit(
    manager: StrategyManager, scheduler: LRScheduler, loop: Loop, registry: Registry | None = None
) -> list[StepResult]:
    """Train until `loop.steps` and tell every step to the hook `on_step_end`.

    Raises:
        BatchError: a step's microbatches do not fit together (on all ranks).
        TrainingError: loss or gradient is not finite (on all ranks); the parameters are those before that step. Or an
            optimizer stepped with another learning rate than the schedule's.
    """
    registry = registry or get_registry()
    held_out_tokens = count_tokens(loop.held_out, manager.mesh, loop.objective) if loop.held_out else None
    results = []
    ahead = _ahead(manager, loop)
    for step in range(loop.start, loop.steps):
        result = train_step(manager, scheduler, loop, step, ahead)
        if held_out_tokens is not None and loop.evaluates_after(step + 1):
            held_out_loss = float(
                manager.eval_loss(loop.held_out, num_tokens=held_out_tokens, objective=loop.objective)
            )
            result = StepResult(**{**vars(result), "held_out_loss": held_out_loss})
        registry.hook.on_step_end(result=result)
        results.append(result)
        if loop.save is not None and loop.saves_after(step + 1):
            loop.save(step + 1)
    return results


def _ahead(manager: StrategyManager, loop: Loop) -> Ahead:
    return Ahead(manager, loop.batches, steps=loop.steps, seed=loop.seed, objective=loop.objective)


def train_step(
    manager: StrategyManager, scheduler: LRScheduler, loop: Loop, step: int, ahead: Ahead | None = None
) -> StepResult:
    """Run one optimizer step, counted from 0; see `fit`.

    Args:
        ahead: of the loop, to begin the next step in it; None: it is left to itself.
    """
    start = time.perf_counter()
    microbatches, num_tokens = (ahead or _ahead(manager, loop)).take(step)
    loss = manager.forward_backward(microbatches, num_tokens=num_tokens, objective=loop.objective)
    sums = manager.last_sums
    grad_norm = manager.clip_grad_norm(loop.max_grad_norm, loop.grad_norm_type)
    if ahead is not None:
        ahead.begin(step + 1)
    # One wait for the device per step; it also keeps a bad gradient out of the parameters.
    loss_value, norm_value, *sum_values = manager.read(loss, grad_norm, *sums.values())
    if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
        raise TrainingError(
            f"step {step + 1}: the loss is {loss_value} and the gradient norm {norm_value}. The parameters were not "
            f"changed by this step. Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the step's data."
        )
    scheduled = scheduler.get_last_lr()
    with groups_stepped() as stepped:
        manager.optimizer_step()
    check_rates(scheduled, stepped, step=step + 1)
    scheduler.step()
    return StepResult(
        step=step + 1,
        steps=loop.steps,
        loss=loss_value,
        grad_norm=norm_value,
        learning_rate=float(scheduled[0]),
        num_tokens=int(num_tokens),
        seconds=time.perf_counter() - start,
        rank=manager.mesh.rank,
        sums=dict(zip(sums, sum_values, strict=True)),
    )
