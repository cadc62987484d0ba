"""The microbatches of each step, on each rank.

[Note: rows of one length] Rows that are padded have the length of the longest one beside them. So those of a step are
sorted by length before they are divided, the longest first, and the microbatch of one number is as long on all data
ranks, which wait for each other. It is the global batch that does not depend on the mesh, not which rows are together.

Shapes: B = micro_batch_size, S = sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.errors import CheckpointError, ConfigError
from ...base.types import IGNORED_LABEL
from .mixture import Mixture
from .order import ORDER_VERSION, DataOrder, check_batch_size
from .rows import JoinedRows, Rows
from .shuffle import shuffled
from .stream import Stream

if TYPE_CHECKING:
    from ...base.types import Batch


@dataclass(frozen=True)
class Place:
    """Which part of a global batch a rank has, and in what shapes.

    Attributes:
        data_rank: in [0, data_size).
        data_size: ranks that see different data.
        micro_batch_size: B, rows of a microbatch.
        multiple: of which lengths are to be multiples, where rows are padded. If `seq_len` is none, all have that.
        one_shape: all microbatches of a step have one length, as stages of a pipeline need it.
    """

    data_rank: int
    data_size: int
    micro_batch_size: int
    multiple: int = 1
    one_shape: bool = False

    def __post_init__(self) -> None:
        for name, value in (("data_size", self.data_size), ("micro_batch_size", self.micro_batch_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.data_rank < self.data_size:
            raise ValueError(f"data_rank must lie in [0, {self.data_size}), the data ranks, not {self.data_rank}")


class Feed:
    """The rows that a run trains on, step by step.

    A step depends on no other, but for sources that are read while training: where there is one, steps come in order,
    and a run that goes on begins with `load_state`.
    """

    def __init__(
        self,
        sources: Sequence[Rows | Stream],
        place: Place,
        *,
        batch_size: int,
        seed: int,
        weights: Sequence[float] | None = None,
        version: int = ORDER_VERSION,
        origin: tuple[int, int] = (0, 0),
    ) -> None:
        """Set the order.

        Args:
            sources: at least one.
            place: this rank's.
            batch_size: rows of a step, over all ranks.
            seed: at least 0.
            weights: of each source, for its share of the rows; None: all rows of all sources in one order, or those of
                the one source that is read while training.
            version: see [Note: versions of the order] in `order`.
            origin: a step, and the number of rows that come before it; see [Note: the global stream] in `order`.

        Raises:
            ConfigError: the batch does not divide; see `check_batch_size` and `check_groups`.
            DataError: the sources do not go together, or one cannot be opened.
        """
        check_batch_size(batch_size, data_size=place.data_size, micro_batch_size=place.micro_batch_size)
        self._sources, self._group = tuple(sources), sources[0].group
        check_groups(self._group, batch_size=batch_size, micro_batch_size=place.micro_batch_size)
        self._place, self._seed = place, seed
        self._streams = [each for each in sources if isinstance(each, Stream)]
        at_hand = [each for each in sources if not isinstance(each, Stream)]
        self._rows = JoinedRows(at_hand) if at_hand else None
        if weights is None and self._streams:
            weights = [1.0] * len(sources)
        self._mixture = None if weights is None else Mixture(weights, seed)
        first, rows = origin
        self._order = DataOrder(
            # Of sources that have shares, positions alone are asked for, which hang on no epoch.
            1 if self._rows is None else len(self._rows) // self._group,
            batch_size // self._group,
            seed,
            version=version,
            origin=(first, rows // self._group),
        )
        for stream in self._streams:
            stream.begin(seed)

    def position(self, step: int) -> int:
        """How many rows come before a step, counted from 0."""
        return self._order.position(step) * self._group

    def microbatches(self, step: int) -> list[Batch]:
        """This rank's share of a step, counted from 0.

        Returns:
            Microbatches as `Rows.take` gives them, of B rows.
        """
        return _divided(*self._of_step(step), self._place)

    def shares(self, step: int) -> list[list[Batch]]:
        """The microbatches of all data ranks in a step, as each of them has them; a step of a feed is drawn once."""
        rows, units = self._of_step(step)
        ranks = range(self._place.data_size)
        return [_divided(rows, units, replace(self._place, data_rank=rank)) for rank in ranks]

    def _of_step(self, step: int) -> tuple[Rows, np.ndarray]:
        """The groups of rows of a step."""
        if self._mixture is not None:
            return self._mixed(self._mixture, step)
        if self._rows is None:
            raise ValueError("there are no sources")
        return self._rows, self._order.indices(step)

    def state(self, step: int) -> list[dict[str, Any]] | None:
        """What `load_state` needs to go on with a step, of JSON; the step before, or this one, was drawn last.

        None where no source is read while training.
        """
        if self._mixture is None or not self._streams:
            return None
        before = self._mixture.before(self._order.position(step))
        return [
            source.state(count)
            for source, count in zip(self._sources, before, strict=True)
            if isinstance(source, Stream)
        ]

    def load_state(self, state: Sequence[dict[str, Any]] | None) -> None:
        """Go on where a feed of the same sources was when it told its state.

        Raises:
            CheckpointError: it is of others.
        """
        if len(state or ()) != len(self._streams):
            raise CheckpointError(
                f"{len(self._streams)} sources are read while training, but the checkpoint tells of "
                f"{len(state or ())}. Start anew, with resume=never."
            )
        for stream, own in zip(self._streams, state or (), strict=True):
            stream.begin(self._seed, own)

    def _mixed(self, mixture: Mixture, step: int) -> tuple[Rows, np.ndarray]:
        """Where sources have shares: rows, and which groups of them a step has; each source is in its own epochs."""
        sources, ranks = mixture.places(self._order.position(step), self._order.position(step + 1))
        tables: list[Rows] = []
        units, of_table = np.empty(len(sources), np.int64), np.empty(len(sources), np.int64)
        for number, source in enumerate(self._sources):
            (mine,) = np.nonzero(sources == number)
            if not len(mine):
                continue
            if isinstance(source, Stream):
                found = source.take(int(ranks[mine[0]]), int(ranks[mine[-1]]) + 1)
            else:
                found = iter([(source, self._in_epochs(number, len(source) // self._group, ranks[mine]))])
            for table, chosen in found:
                here, mine = mine[: len(chosen)], mine[len(chosen) :]
                units[here], of_table[here] = chosen, len(tables)
                tables.append(table)
        joined = JoinedRows(tables)
        return joined, units + joined.starts[of_table] // self._group

    def _in_epochs(self, number: int, size: int, ranks: np.ndarray) -> np.ndarray:
        """The groups of a source that stand at some ranks of its epochs, one behind the other."""
        epochs, offsets = np.divmod(ranks, size)
        found = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            now = epochs == epoch
            found[now] = shuffled(offsets[now], size, seed=self._seed, epoch=int(epoch), of=f"source {number}")
        return found


def check_groups(group: int, *, batch_size: int, micro_batch_size: int) -> None:
    """Refuse sizes that would part rows which belong together.

    Raises:
        ConfigError: tells the size.
    """
    for name, size in (("batch_size", batch_size), ("micro_batch_size", micro_batch_size)):
        if size % group:
            raise ConfigError(
                f"{name}={size} counts rows, of which {group} belong together (chosen and rejected): it must be a "
                f"multiple of {group}."
            )


def eval_microbatches(rows: Rows, place: Place, *, count: int | None) -> list[Batch]:
    """Read one data rank's share of `count` rows, spread evenly over all.

    Row i of the count is row i x len(rows) // count of all, so that no document is over-represented.

    Every rank gets equally many microbatches of equal shape, as collectives need. What is missing is filled with
    repeated rows whose labels are all masked.

    Args:
        rows: the held-out ones, at least one.
        place: this rank's.
        count: how many to read; None reads all.

    Raises:
        ConfigError: there are fewer rows than `count`, or it would part rows that belong together.
        ValueError: an argument is out of range.
    """
    if count is not None and count < 1:
        raise ValueError(f"count must be at least 1, or None for all, not {count}")
    if len(rows) == 0:
        raise ValueError("there are no sequences to evaluate on")
    if count is not None and count > len(rows):
        raise ConfigError(
            f"{count} sequences are to be evaluated, but the split holds {len(rows)}. Ask for at most "
            f"{len(rows)}, leave the number out to use all, or raise eval_fraction."
        )
    check_groups(rows.group, batch_size=count or rows.group, micro_batch_size=place.micro_batch_size)
    available, per_step = len(rows) // rows.group, place.data_size * place.micro_batch_size // rows.group
    count = available if count is None else count // rows.group
    padded = -(-count // per_step) * per_step
    numbers = np.arange(padded)
    return _divided(rows, numbers % count * available // count, place, masked=numbers >= count)


def _divided(rows: Rows, units: np.ndarray, place: Place, *, masked: np.ndarray | None = None) -> list[Batch]:
    """This rank's microbatches of the groups of rows that are given; see [Note: rows of one length].

    Args:
        masked: of which the labels are all to be masked; None: none.
    """
    indices = (units[:, None] * rows.group + np.arange(rows.group)).reshape(-1)
    lengths = rows.lengths(indices)
    if lengths is None:
        # As they come.
        shares = np.arange(len(units)).reshape(place.data_size, -1)[place.data_rank]
        parts = shares.reshape(-1, place.micro_batch_size // rows.group)
        widths: Sequence[int] = [rows.seq_len] * len(parts)
    else:
        lengths = lengths.reshape(len(units), rows.group).max(1)
        sorted_ = np.argsort(-lengths, kind="stable").reshape(-1, place.data_size, place.micro_batch_size // rows.group)
        parts = sorted_[:, place.data_rank]
        widths = _widths(lengths[sorted_].reshape(len(parts), -1).max(1), rows.seq_len, place)
    return list(_batches(rows, indices.reshape(len(units), -1), parts, widths, masked))


def _widths(longest: np.ndarray, seq_len: int, place: Place) -> list[int]:
    """The length of each microbatch, given that of its longest row."""
    if seq_len % place.multiple:
        # What cannot be divided is to be told at the first step, and not at one of this length.
        return [seq_len] * len(longest)
    if place.one_shape:
        longest = np.full_like(longest, longest.max())
    unit = max(2, place.multiple)
    return [min(seq_len, int(-(-each // unit)) * unit) for each in longest]


def _batches(
    rows: Rows, indices: np.ndarray, parts: np.ndarray, widths: Sequence[int], masked: np.ndarray | None
) -> Iterator[Batch]:
    for part, width in zip(parts, widths, strict=True):
        batch = dict(rows.take(indices[part].reshape(-1), width))
        if masked is not None and masked[part].any():
            batch["labels"][np.repeat(masked[part], rows.group)] = IGNORED_LABEL
        yield batch
