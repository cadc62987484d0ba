"""Checks and errors that all ranks of a loop share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from ...base.errors import ConfigError, MeshwrightError
from ...mesh.mesh import Mesh
from ...mesh.world import World
from .batches import steps_in_a_pass
from .options import Loop

T = TypeVar("T")


def raise_on_all(world: World, error: Exception | None, kind: type[MeshwrightError], what: str) -> NoReturn:
    """Raise an error that some rank has met, where all know that some has. Collective.

    Args:
        error: of this rank. An unexpected one is raised as it is, with its own traceback.
        kind, what: class and beginning of the error that the other ranks raise then: "... cannot be drawn".
    """
    if error is None or isinstance(error, MeshwrightError):
        world.raise_any(error)
    with suppress(MeshwrightError):
        world.raise_any(kind(f"{what}: {type(error).__name__}: {error}"))
    raise error


def done_on_all(world: World, work: Callable[[], T], kind: type[MeshwrightError], what: str) -> T:
    """Run `work`, which must not be collective and may fail in any way; see `raise_on_all`. Collective."""
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(work())
    except Exception as caught:
        error = caught
    if world.reduce_ints([error is not None])[0]:
        raise_on_all(world, error, kind, what)
    return found[0]


def agree_on(loop: Loop, mesh: Mesh) -> tuple[int, bool]:
    """Refuse a loop that cannot run, or that differs between ranks. Collective.

    Returns:
        The number of the last step, and whether any rank has callbacks.

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
    return loop.num_steps, any(count for _, count in found)


def told_of(loop: Loop) -> dict[str, Any]:
    """Return by name what must be equal on all ranks.

    Raises:
        ConfigError: the loop cannot run.
    """
    steps, checkpointer = loop.num_steps, loop.checkpointer
    least = dict.fromkeys(
        ("steps", "epochs", "accumulate", "eval_every", "save_every", "norms_every", "verify_every"), 1
    )
    for name, lowest in {**least, "start": 0}.items():
        value = getattr(loop, name)
        if value is not None and (type(value) is not int or value < lowest):
            raise ConfigError(f"{name} of the loop must be an int, at least {lowest}, not {value!r}.")
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
    equal = ("start", "accumulate", "max_grad_norm", "grad_norm_type", "eval_every", "early_stopping", "save_every")
    more = ("save_after_s", "norms_every", "seed", "on_bad_step", "verify_every")
    return {
        "steps": steps,
        "the kind of batches": "a function" if callable(loop.batches) else "an iterable",
        "the number of steps in a pass": steps_in_a_pass(loop.batches, loop.accumulate),
        "scheduler": loop.scheduler is not None,
        "the names of held_out": list(loop.held_out),
        "ema": loop.ema and loop.ema.config,
        "checkpointer": checkpointer and (checkpointer.keep_best, checkpointer.best_of),
        "signals": loop.signals and loop.signals.names,
        **{name: getattr(loop, name) for name in (*equal, *more)},
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
