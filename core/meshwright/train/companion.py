"""Who goes along with a run: knows beforehand what it takes, and looks at a step while it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ..base.errors import MeshwrightError
from ..strategy.contract import StrategyManager

if TYPE_CHECKING:
    from .run_file import RunConfig


class Companion(Protocol):
    """Made before the process is in a group, by the launching process or by the first rank, and handed to all ranks
    that the former starts; so it can be pickled. A plugin object, too: its hooks are called on the first rank."""

    @property
    def refusal(self) -> MeshwrightError | None:
        """Why the run is not to be done."""

    @property
    def flops_per_token(self) -> float | None:
        """See `Loop.flops_per_token`; of the first rank, which tells the others."""

    @property
    def peak_flops(self) -> float | None:
        """See `StepResult.peak_flops`; likewise."""

    def lines(self) -> Sequence[str]:
        """What is told of the run before it begins."""

    def seeing(self) -> AbstractContextManager[None]:
        """On the first rank, around what makes the model's part and the optimizer."""

    def around(self, manager: StrategyManager) -> Callable[[int], AbstractContextManager[None]]:
        """Of the first rank's steps, counted from 0 in this sitting: what each happens within."""


Accompany: TypeAlias = "Callable[[RunConfig, int], Companion | None]"
"""Of a run on so many ranks. None where the run is wrong: what is wrong is told by who finds it in the run."""
