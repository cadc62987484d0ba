"""Options of a training loop, and the checks and errors that its ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields, replace
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
"""Called on its own rank after each step. Returning True stops the loop on all ranks after that step."""


@dataclass(frozen=True)
class Loop:
    """Options of `fit`: the data, the number of steps, and what runs at each step. Must be equal on all ranks, except
    for data and callbacks.

    Attributes:
        batches: `batches(step)` returns this rank's microbatches of a step, counted from 0. Or a DataLoader or another
            iterable of microbatches, see [Note: epochs] in `batches`. A microbatch is a mapping of tensors on the CPU
            or the device, see `StrategyManager.forward_backward`.
        steps: number of the last step. Set either this or `epochs`.
        epochs: number of epochs over an iterable that has a length.
        gradient_accumulation_steps: microbatches per step, for an iterable.
        scheduler: sets the learning rates. None: they stay constant.
        objective: the objective for training and evaluation. None: the token loss.
        max_grad_norm: limit of the total gradient norm. None: the norm is only measured.
        grad_norm_type: p of the p-norm.
        eval_sets: this rank's microbatches of each evaluation set, by name. The number must be equal on all ranks. Each
            set is read once.
        ema: average of the weights. It is also evaluated, as "NAME_ema", unless its config disables that.
        eval_every: steps between evaluations. None: only after the last step.
        early_stopping: when to stop early. None: never.
        callbacks: called in order after each step. Ranks may have different ones.
        checkpointer: saves after the last step, after steps that its `keep_best` selects, and as `save_every` and
            `save_every_s` say.
        save_every: steps between checkpoints.
        save_every_s: seconds between checkpoints, by the clock of rank 0.
        checkpoint_extra: `checkpoint_extra(num_fetched)` returns additional JSON-serializable values for a checkpoint.
            `num_fetched` is the number of batches fetched so far, see [Note: draws] in `monitors`.
        start_step: number of steps already done; see `resume_from`.
        resume_state: the loop's state in the checkpoint that the run resumes from.
        seed: seed of each step's random numbers, together with the step and the data rank, so that a resumed run
            samples the same numbers. None: generators are not seeded.
        on_bad_step: handling of a step whose loss or norm is not finite, or far above those of previous steps.
        verify_every: steps between comparisons of replicas; see [Note: silent corruption] in `verifier`.
        signals: signals that end the loop before the next step, after a save; see [Note: stop signals] in `batches`.
            Each rank enters its own context before `fit`, with the same signal names.
        step_context, extra_times: see `extension.StepContext`. Ranks may have different ones.
        grad_norms_every: steps between measurements of gradient norms by block. None: never.
        run_info: description of the run for observers. None: generated. Ranks may have different ones.
        extensions: additional extensions. Ranks may have different ones.
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

    def __repr__(self) -> str:
        shown = []
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Mapping):
                shown += [f"{each.name}={list(value)}"] if value else []
            elif isinstance(value, int | float | str | BadStepConfig | EarlyStopping):
                shown += [f"{each.name}={value!r}"] if value not in (each.default, BadStepConfig()) else []
            elif value is not None and value != ():
                # Data would fill pages.
                shown.append(f"{each.name}=<{type(value).__name__}>")
        return f"Loop({', '.join(shown)})"

    @property
    def num_steps(self) -> int:
        """Number of the last step.

        Raises:
            ConfigError: neither `steps` nor `epochs` is set, or both are, or `batches` has no length for `epochs`.
        """
        if (self.steps is None) == (self.epochs is None):
            raise ConfigError(f"give either steps or epochs, not steps={self.steps} and epochs={self.epochs}.")
        if self.steps is not None:
            return self.steps
        steps_per_epoch = count_steps_per_epoch(self.batches, self.gradient_accumulation_steps)
        if steps_per_epoch is None:
            raise ConfigError(
                f"epochs={self.epochs} needs batches that have a length, which {type(self.batches).__name__} has not. "
                f"Give steps."
            )
        return steps_per_epoch * int(self.epochs or 0)

    @property
    def eval_loss_names(self) -> list[str]:
        """Names of the losses that an evaluation returns."""
        averaged = self.ema is not None and self.ema.config.evaluate
        return [*self.eval_sets, *(f"{name}{EMA_SUFFIX}" for name in self.eval_sets if averaged)]

    def resume_from(self, manifest: Manifest) -> Loop:
        """Return the loop that resumes from a loaded checkpoint.

        Raises:
            CheckpointError: the loop's state in the manifest has values of wrong types.
        """
        state = decode_values(manifest.extra.get(LOOP_STATE_KEY))
        try:
            check_loop(state or {})
        except ValueError as error:
            raise CheckpointError(
                f"the manifest of step {manifest.step} has values of other types: {LOOP_STATE_KEY}.{error}. Resume "
                "from another checkpoint."
            ) from None
        return replace(self, start_step=manifest.step, resume_state=state)

    def is_eval_due(self, step: int) -> bool:
        """Return whether an evaluation is due after `step` steps."""
        return bool(self.eval_sets) and is_due(step, self.eval_every, self.num_steps)


