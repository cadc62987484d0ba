"""Actions of this rank in a step, and its pipeline microbatches.

Micro-batches are split into smaller ones and padded to an equal number on all ranks. No token is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.plugin import IGNORE_INDEX, Batch, BatchError, ConfigError

from ..config import PipelineConfig, compute_num_microbatches, resolve_schedule
from ..schedule.actions import Action, ActionKind, P2PBatch, Schedule, add_communication


class RankSchedule:
    """Schedule of the options for one rank. Actions are cached by number of microbatches."""

    def __init__(self, config: PipelineConfig, *, num_stages: int, pp_size: int, pp_rank: int) -> None:
        self._config, self._num_stages, self._pp_size, self._pp_rank = config, num_stages, pp_size, pp_rank
        self._actions_cache: dict[tuple[int, bool], tuple[Action | P2PBatch, ...]] = {}
        # These values do not depend on the number of microbatches, so any number that the schedule supports will do.
        sequences = config.sequences_per_run or config.pp_microbatch_size
        schedule = self.build_schedule(compute_num_microbatches(config, num_sequences=sequences))
        self.placement = schedule.placement
        self.local_stages = schedule.stages_on_rank(pp_rank)
        self.splits_backward = schedule.splits_backward

    def microbatches_per_run(self, num_microbatches: int) -> int:
        """Return the number of microbatches of one run of the schedule, for a step of `num_microbatches`."""
        return compute_num_microbatches(self._config, num_sequences=num_microbatches * self._config.pp_microbatch_size)

    def actions(self, num_microbatches: int, *, is_training: bool) -> tuple[Action | P2PBatch, ...]:
        """Return this rank's actions and exchanges in a run of `num_microbatches`, in order.

        Without `is_training`, forwards only.
        """
        if (num_microbatches, is_training) not in self._actions_cache:
            schedule = self.build_schedule(num_microbatches)
            if not is_training:
                forwards = tuple(
                    tuple(a for a in order if a.kind is ActionKind.FORWARD) for order in schedule.actions_by_rank
                )
                schedule = replace(schedule, actions_by_rank=forwards)
            self._actions_cache[num_microbatches, is_training] = add_communication(schedule)[self._pp_rank]
        return self._actions_cache[num_microbatches, is_training]

    def build_schedule(self, num_microbatches: int) -> Schedule:
        return resolve_schedule(
            self._config, num_ranks=self._pp_size, num_stages=self._num_stages, num_microbatches=num_microbatches
        )


class PaddingMicrobatch(dict[str, Tensor]):
    """Microbatch that pads a run of the schedule. All its labels are masked, so it has no loss."""


def check_batch_sizes(microbatches: Sequence[Batch], config: PipelineConfig) -> None:
    """Raise BatchError if this rank's microbatches cannot be split as the options require; no collective."""
    size = config.pp_microbatch_size
    for batch in microbatches:
        count, length = batch["input_ids"].shape
        if count % size:
            raise BatchError(
                f"a microbatch of {count} sequences does not divide into pipeline microbatches of "
                f"pp_microbatch_size={size}. Use a multiple of it, or change pp_microbatch_size."
            )
        if config.pp_seq_len not in (None, length):
            raise BatchError(
                f"sequences have {length} tokens, but pp_seq_len={config.pp_seq_len}. Make them equal, or leave "
                f"pp_seq_len out."
            )
    try:
        compute_num_microbatches(config, num_sequences=sum(batch["input_ids"].shape[0] for batch in microbatches))
    except ConfigError as error:
        raise BatchError(str(error)) from None


def split_batch(batch: Batch, size: int) -> list[Batch]:
    """Split a batch into microbatches of `size` sequences. Tensors without one row per sequence are not split."""
    count = batch["input_ids"].shape[0]
    return [
        {
            name: tensor[start : start + size] if tensor.shape[:1] == (count,) else tensor
            for name, tensor in batch.items()
        }
        for start in range(0, count, size)
    ]


def pad_microbatches(microbatches: Sequence[Batch], count: int) -> list[Batch]:
    """Append padding microbatches up to `count`."""
    idle = PaddingMicrobatch(microbatches[0], labels=torch.full_like(microbatches[0]["labels"], IGNORE_INDEX))
    return [*microbatches, *[idle] * (count - len(microbatches))]


def map_microbatches(microbatches: Sequence[Batch], convert: Callable[[Batch], Batch]) -> list[Batch]:
    return [
        PaddingMicrobatch(convert(piece)) if isinstance(piece, PaddingMicrobatch) else convert(piece)
        for piece in microbatches
    ]
