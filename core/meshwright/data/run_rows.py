"""The rows that a run trains and is evaluated on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .config import DataConfig
from .prepare import PreparedData
from .rows import Rows


@dataclass(frozen=True)
class RunRows:
    """What documents have become.

    Attributes:
        training: of each source.
        weights: of each source, for its share; None: by their numbers of rows.
        held_out: by name of the set.
    """

    training: tuple[Rows, ...]
    weights: tuple[float, ...] | None
    held_out: Mapping[str, Rows]


def lay_out(data: PreparedData, config: DataConfig) -> RunRows:
    """Rows of what was prepared."""
    return RunRows((data.train,), None, {"held_out": data.held_out})