def is_due(step: int, every: int | None, num_steps: int) -> bool:
    """Return whether something that happens every `every` steps, and after the last step, is due."""
    return step == num_steps or (every is not None and step % every == 0)


def count_steps_per_epoch(batches: Any, gradient_accumulation_steps: int) -> int | None:
    """Return the optimizer steps per epoch. None: `batches` is a function or has no length."""
    try:
        return -(-len(batches) // gradient_accumulation_steps)
    except (TypeError, NotImplementedError):
        return None


def raise_on_all_ranks(
    world: World, error: Exception | None, error_cls: type[MeshwrightError], failure: str
) -> NoReturn:
    """Raise an error of any rank on all ranks. All ranks must know that some rank has one. Collective.

    An unexpected error is raised unchanged, with its traceback, on its own rank; the other ranks raise `error_cls` with
    a message that starts with `failure`, such as "... cannot be drawn".
    """
    if error is None or isinstance(error, MeshwrightError):
        world.raise_first_error(error)
    with suppress(MeshwrightError):
        world.raise_first_error(error_cls(f"{failure}: {type(error).__name__}: {error}"))
    raise error


def run_on_all_ranks(world: World, work: Callable[[], T], error_cls: type[MeshwrightError], failure: str) -> T:
    """Run `work`, and raise its error on all ranks. It must not be collective. See `raise_on_all_ranks`. Collective."""
    results: list[T] = []
    error: Exception | None = None
    try:
        results.append(work())
    except Exception as caught:
        error = caught
    if world.reduce_ints([error is not None])[0]:
        raise_on_all_ranks(world, error, error_cls, failure)
    return results[0]


def validate_across_ranks(loop: Loop, mesh: Mesh) -> tuple[int, bool]:
    """Check that the loop is valid and equal on all ranks. Return the number of the last step, and whether any rank has
    callbacks. Collective.

    Raises:
        ConfigError: the loop is invalid or differs between ranks (on all ranks).
    """
    world = mesh.world
    options = world.run_on_all_ranks(lambda: collect_shared_options(loop))
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, (options, len(loop.callbacks)), group=world.group)
    for name in options:
        values = [rank_options[name] for rank_options, _ in gathered]
        if any(each != values[0] for each in values):
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values[:8]))
            raise ConfigError(f"ranks disagree on {name} of the loop: {listed}. Give all ranks the same.")
    return loop.num_steps, any(count for _, count in gathered)


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
    """Return by name the options that must be equal on all ranks; raise ConfigError if the loop is invalid."""
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
    names, early_stopping, checkpointer = loop.eval_loss_names, loop.early_stopping, loop.checkpointer
    available = ", ".join(names) or "none"
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigError(
            f"eval_sets of the loop has a set {duplicate!r}, which is what averages are called. Rename it."
        )
    if early_stopping is not None and early_stopping.eval_set not in names:
        raise ConfigError(f"early_stopping looks at the set {early_stopping.eval_set!r}; the loop's are: {available}.")
    if early_stopping is not None and loop.eval_every is None:
        raise ConfigError("early_stopping needs evaluations before the end: set eval_every.")
    if checkpointer is not None and checkpointer.keep_best and checkpointer.best_eval_set not in names:
        raise ConfigError(f"keep_best looks at the set {checkpointer.best_eval_set!r}; the loop's are: {available}.")
