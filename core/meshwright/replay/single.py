"""One process that does the work of all data ranks in turn, with the random numbers that each of them has drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..base.types import Batch
from ..data import Feed
from ..train.loop.batches import step_seed
from ..train.run.preflight import Plan, masks_padding


class AllShares:
    """What `train.assembly.loop_of` draws with, in one process.

    Args:
        plan: of the run in one process.
        data_size: data ranks of the run.
        seed: of the run.

    Attributes:
        is_joined: whether the microbatches of one number are one, over all ranks: a router loss is over them together.
    """

    def __init__(self, plan: Plan, data_size: int, seed: int) -> None:
        self.is_joined = masks_padding(plan.model_config)
        self._data_size, self._seed = data_size, seed
        self._step, self._number, self._each = 0, 0, 1

    def __call__(self, feed: Feed, step: int) -> Sequence[Batch]:
        shares = feed.shares(step)
        self._step, self._number, self._each = step, 0, len(shares[0])
        if self.is_joined:
            return [
                {name: torch.cat([each[name] for each in same]) for name in same[0]}
                for same in zip(*shares, strict=True)
            ]
        return [batch for share in shares for batch in share]

    @contextmanager
    def drawing(self, model: nn.Module) -> Iterator[None]:
        """Around steps: each share begins with the random numbers of its data rank."""

        def begin(module: nn.Module, *_: Any) -> None:
            # Not where a few tokens are tried.
            if not module.training or self.is_joined:
                return
            share, first = divmod(self._number, self._each)
            if first == 0 and share < self._data_size:
                torch.manual_seed(step_seed(self._seed, self._step, share))
            self._number += 1

        handle = model.register_forward_pre_hook(begin)
        try:
            yield
        finally:
            handle.remove()
