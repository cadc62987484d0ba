"""This rank's actions for the microbatches of a step, and these microbatches: cut into smaller ones, as many on all
ranks. What is trained on is not changed, and no token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.plugin import IGNORED_LABEL, Batch, BatchError, ConfigError

from ..config import PipelineConfig, number_of_microbatches, schedule_of
from ..schedule.order import Action, Exchange, Kind, Schedule, with_communication


class Orders:
    """The schedule that the options ask for, seen from one rank; each number of microbatches is worked out once."""

    def __init__(self, config: PipelineConfig, *, stages: int, ranks: int, rank: int) -> None:
        self._config, self._stages, self._ranks, self._rank = config, stages, ranks, rank
        self._known: dict[tuple[int, bool], tuple[Action | Exchange, ...]] = {}
        # What does not depend on the number of microbatches, with some number that the schedule takes.
        sequences = config.run_size or config.pp_microbatch_size
        schedule = self.schedule(number_of_microbatches(config, sequences=sequences))
        self.placement, self.here, self.splits = schedule.placement, schedule.stages_of(rank), schedule.splits

    def run_length(self, microbatches: int) -> int:
        """Microbatches of one run of the schedule, where a step has so many of `pp_microbatch_size` sequences."""
        return number_of_microbatches(self._config, sequences=microbatches * self._config.pp_microbatch_size)

    def actions(self, microbatches: int, *, train: bool) -> tuple[Action | Exchange, ...]:
        """What this rank does in one run of so many, with its exchanges, in order; without `train`, forwards alone."""
        if (microbatches, train) not in self._known:
            schedule = self.schedule(microbatches)
            if not train:
                forwards = tuple(tuple(a for a in order if a.kind is Kind.FORWARD) for order in schedule.orders)
                schedule = replace(schedule, orders=forwards)
            self._known[microbatches, train] = with_communication(schedule)[self._rank]
        return self._known[microbatches, train]

    def schedule(self, microbatches: int) -> Schedule:
        return schedule_of(self._config, ranks=self._ranks, stages=self._stages, microbatches=microbatches)


class Idle(dict[str, Tensor]):
    """A microbatch that fills up a run of the schedule, and counts for nothing: all its labels are masked."""


def check_sizes(microbatches: Sequence[Batch], config: PipelineConfig) -> None:
    """Refuse microbatches of this rank that do not divide as the options say; no collective."""
    size = config.pp_microbatch_size
    for batch in microbatches:
        count, length = batch["input_ids"].shape
        if count % size:
            raise BatchError(
                f"a microbatch of {count} sequences does not divide into pipeline microbatches of "
                f"pp_microbatch_size={size}. Use a multiple of it, or another pp_microbatch_size."
            )
        if config.pp_seq_len not in (None, length):
            raise BatchError(
                f"sequences of {length} tokens, but pp_seq_len={config.pp_seq_len}. Make them equal, or leave "
                f"pp_seq_len out."
            )
    try:
        number_of_microbatches(config, sequences=sum(batch["input_ids"].shape[0] for batch in microbatches))
    except ConfigError as error:
        raise BatchError(str(error)) from None


def cut_batch(batch: Batch, size: int) -> list[Batch]:
    """Pieces of `size` sequences; tensors that do not have one row for each sequence go whole into each."""
    count = batch["input_ids"].shape[0]
    return [
        {
            name: tensor[start : start + size] if tensor.shape[:1] == (count,) else tensor
            for name, tensor in batch.items()
        }
        for start in range(0, count, size)
    ]


def filled_up(pieces: Sequence[Batch], count: int) -> list[Batch]:
    """The pieces, and idle ones behind them up to `count`."""
    idle = Idle(pieces[0], labels=torch.full_like(pieces[0]["labels"], IGNORED_LABEL))
    return [*pieces, *[idle] * (count - len(pieces))]


def converted(pieces: Sequence[Batch], convert: Callable[[Batch], Batch]) -> list[Batch]:
    return [Idle(convert(piece)) if isinstance(piece, Idle) else convert(piece) for piece in pieces]
