"""What a loop is to do: its data, how long it is, and what happens at each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import CheckpointError, ConfigError
from ..base.stopping import StopSignals
from ..checkpoint import Checkpointer, Manifest
from ..checkpoint.extra import check_loop
from ..checkpoint.values import decoded
from ..events.run import RunInfo
from ..events.step import StepResult
from ..memory.copier import Copier
from ..strategy.contract import Batch, Objective
from .bad_steps import BadStepConfig
from .batches import steps_in_a_pass
from .ema import EMA
from .optimizer_config import AVERAGED
from .watch import STATE, EarlyStopping


def _nothing(_: int) -> AbstractContextManager[None]:
    return nullcontext()


Callback: TypeAlias = "Callable[[StepResult], bool | None]"
"""Called on its rank after each step; True asks to stop after it, which all ranks then do."""


@dataclass(frozen=True)
class Loop:
    """What to train on, how long, and what to do at each step. All but data and callbacks is equal on all ranks.

    Attributes:
        batches: `batches(step)` gives this rank's microbatches of a step, counted from 0; or a DataLoader or any other
            iterable of microbatches, see [Note: passes] in `train.batches`. A microbatch is a mapping of tensors, see
            `StrategyManager.forward_backward`, on the CPU or on the device.
        steps: number of the last step. Either this or `epochs`.
        epochs: how often to go through an iterable that has a length.
        accumulate: microbatches of a step, of an iterable.
        scheduler: sets the rates of the manager's optimizer; None: they stay as they are.
        objective: what is minimized, and evaluated; None: the token loss.
        max_grad_norm: limit of the total gradient norm; None: measure only.
        grad_norm_type: p of the norm.
        held_out: this rank's microbatches of each set to evaluate on, by its name; equally many on each rank. They are
            read once, and held.
        ema: averages of the weights, which are evaluated on each set, too, as "NAME_ema", unless its config says
            otherwise. They are updated whether it is given here or not.
        eval_every: steps between evaluations; None: only after the last.
        early_stopping: when to stop before; None: never.
        callbacks: called in order after each step. Ranks may have others; they may issue collectives if all have them.
        checkpointer: saves after the last step, after a step that is among the best by what its `keep_best` says, and
            as the next two say.
        copier: copies the state to memory after the steps that it says, once a checkpoint that is due is saved.
        save_every: steps between checkpoints.
        save_after_s: seconds since the last one, by the clock of the first rank.
        extra: `extra(drawn)` gives further values of JSON for the checkpoint after so many steps; or after so many
            batches, where rewinding has left some out, see [Note: draws] in `train.bad_steps`.
        start: steps already done, for a run that goes on; see `going_on`.
        state: what `fit` has put into the checkpoint that the run goes on from.
        seed: random numbers of a step (dropout) follow from it, the step and the data rank alone, so that a run that
            goes on draws what it would have drawn; None: the generators go on as they are.
        on_bad_step: what becomes of a step whose loss or norm is not finite, or far above those before.
        verify_every: steps between comparisons of replicas, which also has each rank watch its own memory; None:
            neither is done. See [Note: silent corruption] in `train.verifying`.
        signals: end the loop before the next step, with a checkpoint if there is a checkpointer; see
            [Note: agreeing to stop] in `train.ahead`. Each rank enters its own before `fit`, with the same names.
        around: `around(step)`, counted from 0 in this call of `fit`: what a step on this rank happens within.
        measured: asked right after a step, within which `around` has measured something: further entries of
            `StepResult.times`.
        stragglers: asked after each step, see `StepResult.stragglers`; ranks may have others.
        norms_every: steps between those in which norms by block are measured; None: none are. See
            `StrategyManager.gradient_norms`.
        flops_per_token: of the model, for `StepResult.flops`; None: not known.
        peak_flops: see `StepResult`.
        run: what observers are told that it is; None: made up. Ranks may differ in it.
        clock: tells seconds.
    """

    batches: Callable[[int], Sequence[Batch]] | Iterable[Batch]
    steps: int | None = None
    epochs: int | None = None
    accumulate: int = 1
    scheduler: LRScheduler | None = None
    objective: Objective | None = None
    max_grad_norm: float | None = 1.0
    grad_norm_type: float = 2.0
    held_out: Mapping[str, Iterable[Batch]] = field(default_factory=dict)
    ema: EMA | None = None
    eval_every: int | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: Sequence[Callback] = ()
    checkpointer: Checkpointer | None = None
    copier: Copier | None = None
    save_every: int | None = None
    save_after_s: float | None = None
    extra: Callable[[int], Mapping[str, Any]] | None = None
    start: int = 0
    state: Mapping[str, Any] | None = None
    seed: int | None = None
    on_bad_step: BadStepConfig = field(default_factory=BadStepConfig)
    verify_every: int | None = None
    signals: StopSignals | None = None
    around: Callable[[int], AbstractContextManager[None]] = _nothing
    measured: Callable[[], Mapping[str, float]] = dict
    stragglers: Callable[[], Sequence[Mapping[str, float]]] = tuple
    norms_every: int | None = None
    flops_per_token: float | None = None
    peak_flops: float | None = None
    run: RunInfo | None = None
    clock: Callable[[], float] = time.monotonic

    @property
    def num_steps(self) -> int:
        """Number of the last step.

        Raises:
            ConfigError: neither `steps` nor `epochs` tells it, or both do.
        """
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"give either steps or epochs, not steps={self.steps} and epochs={self.epochs}.")
        if self.steps is not None:
            return self.steps
        each = steps_in_a_pass(self.batches, self.accumulate)
        if each is None:
            raise ConfigError(
                f"epochs={self.epochs} needs batches that have a length, which {type(self.batches).__name__} has not. "
                f"Give steps."
            )
        return each * int(self.epochs or 0)

    @property
    def evaluated_sets(self) -> list[str]:
        """Names of the losses that an evaluation gives."""
        averaged = self.ema is not None and self.ema.config.evaluate
        return [*self.held_out, *(f"{name}{AVERAGED}" for name in self.held_out if averaged)]

    def going_on(self, manifest: Manifest) -> Loop:
        """The loop from a checkpoint on that has been loaded, which `fit` has saved or which was saved by hand.

        Raises:
            CheckpointError: what `fit` has saved of itself is of other types.
        """
        state = decoded(manifest.extra.get(STATE))
        try:
            check_loop(state or {})
        except ValueError as error:
            raise CheckpointError(
                f"the manifest of step {manifest.step} has values of other types: {STATE}.{error}. Go on from another "
                f"checkpoint."
            ) from None
        return replace(self, start=manifest.step, state=state)

    def evaluates_after(self, done: int) -> bool:
        """Whether the sets are evaluated after so many steps."""
        return bool(self.held_out) and is_due(done, self.eval_every, self.num_steps)


def is_due(done: int, every: int | None, steps: int) -> bool:
    """Whether something is due after so many steps, which is so after the last, too."""
    return done == steps or (every is not None and done % every == 0)
