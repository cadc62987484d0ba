"""Attention masks by position, in the place of the tensors that transformers makes.

[Note: masks] Transformers describes every mask (causal, sliding, chunked, ...) by a function of a query's and a key's
position, from which it makes a tensor for queries that follow each other. Here the function is kept, and asked for the
positions that this rank has, by transformers' own code. Models only hand the mask on to their attention; one that looks
into it fails, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .positions import Share
from .probe import Observer

MaskFunction = Callable[..., Tensor]


class PositionMask:
    """The mask of some attention layers for one microbatch.

    Args:
        share: of this rank.
        observer: what sees the attention instead, while the model is checked.
        make: transformers' function that makes a tensor for the attention in use; boolean or additive.
        function: of (sequence, head, query position, key position).
        length: positions of a whole sequence.
        part: of them on this rank.
        is_causal: whether it lets a query see its own position and all before, and that is all.
        arguments: for `make`, beside lengths and function.
    """

    def __init__(
        self,
        share: Share,
        observer: Observer | None,
        make: Callable[..., Tensor],
        function: MaskFunction,
        *,
        length: int,
        part: int,
        is_causal: bool,
        arguments: Mapping[str, Any],
    ) -> None:
        self.share, self.observer = share, observer
        self.length, self.part = length, part
        self.is_causal = is_causal
        self._make, self._function, self._arguments = make, function, arguments
        self._made: dict[bool, Tensor] = {}

    def rows(self, *, whole: bool) -> Tensor:
        """Positions of this rank's queries, or of all."""
        device = self._arguments["device"]
        if whole:
            return torch.arange(self.length, device=device)
        return self.share.positions(self.length, device)

    def of(self, rows: Tensor, keys: int | None = None) -> Tensor:
        """For queries at these positions, and the first `keys` keys: (B, 1, rows, keys)."""

        def at_rows(sequence: Any, head: Any, query: Any, key: Any) -> Tensor:
            return self._function(sequence, head, rows[query], key)

        return self._make(
            q_length=rows.shape[0],
            kv_length=keys or self.length,
            q_offset=0,
            kv_offset=0,
            mask_function=at_rows,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **self._arguments,
        )

    def made(self, *, whole: bool) -> Tensor:
        """For this rank's queries, or for all, and all keys; made once."""
        if whole not in self._made:
            self._made[whole] = self.of(self.rows(whole=whole))
        return self._made[whole]
