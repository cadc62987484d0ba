"""The options of a training loop, and checks and errors that all ranks of it share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from ...base.errors import CheckpointError, ConfigError, MeshwrightError
from ...base.types import Batch, Objective
from ...checkpoint import Checkpointer, Manifest
from ...checkpoint.extra_schema import check_loop
from ...checkpoint.training_state import decode_values
from ...events.run import RunInfo
from ...events.step import StepResult
from ...mesh.mesh import Mesh
from ...mesh.world import World
from ...optim.config import EMA_SUFFIX
from .ema import EMA
from .extension import LoopExtension
from .monitors import LOOP_STATE_KEY, BadStepConfig, EarlyStopping

if TYPE_CHECKING:
    from ...base.stopping import StopSignals

T = TypeVar("T")
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
        gradient_accumulation_steps: microbatches of a step, for an iterable.
        scheduler: sets the learning rates; None: they stay as they are.
        objective: minimized and evaluated; None: the token loss.
        max_grad_norm: limit of the total gradient norm; None: the norm is only measured.
        grad_norm_type: p of the norm.
        eval_sets: this rank's microbatches of each evaluation set by name; equally many on each rank. Read once.
        ema: averages of the weights, evaluated too as "NAME_ema" unless its config says otherwise.
        eval_every: steps between evaluations; None: only after the last step.
        early_stopping: when to stop early; None: never.
        callbacks: called in order after each step; ranks may have different ones.
        checkpointer: saves after the last step, after the steps that its `keep_best` selects, and as the next two say.
        save_every: steps between checkpoints.
        save_every_s: seconds since the last checkpoint, by the clock of the first rank.
        checkpoint_extra: `extra(drawn)` returns further JSON values for a checkpoint; `drawn` counts the batches drawn so far, see
            [Note: draws] in `monitors`.
        start_step: steps already done; see `resume_from`.
        resume_state: what `fit` has put into the checkpoint to resume from.
        seed: the random numbers of a step follow from it, the step and the data rank, so that a resumed run draws what
            it would have drawn; None: the generators are left alone.
        on_bad_step: what to do with a step whose loss or norm is not finite, or far above those before.
        verify_every: steps between comparisons of replicas; see [Note: silent corruption] in `verifying`.
        signals: end the loop before the next step, after a save; see [Note: agreeing to stop] in `batches`. Each rank
            enters its own before `fit`, with the same names.
        around, measured: see `extension.Around`; ranks may have different ones.
        grad_norms_every: steps between measurements of gradient norms by block; None: never.
        run_info: how observers see the run; None: made up. Ranks may differ in it.
        extensions: further parts of the loop; ranks may have different ones.
    """

    batches: Callable[[int], Sequence[Batch]] | Iterable[Batch]
    steps: int | None = None
    epochs: int | None = None
    gradient_accumulation_steps: int = 1
    scheduler: LRScheduler | None = None
    objective: Objective | None = None
    max_grad_norm: float | None = 1.0
    grad_norm_type: float = 2.0
    eval_sets: Mapping[str, Iterable[Batch]] = field(default_factory=dict)
    ema: EMA | None = None
    eval_every: int | None = None
    early_stopping: EarlyStopping | None = None
    callbacks: Sequence[Callback] = ()
    checkpointer: Checkpointer | None = None
    save_every: int | None = None
    save_every_s: float | None = None
    checkpoint_extra: Callable[[int], Mapping[str, Any]] | None = None
    start_step: int = 0
    resume_state: Mapping[str, Any] | None = None
    seed: int | None = None
    on_bad_step: BadStepConfig = field(default_factory=BadStepConfig)
    verify_every: int | None = None
    signals: StopSignals | None = None
    step_context: Callable[[int], AbstractContextManager[object]] | None = None
    extra_times: Callable[[], Mapping[str, float]] | None = None
    grad_norms_every: int | None = None
    run_info: RunInfo | None = None
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
        each = count_steps_per_epoch(self.batches, self.gradient_accumulation_steps)
        if each is None:
            raise ConfigError(
                f"epochs={self.epochs} needs batches that have a length, which {type(self.batches).__name__} has not. "
                f"Give steps."
            )
        return each * int(self.epochs or 0)

    @property
    def eval_loss_names(self) -> list[str]:
        """Names of the losses that an evaluation gives."""
        averaged = self.ema is not None and self.ema.config.evaluate
        return [*self.eval_sets, *(f"{name}{EMA_SUFFIX}" for name in self.eval_sets if averaged)]

    def resume_from(self, manifest: Manifest) -> Loop:
        """Return the loop that resumes from a checkpoint that has been loaded.

        Raises:
            CheckpointError: what `fit` has saved of itself has other types.
        """
        state = decode_values(manifest.extra.get(LOOP_STATE_KEY))
        try:
            check_loop(state or {})
        except ValueError as error:
            raise CheckpointError(
                f"the manifest of step {manifest.step} has values of other types: {LOOP_STATE_KEY}.{error}. Go on from another "
                f"checkpoint."
            ) from None
        return replace(self, start_step=manifest.step, resume_state=state)

    def is_eval_due(self, step: int) -> bool:
        """Whether the sets are evaluated after `step` steps."""
        return bool(self.eval_sets) and is_due(step, self.eval_every, self.num_steps)


def is_due(step: int, every: int | None, num_steps: int) -> bool:
    """Whether something that happens every so many steps, and after the last one, is due."""
    return step == num_steps or (every is not None and step % every == 0)


