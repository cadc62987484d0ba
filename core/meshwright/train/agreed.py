"""What ranks must have alike of a loop, compared before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..base.errors import ConfigError
from ..mesh.mesh import Mesh
from .batches import steps_in_a_pass
from .loop_options import Loop


@dataclass(frozen=True)
class Agreed:
    """What all ranks know.

    Attributes:
        steps: number of the last one.
        has_callbacks: whether any rank has any.
    """

    steps: int
    has_callbacks: bool


def agree_on(loop: Loop, mesh: Mesh) -> Agreed:
    """Refuse a loop that cannot be run, and ranks that have different ones. Collective.

    Raises:
        ConfigError: on all ranks.
    """
    world = mesh.world
    mine = world.together(lambda: told_of(loop))
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, (mine, len(loop.callbacks)), group=world.group)
    for name in mine:
        values = [told[name] for told, _ in found]
        if any(each != values[0] for each in values):
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values[:8]))
            raise ConfigError(f"ranks disagree on {name} of the loop: {listed}. Give all ranks the same.")
    return Agreed(loop.num_steps, any(count for _, count in found))


def told_of(loop: Loop) -> dict[str, Any]:
    """What is to be equal, by name.

    Raises:
        ConfigError: the loop cannot be run.
    """
    steps, checkpointer = loop.num_steps, loop.checkpointer
    for name, value, least in (
        ("steps", loop.steps, 1),
        ("epochs", loop.epochs, 1),
        ("accumulate", loop.accumulate, 1),
        ("eval_every", loop.eval_every, 1),
        ("save_every", loop.save_every, 1),
        ("norms_every", loop.norms_every, 1),
        ("verify_every", loop.verify_every, 1),
        ("start", loop.start, 0),
    ):
        if value is not None and (type(value) is not int or value < least):
            raise ConfigError(f"{name} of the loop must be an int, at least {least}, not {value!r}.")
    if loop.start > steps:
        raise ConfigError(f"the loop is to start after step {loop.start}, but has {steps} steps. Raise steps.")
    if not isinstance(loop.held_out, Mapping):
        raise ConfigError(
            f"held_out of the loop must map names to microbatches, such as {{'held_out': batches}}, not "
            f"{type(loop.held_out).__name__}."
        )
    if callable(loop.batches) and loop.accumulate != 1:
        raise ConfigError("accumulate is for batches that are iterable; a function gives all microbatches of a step.")
    _check_saving(loop)
    _check_sets(loop)
    return {
        "start": loop.start,
        "steps": steps,
        "accumulate": loop.accumulate,
        "the kind of batches": "a function" if callable(loop.batches) else "an iterable",
        "the number of steps in a pass": steps_in_a_pass(loop.batches, loop.accumulate),
        "scheduler": loop.scheduler is not None,
        "max_grad_norm": loop.max_grad_norm,
        "grad_norm_type": loop.grad_norm_type,
        "the names of held_out": list(loop.held_out),
        "ema": loop.ema and loop.ema.config,
        "eval_every": loop.eval_every,
        "early_stopping": loop.early_stopping,
        "checkpointer": checkpointer and (checkpointer.keep_best, checkpointer.best_of),
        "save_every": loop.save_every,
        "save_after_s": loop.save_after_s,
        "norms_every": loop.norms_every,
        "seed": loop.seed,
        "on_bad_step": loop.on_bad_step,
        "verify_every": loop.verify_every,
        "signals": loop.signals and loop.signals.names,
    }


def _check_saving(loop: Loop) -> None:
    after = loop.save_after_s
    if loop.checkpointer is None and loop.on_bad_step.do == "rewind":
        raise ConfigError("on_bad_step=rewind needs a checkpointer to go back with: give the loop one, or set skip.")
    if loop.checkpointer is None and (loop.save_every is not None or after is not None):
        raise ConfigError("save_every and save_after_s need a checkpointer: give the loop one, or leave them out.")
    if after is not None and not after > 0:
        raise ConfigError(f"save_after_s must be above 0, in seconds, not {after!r}.")


def _check_sets(loop: Loop) -> None:
    """Sets that are looked at must be there, and be evaluated before the end."""
    names = loop.evaluated_sets
    known = ", ".join(names) or "none"
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"held_out of the loop has a set {twice!r}, which is what averages are called. Rename it.")
    stopping, checkpointer = loop.early_stopping, loop.checkpointer
    if stopping is not None:
        if stopping.set not in names:
            raise ConfigError(f"early_stopping looks at the set {stopping.set!r}; the loop's are: {known}.")
        if loop.eval_every is None:
            raise ConfigError("early_stopping needs evaluations before the end: set eval_every.")
    if checkpointer is not None and checkpointer.keep_best and checkpointer.best_of not in names:
        raise ConfigError(f"keep_best looks at the set {checkpointer.best_of!r}; the loop's are: {known}.")
