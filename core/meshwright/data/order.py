"""Which sequences a step trains on, on every rank, without any state to save.

[Note: the global stream] One random order of all sequences per epoch, of (seed, epoch), one after the other. Step s
takes batch_size sequences from position s x batch_size. So a run resumes from its step alone, and the global batch does
not depend on how many ranks share it. A run that goes on with another batch size, or in another order, has an origin: a
step, and the position at which it began.

[Note: versions of the order] A run goes on in the order in which it began, so its checkpoints tell the version. 1: each
epoch is a drawn permutation, which every rank holds. 2: each place is computed by itself, see `shuffle`.

Shapes: B = micro_batch_size, S = sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..base.errors import ConfigError
from ..strategy.contract import IGNORED_LABEL
from .packing import PackedSequences
from .shuffle import shuffled

if TYPE_CHECKING:
    from ..strategy.contract import Batch


ORDER_VERSION = 2
"""Of new runs; see [Note: versions of the order]."""


class DataOrder:
    """The order in which a run reads its sequences; see [Note: the global stream]."""

    def __init__(
        self,
        num_sequences: int,
        batch_size: int,
        seed: int,
        *,
        version: int = ORDER_VERSION,
        origin: tuple[int, int] = (0, 0),
    ) -> None:
        """Set the order.

        Args:
            num_sequences: in an epoch, at least 1.
            batch_size: sequences in the global batch of a step, at least 1; may exceed `num_sequences`.
            seed: at least 0.
            version: see [Note: versions of the order].
            origin: a step, and the position in the global stream at which it begins; earlier steps have no batch.

        Raises:
            ValueError: an argument is out of range.
        """
        for name, value, least in (
            ("num_sequences", num_sequences, 1),
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self.num_sequences = num_sequences
        self.batch_size = batch_size
        self.seed = seed
        if version not in (1, ORDER_VERSION):
            raise ValueError(f"version must be 1 or {ORDER_VERSION}, not {version}")
        self.version = version
        self._origin = origin
        self._drawn: tuple[int, np.ndarray] | None = None

    def position(self, step: int) -> int:
        """Return where in the global stream `step` begins, counted from 0."""
        first, position = self._origin
        return position + (step - first) * self.batch_size

    def indices(self, step: int) -> np.ndarray:
        """Return the global batch of `step`, counted from 0: (batch_size,), int64.

        Raises:
            ValueError: `step` is before the origin.
        """
        if step < self._origin[0]:
            raise ValueError(f"step must be at least {self._origin[0]}, not {step}")
        position, end = self.position(step), self.position(step + 1)
        pieces = []
        while position < end:
            epoch, offset = divmod(position, self.num_sequences)
            pieces.append(self._part(epoch, offset, min(offset + end - position, self.num_sequences)))
            position += len(pieces[-1])
        return np.concatenate(pieces)

    def _part(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Places [start, stop) of an epoch."""
        if self.version == 1:
            return self._permutation(epoch)[start:stop]
        return shuffled(np.arange(start, stop), self.num_sequences, seed=self.seed, epoch=epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._drawn is None or self._drawn[0] != epoch:
            # numpy keeps the raw numbers of a bit generator over releases, but not what Generator makes of them.
            bits = np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(epoch,)))
            drawn = np.argsort(bits.random_raw(self.num_sequences), kind="stable").astype(np.int64, copy=False)
            self._drawn = (epoch, drawn)
        return self._drawn[1]


def check_batch_size(batch_size: int, *, data_size: int, micro_batch_size: int) -> None:
    """Refuse a global batch that does not divide into equal microbatches on every data rank.

    Args:
        batch_size: sequences in a step.
        data_size: data ranks that share it, at least 1.
        micro_batch_size: sequences in a microbatch, at least 1.

    Raises:
        ConfigError: `batch_size` is no multiple of `data_size` x `micro_batch_size`.
    """
    unit = data_size * micro_batch_size
    if batch_size >= 1 and batch_size % unit == 0:
        return
    below, above = batch_size // unit * unit, (batch_size // unit + 1) * unit
    allowed = f"{below} or {above}" if below > 0 else f"{above}"
    raise ConfigError(
        f"batch_size={batch_size} does not divide into microbatches: {data_size} data ranks x "
        f"micro_batch_size={micro_batch_size} = {unit}. batch_size must be a multiple of {unit}: set it to {allowed}, "
        "or change micro_batch_size."
    )


