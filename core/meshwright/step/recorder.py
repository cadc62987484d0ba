"""Statistics of tokens by themselves: an objective that notes them.

Shapes: B sequences of a microbatch, S positions of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from ..base.errors import BatchError
from ..strategy.contract import Batch, TokenStatistic
from .tokens import Tokens


class Recorder:
    """An objective that notes statistics of tokens, and is 0.

    Attributes:
        names: of the statistics.
        found: by name, (B, S), for each microbatch, in the order in which they were run.
    """

    name = "token_stats"

    def __init__(self) -> None:
        self.names: Sequence[TokenStatistic] = ()
        self.found: list[dict[str, Tensor]] = []

    def begin(self, names: Sequence[TokenStatistic]) -> None:
        """Note these from now on."""
        self.names, self.found = list(names), []

    def check(self, batch: Batch) -> None:
        """Refuse names that are not known.

        Raises:
            BatchError: names the one.
        """
        known = get_args(TokenStatistic)
        for name in self.names:
            if name not in known:
                raise BatchError(f"there is no {name!r}; there are {', '.join(known)}.")

    def __call__(self, tokens: Tokens, columns: Any) -> Tensor:
        self.found.append({name: getattr(tokens, name).detach() for name in self.names})
        return torch.zeros((), device=tokens.targets.device)
