"""What a tracker is: an observer of a run that a run file names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..base.validation import FrozenModel
from .run import RunInfo


@dataclass(frozen=True)
class TrackerSpec:
    """A tracker that a plugin brings, by the hook `register_trackers`.

    Attributes:
        name: by which a run file asks for it.
        summary: one line.
        config_cls: its options.
        build: makes an observer, an object with implementations of hooks, for the first rank of a run; imports its
            library. If the observer has a method `close`, it is called at the end.
        check: raises ConfigError where the tracker could not be built with these options, such as where its library is
            not installed; called before the ranks start, and imports nothing.
    """

    name: str
    summary: str
    config_cls: type[FrozenModel]
    build: Callable[[Any, RunInfo], Any]
    check: Callable[[Any], None] = lambda config: None