def step_microbatches(
    sequences: PackedSequences,
    order: DataOrder,
    step: int,
    *,
    data_rank: int,
    data_size: int,
    micro_batch_size: int,
) -> list[Batch]:
    """Read one data rank's share of a step: a contiguous part of the global batch, cut in order.

    Args:
        sequences: as many as `order` was made for.
        order: gives the global batch.
        step: counted from 0.
        data_rank: in [0, data_size).
        data_size: ranks that see different data.
        micro_batch_size: B.

    Returns:
        Microbatches with `input_ids` and `labels`, int64, (B, S), CPU. Labels equal the input: the loss shifts them.

    Raises:
        ConfigError: the batch does not divide; see `check_batch_size`.
        ValueError: another argument is out of range.
    """
    _check_ranks(data_rank, data_size, micro_batch_size)
    check_batch_size(order.batch_size, data_size=data_size, micro_batch_size=micro_batch_size)
    if order.num_sequences != len(sequences):
        raise ValueError(f"the order is of {order.num_sequences} sequences, but there are {len(sequences)}")
    share = order.indices(step).reshape(data_size, -1)[data_rank]
    return [_batch(sequences, rows) for rows in _cut(share, micro_batch_size)]


def eval_microbatches(
    sequences: PackedSequences,
    *,
    count: int | None,
    data_rank: int,
    data_size: int,
    micro_batch_size: int,
) -> list[Batch]:
    """Read one data rank's share of `count` sequences, spread evenly over all.

    Sequence i of the count is sequence i x len(sequences) // count of all, so that no document is over-represented.

    Every rank gets equally many microbatches of equal shape, as collectives need. What is missing is filled with
    repeated sequences whose labels are all masked.

    Args:
        sequences: the held-out ones, at least one.
        count: how many to read; None reads all.
        data_rank: in [0, data_size).
        data_size: ranks that see different data.
        micro_batch_size: B.

    Returns:
        Microbatches as of `step_microbatches`.

    Raises:
        ConfigError: there are fewer sequences than `count`.
        ValueError: another argument is out of range.
    """
    _check_ranks(data_rank, data_size, micro_batch_size)
    if count is not None and count < 1:
        raise ValueError(f"count must be at least 1, or None for all, not {count}")
    if len(sequences) == 0:
        raise ValueError("there are no sequences to evaluate on")
    if count is not None and count > len(sequences):
        raise ConfigError(
            f"{count} sequences are to be evaluated, but the split holds {len(sequences)}. Ask for at most "
            f"{len(sequences)}, leave the number out to use all, or raise eval_fraction."
        )
    count = len(sequences) if count is None else count
    per_step = data_size * micro_batch_size
    padded = -(-count // per_step) * per_step
    share = np.arange(padded).reshape(data_size, -1)[data_rank]
    return [
        _batch(sequences, rows % count * len(sequences) // count, masked=rows >= count)
        for rows in _cut(share, micro_batch_size)
    ]


def _check_ranks(data_rank: int, data_size: int, micro_batch_size: int) -> None:
    for name, value in (("data_size", data_size), ("micro_batch_size", micro_batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if not 0 <= data_rank < data_size:
        raise ValueError(f"data_rank must lie in [0, {data_size}), the data ranks, not {data_rank}")


def _cut(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (rows[start : start + size] for start in range(0, len(rows), size))


def _batch(sequences: PackedSequences, rows: np.ndarray, *, masked: np.ndarray | None = None) -> Batch:
    import torch

    input_ids_BS = sequences.take(rows)
    labels_BS = input_ids_BS.clone()
    if masked is not None:
        labels_BS[torch.from_numpy(masked)] = IGNORED_LABEL
    return {"input_ids": input_ids_BS, "labels": labels_BS}
