"""The microbatches of a step as a pipeline takes them: cut into its own, smaller ones, equally many on all ranks.

What is trained on is not changed, and no token is dropped. How context parallelism divides sequences is the inner
strategy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.base.errors import BatchError, ConfigError
from meshwright.base.types import IGNORED_LABEL, Batch

from ..config import PipelineConfig, number_of_microbatches


class Idle(dict[str, Tensor]):
    """A microbatch that fills up a run of the schedule, and counts for nothing: all its labels are masked."""


def check_sizes(microbatches: Sequence[Batch], config: PipelineConfig) -> None:
    """Refuse microbatches of this rank that do not divide as the options say; no collective.

    Args:
        microbatches: of the step, tensors of (B, S).

    Raises:
        BatchError: says which size is wrong.
    """
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


def number_of_pieces(microbatches: Sequence[Batch], size: int) -> int:
    """How many pieces of `size` sequences microbatches have that `check_sizes` takes."""
    return sum(batch["input_ids"].shape[0] // size for batch in microbatches)


def cut_batch(batch: Batch, size: int) -> list[Batch]:
    """Pieces of `size` sequences; tensors that do not have one row for each sequence go whole into each.

    Args:
        batch: tensors of (B, S), where B is a multiple of `size`.
    """
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
    """All pieces converted; those that are idle stay so."""
    return [Idle(convert(piece)) if isinstance(piece, Idle) else convert(piece) for piece in pieces]
