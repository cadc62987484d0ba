"""The training loop: one for every strategy, of which it knows only the contract."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...base.errors import BatchError, CheckpointError, TrainingError
from ...base.stopping import Stopped
from ...checkpoint.places import path_or_url
from ...events.run import SavedCheckpoint
from ...events.step import StepResult
from ...step.agreement import count_tokens
from ...strategy.contract import StrategyManager
from ...tensors.ops import moments_of
from .agreed import agree_on, done_on_all, raise_on_all
from .ahead import StopsBefore
from .bad_steps import BAD_STEPS, Bad, BadSteps, Rewinds
from .batches import states_of_ranks
from .extension import Around, LoopExtension, Moment
from .options import Loop, is_due
from .rewinding import Saves
from .step import begun_ahead, train_step
from .stopwatch import Stopwatch, marked
from .telling import Telling
from .verifying import Verifier
from .watch import STATE, Watch

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
    course = _Course(manager, loop)
    with course.told:
        return course.run()


class _Course:
    """One call of `fit`."""

    def __init__(self, manager: StrategyManager, loop: Loop) -> None:
        self.manager, self.world = manager, manager.mesh.world
        steps, has_callbacks = agree_on(loop, manager.mesh)
        self.loop = loop = replace(loop, steps=steps, epochs=None)
        self.is_asked = has_callbacks or loop.save_after_s is not None
        self.watch = Watch(loop.early_stopping, loop.checkpointer, loop.state)
        self.sets = done_on_all(
            self.world,
            lambda: {name: list(batches) for name, batches in loop.held_out.items()},
            BatchError,
            "the microbatches of held_out cannot be drawn",
        )
        self.tokens = {name: count_tokens(each, manager.mesh, loop.objective) for name, each in self.sets.items()}
        self.bad_steps = BadSteps(loop.on_bad_step, (loop.state or {}).get(BAD_STEPS))
        self.ahead = begun_ahead(manager, loop)
        self.saves = Saves(manager, loop)
        self.extensions = self._extensions()
        for each in self.extensions:
            each.begin(self.state())
        self.saved_at = clock()
        self.told, self.progress = Telling(manager, loop), self.world.progress
        self.stopwatch = Stopwatch(moments_of(manager.mesh.device), self.progress)
        self.saving: dict[str, float] = {}
        self.own_s = 0.0

    def _extensions(self) -> list[LoopExtension]:
        loop, found = self.loop, list[LoopExtension]()
        if loop.verify_every is not None:
            found.append(Verifier(self.manager, loop.verify_every))
        if loop.on_bad_step.do == "rewind":
            found.append(self.saves)
        if loop.ema is not None:
            found.append(loop.ema)
        if loop.around is not None or loop.measured is not None:
            found.append(Around(loop.around, loop.measured))
        return [*found, *loop.extensions]

    def run(self) -> list[StepResult]:
        results: list[StepResult] = []
        while (step := results[-1].step if results else self.loop.start) < self.loop.num_steps:
            if self.watch.is_exhausted:
                # It was before the run was interrupted.
                self.told.reason = "early stopping"
                break
            try:
                result = self.step(step)
            except StopsBefore as stop:
                if self.loop.signals is None:
                    raise
                raise self.stopped(stop.number, self.loop.signals, results) from None
            if isinstance(result, Bad):
                self.rewind(result, results)
                continue
            self.note_own_seconds(result)
            result = replace(result, times={**result.times, **self.saving})
            self.saving = {}
            for each in self.extensions:
                result = each.after_step(result)
            if self.loop.evaluates_after(result.step):
                result = self.evaluated(result)
            is_best = self.watch.note(result)
            start = time.perf_counter()
            self.told.step(result)
            self.own_s = time.perf_counter() - start
            results.append(result)
            stops, is_late = self.asked(result) if self.is_asked else (False, False)
            if stops or self.watch.is_exhausted:
                self.told.reason = "callback" if stops else "early stopping"
                stops = True
            if stops or is_best or is_late or is_due(result.step, self.loop.save_every, self.loop.num_steps):
                self.save(result, is_best=is_best)
            for each in self.extensions:
                each.end_step(result.step, lambda done=result.step: self.extra(done))  # type: ignore[misc]
            if stops:
                break
        return results

    def step(self, step: int) -> StepResult | Bad:
        """Run a step; a bad one may take the run back."""
        try:
            with ExitStack() as held:
                for each in self.extensions:
                    held.enter_context(each.around_step(step - self.loop.start))
                result = train_step(
                    self.manager, self.loop, step, self.ahead, self.stopwatch, self.bad_steps, look=self.look
                )
        except Rewinds as rewinds:
            return rewinds.bad
        if result.skipped:
            self.told.bad_step(Bad(result.step, result.skipped), count=self.bad_steps.count)
        return result

    def look(self, moment: Moment) -> None:
        for each in self.extensions:
            each.on_gradients(moment)

    def rewind(self, bad: Bad, results: list[StepResult]) -> None:
        """Go back to a checkpoint, and leave out the batches since then. Collective."""
        to, state = self.saves.go_back(bad)
        self.watch = Watch(self.loop.early_stopping, self.loop.checkpointer, state)
        self.bad_steps.rewound(bad, state, to=to)
        while results and results[-1].step > to:
            results.pop()
        for each in self.extensions:
            each.on_rewind(to)
        self.told.bad_step(bad, count=self.bad_steps.count, back_to=to)

    def note_own_seconds(self, result: StepResult) -> None:
        """Report what this rank took by itself: observers and callbacks of the step before, drawing, the optimizer."""
        own_s = self.own_s + self.ahead.take_seconds() + result.times.get("optimizer", 0.0)
        self.progress.steps.append((own_s, result.seconds))

    def evaluated(self, result: StepResult) -> StepResult:
        """Return the result with the losses of the sets, and tell observers of them. Collective."""
        start = time.perf_counter()
        self.progress.enter("evaluation")
        with marked("evaluation"):
            losses = self.losses()
            for each in self.extensions:
                losses |= each.evaluate(self.losses)
        self.progress.enter("callbacks")
        seconds = time.perf_counter() - start
        result = replace(result, evaluations=losses, times={**result.times, "evaluation": seconds})
        self.told.evaluation(result, seconds)
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
            raise_on_all(self.world, error, TrainingError, f"a callback fails after step {result.step}")
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
        with marked("save"):
            loop.checkpointer.save(result.step, scheduler=loop.scheduler, extra=extra, evaluations=result.evaluations)
        self.saved_at = clock()
        seconds = time.perf_counter() - start
        self.saving["save"] = seconds
        place = loop.checkpointer.place(result.step)
        self.told.checkpoint(SavedCheckpoint(result.step, path_or_url(place), seconds, result.rank, is_best))

    def extra(self, step: int) -> dict[str, Any]:
        """Prepare a save, and return what belongs into a checkpoint beside the state of the manager. Collective."""
        state: dict[str, Any] = self.state()
        for each in self.extensions:
            each.before_save(step, state)
        extra: dict[str, Any] = {}
        if not callable(self.loop.batches):
            state["batches"] = states_of_ranks(self.ahead.state, self.manager.mesh)
        if (tell := self.loop.extra) is not None:
            drawn, what = step + self.bad_steps.left_out, f"extra of the loop fails after step {step}"
            extra = dict(done_on_all(self.world, lambda: tell(drawn), CheckpointError, what))
        return {**extra, STATE: state}

    def stopped(self, number: int, signals: StopSignals, results: list[StepResult]) -> Stopped:
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
        return Stopped(number, step=step, saved=saved, exit_code=signals.exit_code, too_late=is_late)