def count_steps_per_epoch(batches: Any, gradient_accumulation_steps: int) -> int | None:
    """Return the optimizer steps of one pass; None for a function, or where the length is unknown."""
    try:
        return -(-len(batches) // gradient_accumulation_steps)
    except (TypeError, NotImplementedError):
        return None


def raise_on_all_ranks(
    world: World, error: Exception | None, error_cls: type[MeshwrightError], failure: str
) -> NoReturn:
    """Raise an error that some rank has met, where all know that some has. Collective.

    An unexpected one is raised as it is, with its own traceback, and the other ranks raise `error_cls`, which begins with
    `failure`: "... cannot be drawn".
    """
    if error is None or isinstance(error, MeshwrightError):
        world.raise_first_error(error)
    with suppress(MeshwrightError):
        world.raise_first_error(error_cls(f"{failure}: {type(error).__name__}: {error}"))
    raise error


def run_on_all_ranks(world: World, work: Callable[[], T], error_cls: type[MeshwrightError], failure: str) -> T:
    """Run `work`, which must not be collective and may fail in any way; see `raise_on_all_ranks`. Collective."""
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(work())
    except Exception as caught:
        error = caught
    if world.reduce_ints([error is not None])[0]:
        raise_on_all_ranks(world, error, error_cls, failure)
    return found[0]


def validate_across_ranks(loop: Loop, mesh: Mesh) -> tuple[int, bool]:
    """Refuse a loop that cannot run, or that differs between ranks, and return the number of the last step, and whether
    any rank has callbacks. Collective."""
    world = mesh.world
    mine = world.run_on_all_ranks(lambda: collect_shared_options(loop))
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, (mine, len(loop.callbacks)), group=world.group)
    for name in mine:
        values = [told[name] for told, _ in found]
        if any(each != values[0] for each in values):
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values[:8]))
            raise ConfigError(f"ranks disagree on {name} of the loop: {listed}. Give all ranks the same.")
    return loop.num_steps, any(count for _, count in found)


_POSITIVE_OPTIONS = (
    "steps",
    "epochs",
    "gradient_accumulation_steps",
    "eval_every",
    "save_every",
    "grad_norms_every",
    "verify_every",
)
_SHARED_OPTIONS = (
    *(
        "start_step",
        "gradient_accumulation_steps",
        "max_grad_norm",
        "grad_norm_type",
        "eval_every",
        "early_stopping",
        "save_every",
    ),
    *("save_every_s", "grad_norms_every", "seed", "on_bad_step", "verify_every"),
)


def collect_shared_options(loop: Loop) -> dict[str, Any]:
    """Return by name what must be equal on all ranks; a loop that cannot run is a ConfigError."""
    steps, checkpointer = loop.num_steps, loop.checkpointer
    for name, lowest in {**dict.fromkeys(_POSITIVE_OPTIONS, 1), "start_step": 0}.items():
        value = getattr(loop, name)
        if value is not None and (type(value) is not int or value < lowest):
            raise ConfigError(f"{name} of the loop must be an int, at least {lowest}, not {value!r}.")
    if loop.start_step > steps:
        raise ConfigError(f"the loop is to start after step {loop.start_step}, but has {steps} steps. Raise steps.")
    if not isinstance(loop.eval_sets, Mapping):
        raise ConfigError(
            f"eval_sets of the loop must map names to microbatches, such as {{'held_out': batches}}, not "
            f"{type(loop.eval_sets).__name__}."
        )
    if callable(loop.batches) and loop.gradient_accumulation_steps != 1:
        raise ConfigError(
            "gradient_accumulation_steps is for batches that are iterable; a function gives all microbatches of a step."
        )
    if checkpointer is None and loop.on_bad_step.action == "rollback":
        raise ConfigError("on_bad_step=rollback needs a checkpointer to go back with: give the loop one, or set skip.")
    if checkpointer is None and (loop.save_every is not None or loop.save_every_s is not None):
        raise ConfigError("save_every and save_every_s need a checkpointer: give the loop one, or leave them out.")
    if loop.save_every_s is not None and not loop.save_every_s > 0:
        raise ConfigError(f"save_every_s must be above 0, in seconds, not {loop.save_every_s!r}.")
    _check_eval_sets(loop)
    return {
        "steps": steps,
        "the kind of batches": "a function" if callable(loop.batches) else "an iterable",
        "the number of steps in a pass": count_steps_per_epoch(loop.batches, loop.gradient_accumulation_steps),
        "scheduler": loop.scheduler is not None,
        "the names of eval_sets": list(loop.eval_sets),
        "ema": loop.ema and loop.ema.config,
        "checkpointer": checkpointer and (checkpointer.keep_best, checkpointer.best_eval_set),
        "signals": loop.signals and loop.signals.names,
        **{name: getattr(loop, name) for name in _SHARED_OPTIONS},
    }


def _check_eval_sets(loop: Loop) -> None:
    names, stopping, checkpointer = loop.eval_loss_names, loop.early_stopping, loop.checkpointer
    known = ", ".join(names) or "none"
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"eval_sets of the loop has a set {twice!r}, which is what averages are called. Rename it.")
    if stopping is not None and stopping.eval_set not in names:
        raise ConfigError(f"early_stopping looks at the set {stopping.eval_set!r}; the loop's are: {known}.")
    if stopping is not None and loop.eval_every is None:
        raise ConfigError("early_stopping needs evaluations before the end: set eval_every.")
    if checkpointer is not None and checkpointer.keep_best and checkpointer.best_eval_set not in names:
        raise ConfigError(f"keep_best looks at the set {checkpointer.best_eval_set!r}; the loop's are: {known}.")
