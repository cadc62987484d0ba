"""The training loop, shared by all strategies. It uses only the strategy contract."""

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
from ...checkpoint.storage import to_path_or_url
from ...events.run import BadStep, EndReason, Evaluation, Fault, RunInfo, RunSummary, SavedCheckpoint
from ...events.step import StepResult
from ...files.terminal import warn
from ...step.handshake import count_tokens
from ...strategy.contract import StrategyManager
from ...strategy.registry import get_registry
from ...tensors.ops import make_event_recorder
from .batches import StopRequested, build_prefetcher, gather_loader_states
from .extension import GradientStage, LoopExtension, StepContext
from .monitors import BAD_STEPS_KEY, LOOP_STATE_KEY, BadStepDetector, BadStepInfo, MetricMonitor, RollbackRequested
from .notebook_progress import show_notebook_progress
from .options import Loop, is_due, raise_on_all_ranks, run_on_all_ranks, validate_across_ranks
from .step import Stopwatch, profiler_phase, train_step
from .verifier import Verifier

if TYPE_CHECKING:
    from ...base.stopping import StopSignals

clock = time.monotonic


def fit(manager: StrategyManager, loop: Loop) -> list[StepResult]:
    """Train until the last step, or until a callback or `early_stopping` ends the run. Collective.

    After each step come, in this order: the evaluation if it is due, the observers' hook `on_step_end`, the callbacks,
    and the checkpoint if it is due. `strategy.hooks` declares the other hooks of observers.

    Args:
        manager: a manager after `parallelize` and `build_optimizer`.
        loop: equal on all ranks, except for the data and callbacks of each rank.

    Returns:
        The results of the steps after `loop.start_step`.

    Raises:
        BatchError: a step's microbatches are inconsistent, or batches end on some ranks only (on all ranks).
        ConfigError: the loop is invalid, or differs between ranks (on all ranks); nothing was trained.
        TrainingError: the loss or gradient norm is not finite (on all ranks); the parameters are those before that
            step. Or an optimizer stepped with a learning rate other than the schedule's, or a callback failed on
            another rank.
        CheckpointError: see `Checkpointer.save`.
        Stopped: a rank has received one of `loop.signals` (on all ranks). If there is a checkpointer, it has saved.
    """
    with show_notebook_progress(manager.mesh.rank):
        return _TrainingLoop(manager, loop).run()


