"""The training loop: one for every strategy, of which it knows only the contract."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...base.errors import BatchError, CheckpointError, TrainingError
from ...base.stopping import Stopped
from ...checkpoint import find_first_valid, load_checkpoint
from ...checkpoint.manifest import storage_exists
from ...checkpoint.places import to_path_or_url
from ...events.run import BadStep, EndReason, Evaluation, Fault, RunInfo, RunSummary, SavedCheckpoint
from ...events.step import StepResult
from ...files.terminal import warn
from ...step.agreement import count_tokens
from ...strategy.contract import StrategyManager
from ...strategy.registry import get_registry
from ...tensors.ops import make_event_recorder
from .batches import StopRequested, build_prefetcher, gather_loader_states
from .extension import GradientStage, LoopExtension, StepContext
from .monitors import BAD_STEPS_KEY, LOOP_STATE_KEY, BadStepDetector, BadStepInfo, MetricMonitor, RollbackRequested
from .options import Loop, is_due, raise_on_all_ranks, run_on_all_ranks, validate_across_ranks
from .step import Stopwatch, profiler_phase, train_step
from .verifying import Verifier

if TYPE_CHECKING:
    from ...base.stopping import StopSignals

clock = time.monotonic


def fit(manager: StrategyManager, loop: Loop) -> list[StepResult]:
    """Train until the last step, or until a callback or `early_stopping` ends it; collective.

    After each step due sets are evaluated, then the hook `on_step_end` of observers and the callbacks are called, then
    a due checkpoint is saved. The other hooks of observers are in `strategy.hooks`.

    Args:
        manager: has a model and an optimizer: `parallelize` and `build_optimizer` have been called.
        loop: equal on all ranks except for what each rank draws and is told.

    Returns:
        The results of the steps from `loop.start` on.

    Raises:
        BatchError: a step's microbatches do not fit together, or batches end on some ranks alone (on all ranks).
        ConfigError: the loop cannot run, or ranks have different ones (on all ranks); nothing was trained.
        TrainingError: loss or gradient is not finite (on all ranks); the parameters are those before that step. Or an
            optimizer stepped with another learning rate than the schedule's. Or a callback of another rank has failed.
        CheckpointError: as of `Checkpointer.save`.
        Stopped: a rank has noted one of `loop.signals`; on all ranks. If there is a checkpointer, it has saved.
    """
    return _TrainingLoop(manager, loop).run()


class _TrainingLoop:
    """One call of `fit`."""

    def __init__(self, manager: StrategyManager, loop: Loop) -> None:
        self.manager, self.world = manager, manager.mesh.world
        steps, has_callbacks = validate_across_ranks(loop, manager.mesh)
        self.loop = loop = replace(loop, steps=steps, epochs=None)
        self.is_asked = has_callbacks or loop.save_after_s is not None
        self.watch = MetricMonitor(loop.early_stopping, loop.checkpointer, loop.state)
        self.sets = run_on_all_ranks(
            self.world,
            lambda: {name: list(batches) for name, batches in loop.held_out.items()},
            BatchError,
            "the microbatches of eval_sets cannot be drawn",
        )
        self.tokens = {name: count_tokens(each, manager.mesh, loop.objective) for name, each in self.sets.items()}
        self.bad_steps = BadStepDetector(loop.on_bad_step, (loop.state or {}).get(BAD_STEPS_KEY))
        self.ahead = build_prefetcher(manager, loop)
        self.saves = RollbackPoints(manager, loop)
        self.extensions = self._extensions()
        for each in self.extensions:
            each.begin(self.state())
        self.saved_at = clock()
        self.info, self.progress = _build_run_info(manager, loop), self.world.progress
        self.reason: EndReason = "done"
        self.last: StepResult | None = None
        self.last_losses: dict[str, float] = {}
        self.began = time.monotonic()
        self.stopwatch = Stopwatch(make_event_recorder(manager.mesh.device), self.progress)
        self.saving: dict[str, float] = {}
        self.own_s = 0.0

    def _extensions(self) -> list[LoopExtension]:
        loop = self.loop
        own: list[LoopExtension | None] = [
            Verifier(self.manager, loop.verify_every) if loop.verify_every is not None else None,
            self.saves if loop.on_bad_step.do == "rewind" else None,
            loop.ema,
            StepContext(loop.around, loop.measured) if loop.around is not None or loop.measured is not None else None,
        ]
        return [*(each for each in own if each is not None), *loop.extensions]

    def run(self) -> list[StepResult]:
        """Run the steps, and call observers when they begin and end, however they do."""
        hook, rank = get_registry().hook, self.manager.mesh.rank
        start = partial(hook.on_run_start, run=self.info, mesh=self.manager.mesh)
        run_on_all_ranks(self.world, start, TrainingError, "an observer fails at the start of the run")
        try:
            results = self.steps()
        except BaseException as error:
            self.reason = "signal" if isinstance(error, Stopped) else "failed"
            if self.reason == "failed":
                fault = Fault(self.done, rank, type(error).__name__, str(error), time.time())
                _call_without_raising(lambda: hook.on_fault(fault=fault))
            _call_without_raising(lambda: hook.on_run_end(summary=self.summary()))
            raise
        hook.on_run_end(summary=self.summary())
        return results

    @property
    def done(self) -> int:
        return self.loop.start if self.last is None else self.last.step

    def summary(self) -> RunSummary:
        return RunSummary(
            run=self.info,
            reason=self.reason,
            step=self.done,
            steps=self.loop.num_steps,
            seconds=time.monotonic() - self.began,
            loss=None if self.last is None else self.last.loss,
            evaluations=self.last_losses,
            rank=self.manager.mesh.rank,
        )

    def steps(self) -> list[StepResult]:
        results: list[StepResult] = []
        while (step := results[-1].step if results else self.loop.start) < self.loop.num_steps:
            if self.watch.is_exhausted:
                # It was before the run was interrupted.
                self.reason = "early stopping"
                break
            try:
                result = self.step(step)
            except StopRequested as stop:
                if self.loop.signals is None:
                    raise
                raise self.stopped(stop.number, self.loop.signals, results) from None
            if isinstance(result, BadStepInfo):
                self.rewind(result, results)
                continue
            # What this rank took by itself: observers and callbacks of the step before, drawing, the optimizer.
            own_s = self.own_s + self.ahead.take_seconds() + result.times.get("optimizer", 0.0)
            self.progress.steps.append((own_s, result.seconds))
            result = replace(result, times={**result.times, **self.saving})
            self.saving = {}
            for each in self.extensions:
                result = each.after_step(result)
            if self.loop.evaluates_after(result.step):
                result = self.evaluated(result)
            is_best = self.watch.note(result)
            start = time.perf_counter()
            self.last = result
            get_registry().hook.on_step_end(result=result)
            self.own_s = time.perf_counter() - start
            results.append(result)
            stops, is_late = self.asked(result) if self.is_asked else (False, False)
            if stops or self.watch.is_exhausted:
                self.reason = "callback" if stops else "early stopping"
                stops = True
            if stops or is_best or is_late or is_due(result.step, self.loop.save_every, self.loop.num_steps):
                self.save(result, is_best=is_best)
            for each in self.extensions:
                each.end_step(result.step, lambda done=result.step: self.extra(done))  # type: ignore[misc]
            if stops:
                break
        return results

    def step(self, step: int) -> StepResult | BadStepInfo:
        """Run a step; a bad one may take the run back."""

        def look(moment: GradientStage) -> None:
            for each in self.extensions:
                each.on_gradients(moment)

        try:
            with ExitStack() as held:
                for each in self.extensions:
                    held.enter_context(each.around_step(step - self.loop.start))
                result = train_step(
                    self.manager, self.loop, step, self.ahead, self.stopwatch, self.bad_steps, on_gradients=look
                )
        except RollbackRequested as rewinds:
            return rewinds.bad
        if result.skipped:
            self.tell_of_bad(BadStepInfo(result.step, result.skipped))
        return result

    def tell_of_bad(self, bad: BadStepInfo, rollback_step: int | None = None) -> None:
        rank, count = self.manager.mesh.rank, self.bad_steps.count
        told = BadStep(bad.step, self.loop.num_steps, bad.reason, rank, count, rollback_step)
        get_registry().hook.on_bad_step(bad_step=told)

    def rewind(self, bad: BadStepInfo, results: list[StepResult]) -> None:
        """Go back to a checkpoint, and leave out the batches since then. Collective."""
        to, state = self.saves.go_back(bad)
        self.watch = MetricMonitor(self.loop.early_stopping, self.loop.checkpointer, state)
        self.bad_steps.rewound(bad, state, step=to)
        while results and results[-1].step > to:
            results.pop()
        for each in self.extensions:
            each.on_rewind(to)
        self.tell_of_bad(bad, to)

    def evaluated(self, result: StepResult) -> StepResult:
        """Return the result with the losses of the sets, and tell observers of them. Collective."""
        start = time.perf_counter()
        self.progress.enter("evaluation")
        with profiler_phase("evaluation"):
            losses = self.losses()
            for each in self.extensions:
                losses |= each.evaluate(self.losses)
        self.progress.enter("callbacks")
        seconds = time.perf_counter() - start
        result = replace(result, evaluations=losses, times={**result.times, "evaluation": seconds})
        self.last_losses = {**self.last_losses, **losses}
        evaluation = Evaluation(result.step, result.steps, losses, seconds, result.rank)
        get_registry().hook.on_evaluation(evaluation=evaluation)
        return result

    def losses(self) -> dict[str, float]:
        return {
            name: float(self.manager.eval_loss(each, num_tokens=self.tokens[name], objective=self.loop.objective))
            for name, each in self.sets.items()
        }

    def asked(self, result: StepResult) -> tuple[bool, bool]:
        """Whether a callback of any rank asks to stop, and whether a checkpoint is due by the clock. Collective."""
        error: Exception | None = None
        wishes = []
        start = time.perf_counter()
        try:
            wishes = [callback(result) for callback in self.loop.callbacks]
        except Exception as caught:
            error = caught
        self.own_s += time.perf_counter() - start
        after = self.loop.save_after_s
        is_late = after is not None and self.world.rank == 0 and clock() - self.saved_at >= after
        wanted, late, failed = self.world.reduce_ints([any(wishes), is_late, error is not None])
        if failed:
            raise_on_all_ranks(self.world, error, TrainingError, f"a callback fails after step {result.step}")
        return bool(wanted), bool(late)

    def state(self) -> dict[str, Any]:
        """What the loop remembers in checkpoints; values of JSON."""
        return {**self.watch.state(), **self.bad_steps.state()}

    def save(self, result: StepResult, *, is_best: bool = False) -> None:
        loop = self.loop
        if loop.checkpointer is None:
            return
        start = time.perf_counter()
        self.progress.enter("save")
        extra = self.extra(result.step)
        with profiler_phase("save"):
            loop.checkpointer.save(result.step, scheduler=loop.scheduler, extra=extra, evaluations=result.evaluations)
        self.saved_at = clock()
        self.saving["save"] = seconds = time.perf_counter() - start
        place = to_path_or_url(loop.checkpointer.place(result.step))
        get_registry().hook.on_checkpoint(checkpoint=SavedCheckpoint(result.step, place, seconds, result.rank, is_best))

    def extra(self, step: int) -> dict[str, Any]:
        """Prepare a save, and return what belongs into a checkpoint beside the state of the manager. Collective."""
        state: dict[str, Any] = self.state()
        for each in self.extensions:
            each.before_save(step, state)
        extra: dict[str, Any] = {}
        if not callable(self.loop.batches):
            state["batches"] = gather_loader_states(self.ahead.state, self.manager.mesh)
        if (tell := self.loop.extra) is not None:
            drawn, what = step + self.bad_steps.left_out, f"extra of the loop fails after step {step}"
            extra = dict(run_on_all_ranks(self.world, lambda: tell(drawn), CheckpointError, what))
        return {**extra, LOOP_STATE_KEY: state}

    def stopped(self, signum: int, signals: StopSignals, results: list[StepResult]) -> Stopped:
        """Save what is not saved, and wait until it is on disk everywhere. Collective."""
        step, checkpointer = results[-1].step if results else self.loop.start, self.loop.checkpointer
        saved, is_late = not results, False
        if checkpointer is not None and results:
            checkpointer.wait()
            if checkpointer.saved != step:
                # Some rank would be ended before the save is done.
                is_late = bool(self.world.reduce_ints([checkpointer.seconds > signals.left_s])[0])
            if checkpointer.saved != step and not is_late:
                self.save(results[-1])
                checkpointer.wait()
            saved = checkpointer.saved == step
        signals.settle()
        # Who leaves first would take connections with it that others may still need.
        self.world.reduce_ints([0])
        return Stopped(signum, step=step, saved=saved, exit_code=signals.exit_code, has_skipped_save=is_late)


class RollbackPoints(LoopExtension):
    """Goes back to checkpoints that the same processes have saved. For each it keeps what is not in it: learning rates,
    the schedule, and what the loop remembers. Settings of the optimizer that a run has changed since stay as they are.
    """

    def __init__(self, manager: StrategyManager, loop: Loop) -> None:
        self._manager, self._loop = manager, loop
        self._known: dict[int, tuple[list[Any], dict[str, Any] | None, Mapping[str, Any]]] = {}

    def begin(self, state: Mapping[str, Any]) -> None:
        self.before_save(self._loop.start, state)

    def before_save(self, step: int, state: Mapping[str, Any]) -> None:
        scheduler = self._loop.scheduler
        rates = [group["lr"] for group in self._manager.optimizer.param_groups]
        self._known[step] = deepcopy((rates, scheduler and scheduler.state_dict(), dict(state)))

    def go_back(self, bad: BadStepInfo) -> tuple[int, Mapping[str, Any]]:
        """Load the newest valid checkpoint before a step; return its step, and the loop's state then. Collective."""
        checkpointer, world = self._loop.checkpointer, self._manager.mesh.world
        if checkpointer is None:
            raise TrainingError("on_bad_step=rewind needs a checkpointer.")
        checkpointer.wait()
        steps = sorted((step for step in self._known if step < bad.step), reverse=True)
        there = world.from_first(lambda: [step for step in steps if storage_exists(checkpointer.place(step))])
        found, _ = find_first_valid([checkpointer.place(step) for step in there], world)
        if found is None:
            raise TrainingError(
                f"step {bad.step}: {bad.reason}, and there is no checkpoint to go back to: on_bad_step=rewind goes "
                f"back to what this sitting has saved or begun with. No parameter was changed by this step. Lower "
                f"checkpoint.every, or set on_bad_step=skip."
            )
        load_checkpoint(self._manager, found, keep_group_settings=True)
        to = next(step for step in there if checkpointer.place(step) == found)
        rates, schedule, state = deepcopy(self._known[to])
        if self._loop.scheduler is not None:
            self._loop.scheduler.load_state_dict(schedule)
        for group, rate in zip(self._manager.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return to, state


def _call_without_raising(notify: Callable[[], Any]) -> None:
    """Call observers while another error is raised, which theirs must not hide."""
    try:
        notify()
    except Exception as error:
        warn(f"an observer fails at the end of the run: {type(error).__name__}: {error}", stacklevel=2)


def _build_run_info(manager: StrategyManager, loop: Loop) -> RunInfo:
    mesh = manager.mesh
    if loop.run is not None:
        return replace(loop.run, rank=mesh.rank)
    return RunInfo(
        id=mesh.world.from_first(generate_run_id),
        name="run",
        strategy=manager.strategy,
        mesh=str(mesh.degrees),
        world_size=mesh.world.size,
        rank=mesh.rank,
        start=loop.start,
        steps=loop.num_steps,
        parameters=None,
        device=mesh.device.type,
    )


def generate_run_id() -> str:
    """Return an id that no other run has."""
    return uuid.uuid4().hex
