"""Early stopping, and the best steps, by the losses of evaluations. No torch in this module.

Losses are equal on all ranks, so that ranks need not agree. Lower is better; what is not finite is never good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...base.errors import ConfigError

if TYPE_CHECKING:
    from ...checkpoint import Checkpointer
    from ...events.step import StepResult

STATE = "loop"
"""Key of what `fit` remembers in `Manifest.extra`."""


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when the loss of a set has not fallen for a while.

    Attributes:
        patience: evaluations in a row without a lower loss after which the run ends.
        min_delta: a loss counts as lower if it is lower by more than this.
    """

    set: str = "held_out"
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if type(self.patience) is not int or self.patience < 1:
            raise ConfigError(f"patience of early_stopping must be an int, at least 1, not {self.patience!r}.")
        if not 0 <= self.min_delta < math.inf:
            raise ConfigError(f"min_delta of early_stopping must be at least 0 and finite, not {self.min_delta!r}.")


class Watch:
    """Looks at the evaluations of a run.

    Args:
        stopping: when to stop; None: never.
        checkpointer: its `keep_best` says how many steps are among the best; None: none.
        state: as of `state()`, from a checkpoint; None: the run begins. What is of another set is ignored.
    """

    def __init__(
        self, stopping: EarlyStopping | None, checkpointer: Checkpointer | None, state: Mapping[str, Any] | None
    ) -> None:
        self._stopping = stopping
        self._count, self._best_of = 0, ""
        if checkpointer is not None and checkpointer.keep_best:
            self._count, self._best_of = checkpointer.keep_best, checkpointer.best_of
        seen = _of_set(state, "early_stopping", "" if stopping is None else stopping.set)
        self._lowest, self._waited = seen.get("lowest"), int(seen.get("waited", 0))
        best = _of_set(state, "best", self._best_of).get("values", ())
        self._best = sorted((float(value), int(step)) for value, step in best)

    @property
    def is_exhausted(self) -> bool:
        """Whether the run is to stop."""
        return self._stopping is not None and self._waited >= self._stopping.patience

    def note(self, result: StepResult) -> bool:
        """Look at the evaluations of a step, if any, and return whether it is among the best so far."""
        found = result.evaluations
        if self._stopping is not None and self._stopping.set in found:
            value = found[self._stopping.set]
            is_lower = math.isfinite(value) and (
                self._lowest is None or value < self._lowest - self._stopping.min_delta
            )
            self._lowest, self._waited = (value, 0) if is_lower else (self._lowest, self._waited + 1)
        if self._best_of not in found or not math.isfinite(found[self._best_of]):
            return False
        self._best = sorted([*self._best, (found[self._best_of], result.step)])[: self._count]
        return any(step == result.step for _, step in self._best)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it; values of JSON."""
        state: dict[str, Any] = {}
        if self._stopping is not None:
            state["early_stopping"] = {"set": self._stopping.set, "lowest": self._lowest, "waited": self._waited}
        if self._count:
            state["best"] = {"set": self._best_of, "values": [list(each) for each in self._best]}
        return state


def _of_set(state: Mapping[str, Any] | None, key: str, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (state or {}).get(key) or {}
    return found if found.get("set") == name else {}