class _TrainingLoop:
    """One call of `fit`."""

    def __init__(self, manager: StrategyManager, loop: Loop) -> None:
        self.manager, self.world = manager, manager.mesh.world
        steps, has_callbacks = validate_across_ranks(loop, manager.mesh)
        self.loop = loop = replace(loop, steps=steps, epochs=None)
        self.checks_callbacks = has_callbacks or loop.save_every_s is not None
        self.metric_monitor = MetricMonitor(loop.early_stopping, loop.checkpointer, loop.resume_state)
        self.eval_sets = run_on_all_ranks(
            self.world,
            lambda: {name: list(batches) for name, batches in loop.eval_sets.items()},
            BatchError,
            "the microbatches of eval_sets cannot be drawn",
        )
        self.eval_num_tokens = {
            name: count_tokens(each, manager.mesh, loop.objective) for name, each in self.eval_sets.items()
        }
        self.bad_step_detector = BadStepDetector(loop.on_bad_step, (loop.resume_state or {}).get(BAD_STEPS_KEY))
        self.prefetcher = build_prefetcher(manager, loop)
        self.rollback_points = RollbackPoints(manager, loop)
        self.extensions = _build_extensions(manager, loop, self.rollback_points)
        for each in self.extensions:
            each.on_start(self.state_dict())
        self.last_save_time = clock()
        self.info, self.progress = _build_run_info(manager, loop), self.world.progress
        self.end_reason: EndReason = "done"
        self.last_result: StepResult | None = None
        self.last_eval_losses: dict[str, float] = {}
        self.start_time = time.monotonic()
        self.stopwatch = Stopwatch(make_event_recorder(manager.mesh.device), self.progress)
        self.save_times: dict[str, float] = {}
        self.busy_s = 0.0

    def run(self) -> list[StepResult]:
        """Run the steps, and notify observers of the start and of the end, even after an error."""
        hook, rank = get_registry().hook, self.manager.mesh.rank
        start = partial(hook.on_run_start, run=self.info, mesh=self.manager.mesh)
        run_on_all_ranks(self.world, start, TrainingError, "an observer fails at the start of the run")
        try:
            results = self.run_steps()
        except BaseException as error:
            self.end_reason = "signal" if isinstance(error, Stopped) else "failed"
            if self.end_reason == "failed":
                fault = Fault(self.last_step, rank, type(error).__name__, str(error), time.time())
                _call_without_raising(lambda: hook.on_fault(fault=fault))
            _call_without_raising(lambda: hook.on_run_end(summary=self.build_summary()))
            raise
        hook.on_run_end(summary=self.build_summary())
        return results

    @property
    def last_step(self) -> int:
        return self.loop.start_step if self.last_result is None else self.last_result.step

    def build_summary(self) -> RunSummary:
        return RunSummary(
            run=self.info,
            reason=self.end_reason,
            step=self.last_step,
            num_steps=self.loop.num_steps,
            seconds=time.monotonic() - self.start_time,
            loss=None if self.last_result is None else self.last_result.loss,
            evaluations=self.last_eval_losses,
            rank=self.manager.mesh.rank,
        )

    def run_steps(self) -> list[StepResult]:
        results: list[StepResult] = []
        while (step := results[-1].step if results else self.loop.start_step) < self.loop.num_steps:
            if self.metric_monitor.should_stop:
                # The run was interrupted after early stopping had triggered.
                self.end_reason = "early stopping"
                break
            try:
                result = self.run_step(step)
            except StopRequested as stop:
                if self.loop.signals is None:
                    raise
                raise self.stop_on_signal(stop.signum, self.loop.signals, results) from None
            if isinstance(result, BadStepInfo):
                self.roll_back(result, results)
                continue
            # This rank's busy time: observers and callbacks of the previous step, fetching, and the optimizer.
            own_s = self.busy_s + self.prefetcher.pop_draw_seconds() + result.times.get("optimizer", 0.0)
            self.progress.step_times.append((own_s, result.seconds))
            result = replace(result, times={**result.times, **self.save_times})
            self.save_times = {}
            for each in self.extensions:
                result = each.process_result(result)
            if self.loop.is_eval_due(result.step):
                result = self.evaluate(result)
            is_best = self.metric_monitor.update(result)
            start = time.perf_counter()
            self.last_result = result
            get_registry().hook.on_step_end(result=result)
            self.busy_s = time.perf_counter() - start
            results.append(result)
            stops, is_late = self.poll_callbacks(result) if self.checks_callbacks else (False, False)
            if stops or self.metric_monitor.should_stop:
                self.end_reason = "callback" if stops else "early stopping"
                stops = True
            if stops or is_best or is_late or is_due(result.step, self.loop.save_every, self.loop.num_steps):
                self.save_checkpoint(result, is_best=is_best)
            for each in self.extensions:
                each.finish_step(result.step, lambda done=result.step: self.prepare_extra(done))  # type: ignore[misc]
            if stops:
                break
        return results

    def run_step(self, step: int) -> StepResult | BadStepInfo:
        """Run one step. Return a BadStepInfo if the step requests a rollback."""

        def notify_extensions(moment: GradientStage) -> None:
            for each in self.extensions:
                each.on_gradients(moment)

        try:
            with ExitStack() as stack:
                for each in self.extensions:
                    stack.enter_context(each.step_context(step - self.loop.start_step))
                result = train_step(
                    self.manager,
                    self.loop,
                    step,
                    self.prefetcher,
                    self.stopwatch,
                    self.bad_step_detector,
                    on_gradients=notify_extensions,
                )
        except RollbackRequested as request:
            return request.bad
        if result.skip_reason:
            self.report_bad_step(BadStepInfo(result.step, result.skip_reason))
        return result

    def report_bad_step(self, bad: BadStepInfo, rollback_step: int | None = None) -> None:
        rank, count = self.manager.mesh.rank, self.bad_step_detector.num_bad_steps
        event = BadStep(bad.step, self.loop.num_steps, bad.reason, rank, count, rollback_step)
        get_registry().hook.on_bad_step(bad_step=event)

    def roll_back(self, bad: BadStepInfo, results: list[StepResult]) -> None:
        """Roll back to a checkpoint, and skip the batches since then. Collective."""
        to, state = self.rollback_points.roll_back(bad)
        self.metric_monitor = MetricMonitor(self.loop.early_stopping, self.loop.checkpointer, state)
        self.bad_step_detector.roll_back(bad, state, step=to)
        while results and results[-1].step > to:
            results.pop()
        for each in self.extensions:
            each.on_rollback(to)
        self.report_bad_step(bad, to)

    def evaluate(self, result: StepResult) -> StepResult:
        """Evaluate, notify observers, and return the result with the losses. Collective."""
        start = time.perf_counter()
        self.progress.enter_phase("evaluation")
        with profiler_phase("evaluation"):
            losses = self.compute_losses()
            for each in self.extensions:
                losses |= each.evaluate(self.compute_losses)
        self.progress.enter_phase("callbacks")
        seconds = time.perf_counter() - start
        result = replace(result, evaluations=losses, times={**result.times, "evaluation": seconds})
        self.last_eval_losses = {**self.last_eval_losses, **losses}
        evaluation = Evaluation(result.step, result.num_steps, losses, seconds, result.rank)
        get_registry().hook.on_evaluation(evaluation=evaluation)
        return result

    def compute_losses(self) -> dict[str, float]:
        return {
            name: float(
                self.manager.eval_loss(each, num_tokens=self.eval_num_tokens[name], objective=self.loop.objective)
            )
            for name, each in self.eval_sets.items()
        }

    def poll_callbacks(self, result: StepResult) -> tuple[bool, bool]:
        """Return whether a callback of any rank asks to stop, and whether `save_every_s` is over. Collective."""
        error: Exception | None = None
        responses = []
        start = time.perf_counter()
        try:
            responses = [callback(result) for callback in self.loop.callbacks]
        except Exception as caught:
            error = caught
        self.busy_s += time.perf_counter() - start
        after = self.loop.save_every_s
        is_late = after is not None and self.world.rank == 0 and clock() - self.last_save_time >= after
        wanted, late, failed = self.world.reduce_ints([any(responses), is_late, error is not None])
        if failed:
            raise_on_all_ranks(self.world, error, TrainingError, f"a callback fails after step {result.step}")
        return bool(wanted), bool(late)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the loop saves in checkpoints; JSON-serializable."""
        return {**self.metric_monitor.state_dict(), **self.bad_step_detector.state_dict()}

    def save_checkpoint(self, result: StepResult, *, is_best: bool = False) -> None:
        loop = self.loop
        if loop.checkpointer is None:
            return
        start = time.perf_counter()
        self.progress.enter_phase("save")
        extra = self.prepare_extra(result.step)
        with profiler_phase("save"):
            loop.checkpointer.save(result.step, scheduler=loop.scheduler, extra=extra, evaluations=result.evaluations)
        self.last_save_time = clock()
        self.save_times["save"] = seconds = time.perf_counter() - start
        place = to_path_or_url(loop.checkpointer.storage_for_step(result.step))
        get_registry().hook.on_checkpoint(checkpoint=SavedCheckpoint(result.step, place, seconds, result.rank, is_best))

    def prepare_extra(self, step: int) -> dict[str, Any]:
        """Prepare a save, and return a checkpoint's `extra`: everything besides the manager's state. Collective."""
        state: dict[str, Any] = self.state_dict()
        for each in self.extensions:
            each.before_save(step, state)
        extra: dict[str, Any] = {}
        if not callable(self.loop.batches):
            state["batches"] = gather_loader_states(self.prefetcher.loader_state, self.manager.mesh)
        if (build_extra := self.loop.checkpoint_extra) is not None:
            num_fetched = step + self.bad_step_detector.num_skipped_batches
            failure = f"extra of the loop fails after step {step}"
            extra = dict(run_on_all_ranks(self.world, lambda: build_extra(num_fetched), CheckpointError, failure))
        return {**extra, LOOP_STATE_KEY: state}

    def stop_on_signal(self, signum: int, signals: StopSignals, results: list[StepResult]) -> Stopped:
        """Save if the last step is not saved yet, and wait until all ranks have written. Collective."""
        step, checkpointer = results[-1].step if results else self.loop.start_step, self.loop.checkpointer
        saved, is_late = not results, False
        if checkpointer is not None and results:
            checkpointer.wait()
            if checkpointer.last_saved_step != step:
                # Skip the save if any rank would be killed before it ends.
                is_late = bool(self.world.reduce_ints([checkpointer.max_save_s > signals.remaining_s])[0])
            if checkpointer.last_saved_step != step and not is_late:
                self.save_checkpoint(results[-1])
                checkpointer.wait()
            saved = checkpointer.last_saved_step == step
        signals.ignore_further_signals()
        # A rank that exits early would close connections that other ranks still use.
        self.world.reduce_ints([0])
        return Stopped(
            signum, step=step, saved=saved, exit_code=signals.find_exit_code(signum), has_skipped_save=is_late
        )


def _build_extensions(manager: StrategyManager, loop: Loop, rollback_points: RollbackPoints) -> list[LoopExtension]:
    own: list[LoopExtension | None] = [
        Verifier(manager, loop.verify_every) if loop.verify_every is not None else None,
        rollback_points if loop.on_bad_step.action == "rollback" else None,
        loop.ema,
        StepContext(loop.step_context, loop.extra_times) if loop.step_context or loop.extra_times else None,
    ]
    return [*(each for each in own if each is not None), *loop.extensions]


class RollbackPoints(LoopExtension):
    """Roll back to checkpoints that this process has saved or resumed from.

    For each of them it keeps in memory what is restored separately: learning rates, the schedule, and the loop's state.
    Optimizer settings that a run has changed since then keep their current values.
    """

    def __init__(self, manager: StrategyManager, loop: Loop) -> None:
        self._manager, self._loop = manager, loop
        self._points: dict[int, tuple[list[Any], dict[str, Any] | None, Mapping[str, Any]]] = {}

    def on_start(self, state: Mapping[str, Any]) -> None:
        self.before_save(self._loop.start_step, state)

    def before_save(self, step: int, state: Mapping[str, Any]) -> None:
        scheduler = self._loop.scheduler
        rates = [group["lr"] for group in self._manager.optimizer.param_groups]
        self._points[step] = deepcopy((rates, scheduler and scheduler.state_dict(), dict(state)))

    def roll_back(self, bad: BadStepInfo) -> tuple[int, Mapping[str, Any]]:
        """Load the newest valid checkpoint before a step; return its step and the loop's state at it. Collective."""
        checkpointer, world = self._loop.checkpointer, self._manager.mesh.world
        if checkpointer is None:
            raise TrainingError("on_bad_step=rollback needs a checkpointer.")
        checkpointer.wait()
        steps = sorted((step for step in self._points if step < bad.step), reverse=True)
        existing = world.run_on_first_rank(
            lambda: [step for step in steps if storage_exists(checkpointer.storage_for_step(step))]
        )
        newest, _ = find_first_valid([checkpointer.storage_for_step(step) for step in existing], world)
        if newest is None:
            raise TrainingError(
                f"step {bad.step}: {bad.reason}, and there is no checkpoint to go back to: on_bad_step=rollback goes "
                f"back to what this attempt has saved or started with. No parameter was changed by this step. Lower "
                f"checkpoint.every, or set on_bad_step=skip."
            )
        load_checkpoint(self._manager, newest, keep_group_settings=True)
        to = next(step for step in existing if checkpointer.storage_for_step(step) == newest)
        rates, schedule, state = deepcopy(self._points[to])
        if self._loop.scheduler is not None:
            self._loop.scheduler.load_state_dict(schedule)
        for group, rate in zip(self._manager.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return to, state


def _call_without_raising(notify: Callable[[], Any]) -> None:
    """Notify observers while another error is being raised; an error of theirs only warns, so as not to hide it."""
    try:
        notify()
    except Exception as error:
        warn(f"an observer fails at the end of the run: {type(error).__name__}: {error}", stacklevel=2)


def _build_run_info(manager: StrategyManager, loop: Loop) -> RunInfo:
    mesh = manager.mesh
    if loop.run_info is not None:
        return replace(loop.run_info, rank=mesh.rank)
    return RunInfo(
        id=mesh.world.run_on_first_rank(generate_run_id),
        name="run",
        strategy=manager.strategy,
        mesh=str(mesh.degrees),
        world_size=mesh.world.size,
        rank=mesh.rank,
        start_step=loop.start_step,
        num_steps=loop.num_steps,
        num_parameters=None,
        device=mesh.device.type,
    )


def generate_run_id() -> str:
    """Return a unique run id."""
    return uuid.uuid4().hex
