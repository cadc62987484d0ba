"""The training loop: one for every strategy, of which it knows only the contract."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..base.errors import BatchError, CheckpointError, TrainingError
from ..checkpoint.manifest import step_directory
from ..events.run import SavedCheckpoint
from ..events.step import StepResult
from ..launch.stopping import Stopped, StopSignals
from ..mesh.mesh import Mesh
from ..profile.marks import marked
from ..step.agreement import count_tokens
from ..strategy.contract import StrategyManager
from ..tensors.accelerator import moments_of
from .agreed import agree_on
from .ahead import Ahead, StopsBefore
from .batches import Passes, state_of_rank, states_of_ranks
from .failures import done_on_all, raise_on_all
from .loop_options import Callback as Callback
from .loop_options import Loop as Loop
from .loop_options import is_due
from .memory import memory_now
from .optimizer_config import AVERAGED
from .rates import check_rates, groups_stepped
from .seeds import step_seed
from .stopwatch import Stopwatch
from .telling import Telling
from .watch import STATE, Watch


def fit(manager: StrategyManager, loop: Loop) -> list[StepResult]:
    """Train until the last step, or until a callback or `early_stopping` ends it; collective.

    After each step sets that are due are evaluated, then the hook `on_step_end` of observers and then the callbacks are
    told, then a checkpoint that is due is saved. The other hooks of observers are in `strategy.hooks`.

    Args:
        manager: has a model and an optimizer: `parallelize` and `build_optimizer` have been called.
        loop: what is trained on, and for how long; equal on all ranks, but for what each rank draws and is told.

    Returns:
        Of the steps from `loop.start` on.

    Raises:
        BatchError: a step's microbatches do not fit together, or batches end on some ranks alone (on all ranks).
        ConfigError: the loop cannot be run, or ranks have different ones (on all ranks); nothing was trained.
        TrainingError: loss or gradient is not finite (on all ranks); the parameters are those before that step. Or an
            optimizer stepped with another learning rate than the schedule's. Or a callback of another rank has failed.
        CheckpointError: as of `Checkpointer.save`.
        Stopped: a rank has noted one of `loop.signals`; on all ranks. If there is a checkpointer, it has saved.
    """
    return _Course(manager, loop).run()


class _Course:
    """One call of `fit`."""

    def __init__(self, manager: StrategyManager, loop: Loop) -> None:
        self.manager, self.world = manager, manager.mesh.world
        agreed = agree_on(loop, manager.mesh)
        self.loop = loop = replace(loop, steps=agreed.steps, epochs=None)
        self.is_asked = agreed.has_callbacks or loop.save_after_s is not None
        self.watch = Watch(loop.early_stopping, loop.checkpointer, loop.state)
        self.sets = done_on_all(
            self.world,
            lambda: {name: list(batches) for name, batches in loop.held_out.items()},
            BatchError,
            "the microbatches of held_out cannot be drawn",
        )
        self.tokens = {name: count_tokens(each, manager.mesh, loop.objective) for name, each in self.sets.items()}
        self.ahead = _ahead(manager, loop)
        self.saved_at = loop.clock()
        self.told, self.stopwatch = Telling(manager, loop), Stopwatch(moments_of(manager.mesh.device))
        self.saving: dict[str, float] = {}

    def run(self) -> list[StepResult]:
        with self.told:
            return self.steps()

    def steps(self) -> list[StepResult]:
        results: list[StepResult] = []
        for step in range(self.loop.start, self.loop.num_steps):
            if self.watch.is_exhausted:
                # It was before the run was interrupted.
                self.told.reason = "early stopping"
                break
            try:
                with self.loop.around(step - self.loop.start):
                    result = train_step(self.manager, self.loop, step, self.ahead, self.stopwatch)
            except StopsBefore as stop:
                if self.loop.signals is None:
                    raise
                raise self.stopped(stop.number, self.loop.signals, results) from None
            result = replace(result, times={**result.times, **self.saving, **self.loop.measured()})
            self.saving = {}
            if self.loop.evaluates_after(result.step):
                result = self.evaluated(result)
            is_best = self.watch.note(result)
            self.told.step(result)
            results.append(result)
            stops, is_late = self.asked(result) if self.is_asked else (False, False)
            if stops or self.watch.is_exhausted:
                self.told.reason = "callback" if stops else "early stopping"
                stops = True
            if stops or is_best or is_late or is_due(result.step, self.loop.save_every, self.loop.num_steps):
                self.save(result, is_best=is_best)
            if stops:
                break
        return results

    def evaluated(self, result: StepResult) -> StepResult:
        """The same with the losses of the sets, of which observers are told."""
        start = time.perf_counter()
        with marked("evaluation"):
            losses = self.all_losses()
        seconds = time.perf_counter() - start
        result = replace(result, evaluations=losses, times={**result.times, "evaluation": seconds})
        self.told.evaluation(result, seconds)
        return result

    def all_losses(self) -> dict[str, float]:
        """The loss of each set, and that of the averaged weights."""
        losses, ema = self.losses(), self.loop.ema
        if ema is not None and ema.config.evaluate:
            with ema.in_place():
                losses |= {f"{name}{AVERAGED}": loss for name, loss in self.losses().items()}
        return losses

    def losses(self) -> dict[str, float]:
        return {
            name: float(
                self.manager.eval_loss(batches, num_tokens=self.tokens[name], objective=self.loop.objective),
            )
            for name, batches in self.sets.items()
        }

    def asked(self, result: StepResult) -> tuple[bool, bool]:
        """Whether a callback of any rank asks to stop, and whether a checkpoint is due by the clock. Collective."""
        error: Exception | None = None
        wishes = []
        try:
            wishes = [callback(result) for callback in self.loop.callbacks]
        except Exception as caught:
            error = caught
        after = self.loop.save_after_s
        is_late = after is not None and self.world.rank == 0 and self.loop.clock() - self.saved_at >= after
        wanted, late, failed = self.world.reduce_ints([any(wishes), is_late, error is not None])
        if failed:
            raise_on_all(self.world, error, TrainingError, f"a callback fails after step {result.step}")
        return bool(wanted), bool(late)

    def save(self, result: StepResult, *, is_best: bool = False) -> None:
        loop = self.loop
        if loop.checkpointer is None:
            return
        start = time.perf_counter()
        state = self.watch.state()
        if not callable(loop.batches):
            state["batches"] = states_of_ranks(self.ahead.state, self.manager.mesh)
        extra: Mapping[str, Any] = {}
        if (tell := loop.extra) is not None:
            what = f"extra of the loop fails after step {result.step}"
            extra = done_on_all(self.world, lambda: tell(result.step), CheckpointError, what)
        with marked("save"):
            loop.checkpointer.save(
                result.step, scheduler=loop.scheduler, extra={**extra, STATE: state}, evaluations=result.evaluations
            )
        self.saved_at = loop.clock()
        seconds = time.perf_counter() - start
        self.saving = {"save": seconds}
        path = step_directory(loop.checkpointer.root, result.step)
        self.told.checkpoint(SavedCheckpoint(result.step, path, seconds, result.rank, is_best))

    def stopped(self, number: int, signals: StopSignals, results: list[StepResult]) -> Stopped:
        """Save what is not saved, and wait until it is on disk everywhere. Collective."""
        step, checkpointer = results[-1].step if results else self.loop.start, self.loop.checkpointer
        saved = not results
        if checkpointer is not None and results:
            checkpointer.wait()
            if checkpointer.saved != step:
                self.save(results[-1])
                checkpointer.wait()
            saved = checkpointer.saved == step
        signals.settle()
        # Who leaves first would take connections with it that others may still need.
        self.world.reduce_ints([0])
        return Stopped(number, step=step, saved=saved, exit_code=signals.exit_code)


def _ahead(manager: StrategyManager, loop: Loop) -> Ahead:
    batches = loop.batches
    if not callable(batches):
        batches = _passes(loop, manager.mesh)
    return Ahead(manager, batches, steps=loop.num_steps, seed=loop.seed, objective=loop.objective, signals=loop.signals)


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
    *,
    before_clip: Callable[[], None] | None = None,
) -> StepResult:
    """Run one optimizer step, counted from 0; see `fit`.

    Args:
        ahead: of the loop, to begin the next step in it; None: it is left to itself.
        stopwatch: of the loop.
        before_clip: called when the gradients are whole, and not yet clipped.
    """
    start = time.perf_counter()
    stopwatch = stopwatch or Stopwatch(moments_of(manager.mesh.device))
    stopwatch.begin()
    microbatches, num_tokens = (ahead or _ahead(manager, loop)).take(step)
    stopwatch.end("data", "forward_backward")
    loss = manager.forward_backward(microbatches, num_tokens=num_tokens, objective=loop.objective)
    measures_norms = loop.norms_every is not None and (step + 1) % loop.norms_every == 0
    stopwatch.end("forward_backward", "norms" if measures_norms else "clip")
    sums = manager.last_sums
    norms = manager.gradient_norms() if measures_norms else {}
    if measures_norms:
        stopwatch.end("norms", "clip")
    if before_clip is not None:
        before_clip()
    grad_norm = manager.clip_grad_norm(loop.max_grad_norm, loop.grad_norm_type)
    stopwatch.end("clip", "read" if ahead is None else "data")
    if ahead is not None:
        ahead.begin(step + 1)
        stopwatch.end("data", "read")
    # One wait for the device per step; it also keeps a bad gradient out of the parameters.
    loss_value, norm_value, *sum_values = manager.read(loss, grad_norm, *sums.values())
    stopwatch.end("read", "optimizer")
    _check_finite(step + 1, loss_value, norm_value)
    scheduled = _stepped(manager, loop, step)
    stopwatch.end("optimizer")
    return StepResult(
        step=step + 1,
        steps=loop.num_steps,
        loss=loss_value,
        grad_norm=norm_value,
        learning_rate=float(scheduled[0]),
        num_tokens=int(num_tokens),
        seconds=time.perf_counter() - start,
        rank=manager.mesh.rank,
        sums=dict(zip(sums, sum_values, strict=True)),
        ended=time.time(),
        times=stopwatch.take(),
        learning_rates=_by_group(manager, scheduled),
        norms=norms,
        memory=memory_now(manager.mesh.device),
        world_size=manager.mesh.world.size,
        flops=None if loop.flops_per_token is None else loop.flops_per_token * int(num_tokens),
        peak_flops=loop.peak_flops,
    )


def _stepped(manager: StrategyManager, loop: Loop, step: int) -> Sequence[Any]:
    """Step the optimizer and the schedule; the rates of the step, by parameter group."""
    scheduler = loop.scheduler
    if scheduler is None:
        scheduled = [group["lr"] for group in manager.optimizer.param_groups]
    else:
        scheduled = scheduler.get_last_lr()
    with groups_stepped() as stepped:
        manager.optimizer_step()
    check_rates(scheduled, stepped, step=step + 1)
    if scheduler is not None:
        scheduler.step()
    return scheduled


def _check_finite(step: int, loss: float, norm: float) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise TrainingError(
            f"step {step}: the loss is {loss} and the gradient norm {norm}. The parameters were not changed by this "
            f"step. Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the step's data."
        )


def _by_group(manager: StrategyManager, rates: Sequence[float]) -> dict[str, float]:
    """Learning rates by parameter group: under its name, if it has one that no other has, or else its number."""
    names = [group.get("name") for group in manager.optimizer.param_groups]
    told = [name if name and names.count(name) == 1 else str(number) for number, name in enumerate(names)]
    return dict(zip(told, map(float, rates), strict=False))
