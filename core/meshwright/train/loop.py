"""The training loop: one for every strategy, of which it knows only the contract."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from ..base.errors import BatchError, CheckpointError, TrainingError
from ..base.stopping import Stopped, StopSignals
from ..checkpoint.places import path_or_url
from ..events.run import SavedCheckpoint
from ..events.step import StepResult
from ..profile.marks import marked
from ..step.agreement import count_tokens
from ..strategy.contract import StrategyManager
from ..tensors.ops import moments_of
from .agreed import agree_on
from .ahead import StopsBefore
from .bad_steps import BAD_STEPS, Bad, BadSteps, Rewinds
from .batches import states_of_ranks
from .failures import done_on_all, raise_on_all
from .loop_options import Callback as Callback
from .loop_options import Loop as Loop
from .loop_options import is_due
from .one_step import Moment, begun_ahead
from .one_step import train_step as train_step
from .optimizer_config import AVERAGED
from .rewinding import Saves
from .stopwatch import Stopwatch
from .telling import Telling
from .verifying import Verifier
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
        self.bad_steps = BadSteps(loop.on_bad_step, (loop.state or {}).get(BAD_STEPS))
        self.ahead = begun_ahead(manager, loop)
        self.saves = Saves(manager, loop)
        if loop.on_bad_step.do == "rewind":
            self.saves.note(loop.start, self.state())
        self.verifier = None if loop.verify_every is None else Verifier(manager, loop.verify_every)
        self.saved_at = loop.clock()
        self.told, self.progress = Telling(manager, loop), self.world.progress
        self.stopwatch = Stopwatch(moments_of(manager.mesh.device), self.progress)
        self.saving: dict[str, float] = {}
        self.own_s = 0.0

    def run(self) -> list[StepResult]:
        with self.told:
            return self.steps()

    def steps(self) -> list[StepResult]:
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
            self.noted(result)
            if self.verifier is not None and self.verifier.is_due(result.step):
                self.verifier.verify(result.step)
            times = {**result.times, **self.saving, **self.loop.measured()}
            result = replace(result, times=times, stragglers=self.loop.stragglers())
            self.saving = {}
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
            self.copy(result.step)
            if stops:
                break
        return results

    def step(self, step: int) -> StepResult | Bad:
        """Run a step; a bad one takes the run back."""
        try:
            with self.loop.around(step - self.loop.start):
                result = train_step(
                    self.manager, self.loop, step, self.ahead, self.stopwatch, self.bad_steps, look=self.look
                )
        except Rewinds as rewinds:
            return rewinds.bad
        if result.skipped:
            self.told.bad_step(Bad(result.step, result.skipped), count=self.bad_steps.count)
        return result

    def look(self, moment: Moment) -> None:
        if self.verifier is not None and moment == "clipped":
            self.verifier.note_clipped()

    def rewind(self, bad: Bad, results: list[StepResult]) -> None:
        """Go back to a checkpoint, and leave out the batches since then. Collective."""
        to, state = self.saves.go_back(bad)
        self.watch = Watch(self.loop.early_stopping, self.loop.checkpointer, state)
        self.bad_steps.rewound(bad, state, to=to)
        while results and results[-1].step > to:
            results.pop()
        if self.verifier is not None:
            self.verifier.forget()
        self.told.bad_step(bad, count=self.bad_steps.count, back_to=to)

    def noted(self, result: StepResult) -> None:
        """For [Note: a rank's own seconds] in `stragglers`: what observers and callbacks have taken after the step
        before, drawing since then, and the optimizer."""
        own_s = self.own_s + self.ahead.take_seconds() + result.times.get("optimizer", 0.0)
        self.progress.steps.append((own_s, result.seconds))

    def evaluated(self, result: StepResult) -> StepResult:
        """The same with the losses of the sets, of which observers are told."""
        start = time.perf_counter()
        self.progress.enter("evaluation")
        with marked("evaluation"):
            losses = self.all_losses()
        self.progress.enter("callbacks")
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
        start = time.perf_counter()
        try:
            wishes = [callback(result) for callback in self.loop.callbacks]
        except Exception as caught:
            error = caught
        self.own_s += time.perf_counter() - start
        after = self.loop.save_after_s
        is_late = after is not None and self.world.rank == 0 and self.loop.clock() - self.saved_at >= after
        wanted, late, failed = self.world.reduce_ints([any(wishes), is_late, error is not None])
        if failed:
            raise_on_all(self.world, error, TrainingError, f"a callback fails after step {result.step}")
        return bool(wanted), bool(late)

    def state(self) -> dict[str, Any]:
        """What is to be remembered; values of JSON."""
        return {**self.watch.state(), **self.bad_steps.state()}

    def save(self, result: StepResult, *, is_best: bool = False) -> None:
        loop = self.loop
        if loop.checkpointer is None:
            return
        start = time.perf_counter()
        self.progress.enter("save")
        if self.verifier is not None:
            self.verifier.verify(result.step)
        if loop.on_bad_step.do == "rewind":
            self.saves.note(result.step, self.state())
        extra = self.extra(result.step)
        with marked("save"):
            loop.checkpointer.save(result.step, scheduler=loop.scheduler, extra=extra, evaluations=result.evaluations)
        self.saved_at = loop.clock()
        seconds = time.perf_counter() - start
        self.saving["save"] = seconds
        place = loop.checkpointer.place(result.step)
        self.told.checkpoint(SavedCheckpoint(result.step, path_or_url(place), seconds, result.rank, is_best))

    def copy(self, step: int) -> None:
        """Copy the state to memory, if that is due. Collective."""
        copier = self.loop.copier
        if copier is None or not copier.is_due(step):
            return

        def extra() -> dict[str, Any]:
            # Only of a copy that is made, on all ranks; none is made of what is not right.
            if self.verifier is not None:
                self.verifier.verify(step)
            return self.extra(step)

        start = time.perf_counter()
        self.progress.enter("copy")
        with marked("copy"):
            copier.copy(step, scheduler=self.loop.scheduler, extra=extra)
        self.saving["copy"] = time.perf_counter() - start

    def extra(self, step: int) -> dict[str, Any]:
        """What goes into a checkpoint beside the state of the manager. Collective."""
        state, extra = self.state(), {}
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
                is_late = self.would_be_late(checkpointer.seconds, signals)
            if checkpointer.saved != step and not is_late:
                self.save(results[-1])
                checkpointer.wait()
            saved = checkpointer.saved == step
        signals.settle()
        # Who leaves first would take connections with it that others may still need.
        self.world.reduce_ints([0])
        return Stopped(number, step=step, saved=saved, exit_code=signals.exit_code, too_late=is_late)

    def would_be_late(self, seconds: float, signals: StopSignals) -> bool:
        """Whether some rank would be ended before a save is done that takes so long. Collective."""
        return bool(self.world.reduce_ints([seconds > signals.left_s])[0])
