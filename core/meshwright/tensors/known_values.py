"""Trials with values of their own, which are computed where nothing else is; see `World.is_planned`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_HAS_VALUES: ContextVar[bool] = ContextVar("has_values", default=False)


@contextmanager
def with_values() -> Iterator[None]:
    """Around what makes its own values and looks at what becomes of them. What other ranks send is not known there."""
    token = _HAS_VALUES.set(True)
    try:
        yield
    finally:
        _HAS_VALUES.reset(token)


def has_values() -> bool:
    """Whether the caller is within `with_values`."""
    return _HAS_VALUES.get()
