"""Errors of what a user has given to a loop, which some ranks meet alone: all ranks end with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from ..base.errors import MeshwrightError
from ..mesh.world import World

T = TypeVar("T")


def raise_on_all(world: World, error: Exception | None, kind: type[MeshwrightError], what: str) -> NoReturn:
    """Raise what some rank has met, where all know that some has. Collective.

    Args:
        error: of this rank. It raises what it did not expect as it is, with its own traceback.
        kind, what: of the error of the others then: "... cannot be drawn".
    """
    if error is None or isinstance(error, MeshwrightError):
        world.raise_any(error)
    with suppress(MeshwrightError):
        world.raise_any(kind(f"{what}: {type(error).__name__}: {error}"))
    raise error


def done_on_all(world: World, work: Callable[[], T], kind: type[MeshwrightError], what: str) -> T:
    """Run `work`, which must not issue collectives and may fail in any way; see `raise_on_all`. Collective."""
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(work())
    except Exception as caught:
        error = caught
    if world.reduce_ints([error is not None])[0]:
        raise_on_all(world, error, kind, what)
    return found[0]
