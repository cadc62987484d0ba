"""The value of an objective for one microbatch, whatever axes divide it.

Shapes: B sequences of a microbatch, S positions of each, K ids at each position.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ModelError
from ..step.axis import Axis
from ..step.objective import Tally
from ..step.token_loss import targets
from ..step.token_statistics import Statistic
from ..step.tokens import Ask, Outputs, Tokens
from ..strategy.contract import Batch
from .row_loss import RowLoss, Run


class Values:
    """Values of objectives of what one model gives.

    Args:
        axes: in the order in which they divide a microbatch.
        row_loss: computes statistics.
        check: refuses logits, see `Axis.check_logits`.
    """

    def __init__(self, axes: Sequence[Axis], row_loss: RowLoss, check: Callable[[Sequence[int], Tensor], None]) -> None:
        self._axes, self._row_loss, self._check = axes, row_loss, check

    def check(self) -> None:
        """Refuse axes that do not say how to put together what they divide.

        Raises:
            ModelError: names the axis.
        """
        for axis in self._axes:
            if axis.divides_batches and type(axis).joined is Axis.joined:
                raise ModelError(
                    f"{type(axis).__name__} divides batches and brings no `joined`: it takes no objective."
                )

    @property
    def sharers(self) -> int:
        """Ranks that compute the same of an objective, and whose losses are added up."""
        return math.prod(axis.sharers for axis in self._axes)

    def of(self, tally: Tally, run: Run, targets_BS: Tensor, whole: Batch) -> tuple[Tensor, Any]:
        """An objective of one microbatch, scalar, and what the model returns.

        Args:
            run: calls the model.
            targets_BS: of this rank's positions.
            whole: what the objective sees, see `Given.whole`.
        """
        columns = dict(whole)
        targets_whole, positions = targets(columns.pop("labels")), columns.pop("position_ids", None)
        if tally.given.on == "outputs":
            outputs = run()
            logits = outputs.logits
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            # Of those of whole sequences, no rank has a part in the sense of `parted`.
            wide = self._joined(wide, of_sequences=wide.dim() == 2)
            return tally(Outputs(targets_whole, wide, positions_BS=positions), columns), outputs

        def value(ask: Ask) -> Tensor:
            def ask_whole(ids_BSK: Tensor, names: Sequence[Statistic]) -> Mapping[str, Tensor]:
                own_BSK = functools.reduce(lambda part, axis: axis.parted(part), self._axes, ids_BSK)
                return {name: self._joined(found) for name, found in ask(own_BSK, names).items()}

            return tally(Tokens(targets_whole, ask_whole, positions_BS=positions, usual=tally.given.usual), columns)

        return self._row_loss.of_tokens(run, targets_BS, value, self._check)

    def _joined(self, part: Tensor, *, of_sequences: bool = False) -> Tensor:
        for axis in reversed(self._axes):
            part = axis.joined_sequences(part) if of_sequences and axis.divides_sequences else axis.joined(part)
        return part
