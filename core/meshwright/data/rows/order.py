"""Which sequences a step trains on, on every rank, without any state to save.

[Note: the global stream] One random order of all sequences per epoch, of (seed, epoch), one after the other. Step s
takes batch_size sequences from position s x batch_size. So a run resumes from its step alone, and the global batch does
not depend on how many ranks share it. A run that goes on with another batch size, or in another order, has an origin: a
step, and the position at which it began.

[Note: versions of the order] A run goes on in the order in which it began, so its checkpoints tell the version. 1: each
epoch is a drawn permutation, which every rank holds. 2: each place is computed by itself, see `shuffle`.
"""

from __future__ import annotations

import numpy as np

from ...base.errors import ConfigError
from .shuffle import shuffled

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
