"""The options of a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.optim.lr_scheduler import LRScheduler

from ...base.errors import CheckpointError, ConfigError
from ...base.types import Batch, Objective
from ...checkpoint import Checkpointer, Manifest
from ...checkpoint.extra import check_loop
from ...checkpoint.values import decoded
from ...events.run import RunInfo
from ...events.step import StepResult
from ...optim.config import AVERAGED
from .bad_steps import BadStepConfig
from .batches import steps_in_a_pass
from .ema import EMA
from .extension import LoopExtension
from .watch import STATE, EarlyStopping

if TYPE_CHECKING:
    from ...base.stopping import StopSignals

Callback: TypeAlias = "Callable[[StepResult], bool | None]"
"""Called on its rank after each step; True stops the loop on all ranks after that step."""


@dataclass(frozen=True)
class Loop:
    """What to train on, how long, and what to do at each step. Must be equal on all ranks, except data and callbacks.

    Attributes:
        batches: `batches(step)` returns this rank's microbatches of a step, counted from 0; or a DataLoader or another
            iterable of microbatches, see [Note: passes] in `batches`. A microbatch is a mapping of tensors, see
            `StrategyManager.forward_backward`, on the CPU or on the device.
        steps: number of the last step. Give either this or `epochs`.
        epochs: passes over an iterable that has a length.
        accumulate: microbatches of a step, for an iterable.
        scheduler: sets the learning rates; None: they stay as they are.
        objective: minimized and evaluated; None: the token loss.
        max_grad_norm: limit of the total gradient norm; None: the norm is only measured.
        grad_norm_type: p of the norm.
        held_out: this rank's microbatches of each evaluation set by name; equally many on each rank. Read once.
        ema: averages of the weights, evaluated too as "NAME_ema" unless its config says otherwise.
        eval_every: steps between evaluations; None: only after the last step.
        early_stopping: when to stop early; None: never.
        callbacks: called in order after each step; ranks may have different ones.
        checkpointer: saves after the last step, after the steps that its `keep_best` selects, and as the next two say.
        save_every: steps between checkpoints.
        save_after_s: seconds since the last checkpoint, by the clock of the first rank.
        extra: `extra(drawn)` returns further JSON values for a checkpoint; `drawn` counts the batches drawn so far, see
            [Note: draws] in `bad_steps`.
        start: steps already done; see `going_on`.
        state: what `fit` has put into the checkpoint to resume from.
        seed: the random numbers of a step follow from it, the step and the data rank, so that a resumed run draws what
            it would have drawn; None: the generators are left alone.
        on_bad_step: what to do with a step whose loss or norm is not finite, or far above those before.
        verify_every: steps between comparisons of replicas; see [Note: silent corruption] in `verifying`.
        signals: end the loop before the next step, after a save; see [Note: agreeing to stop] in `ahead`. Each rank
            enters its own before `fit`, with the same names.
        around, measured: see `extension.Around`; ranks may have different ones.
        norms_every: steps between measurements of gradient norms by block; None: never.
        run: how observers see the run; None: made up. Ranks may differ in it.
        extensions: further parts of the loop; ranks may have different ones.
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
    save_every: int | None = None
    save_after_s: float | None = None
    extra: Callable[[int], Mapping[str, Any]] | None = None
    start: int = 0
    state: Mapping[str, Any] | None = None
    seed: int | None = None
    on_bad_step: BadStepConfig = field(default_factory=BadStepConfig)
    verify_every: int | None = None
    signals: StopSignals | None = None
    around: Callable[[int], AbstractContextManager[object]] | None = None
    measured: Callable[[], Mapping[str, float]] | None = None
    norms_every: int | None = None
    run: RunInfo | None = None
    extensions: Sequence[LoopExtension] = ()

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
        """Return the loop that resumes from a checkpoint that has been loaded.

        Raises:
            CheckpointError: what `fit` has saved of itself has other types.
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
        """Whether the sets are evaluated after `done` steps."""
        return bool(self.held_out) and is_due(done, self.eval_every, self.num_steps)


def is_due(done: int, every: int | None, steps: int) -> bool:
    """Whether something that happens every so many steps, and after the last one, is due."""
    return done == steps or (every is not None and done % every == 0)
