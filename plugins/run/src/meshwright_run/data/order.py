"""Order of the rows that steps train on, which needs no saved state, and sources that are read during training.

[Note: the global stream] Each epoch is a random permutation of all rows, which depends on (seed, epoch), and epochs
follow each other. Step s takes batch_size rows from position s x batch_size, on any mesh. A run that resumes with
another batch size has an origin: a step and its position.

[Note: shares] A mixture of sources is divided into blocks. Of the first n positions, each source has the number that
the Webster/Sainte-Lague method gives for its weight; with this method no source loses a position when n grows. A block
has the differences, in random order. A position has a source and a rank of the row in the source's own epochs.
Source: Balinski and Young 1982, Fair Representation (divisor methods are monotone in the size of the house).

[Note: blocks] A stream is read in blocks of `RECORDS_PER_BLOCK` records. The documents of each block become rows
separately, in a random order that depends on (seed, block). The state has the number of rows used, the block and the
reader's state before it; on resume, one block is read again. Every rank reads the full stream, so the state does not
depend on the mesh.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from meshwright.plugin import CheckpointError, ConfigError, DataError

from .config import SourceConfig
from .documents import TokenizedDocuments
from .files import import_extra
from .packing import RowDataset
from .sources import (
    Record,
    build_record,
    convert_dataset_errors,
    format_row_location,
    open_dataset,
    read_records,
    resolve_source,
)

ORDER_VERSION = 2
"""Increase it with every change to the order; checkpoints record it."""
MIXTURE_BLOCK_SIZE = 1024
"""Positions per block of a mixture; part of the order."""
_ROUNDS = 8
_MIN_HALF_BITS = 3
"""Minimum size of a half: with fewer bits, too few functions exist for orders of few rows to be equally likely."""


def shuffle_indices(positions: np.ndarray, size: int, *, seed: int, epoch: int, domain: str = "") -> np.ndarray:
    """Return the elements at `positions`, int64, of a random order of [0, size), each on its own; size <= 2^62.

    A keyed bijection: a Feistel network permutes the smallest [0, 4^h) that contains [0, size), and values outside
    [0, size) pass through it again. Arithmetic is unsigned, 64-bit and wraps around, so all machines agree.
    Source: Luby and Rackoff 1988, doi:10.1137/0217022; Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9 (cycle
    walking); Steele et al. 2014, doi:10.1145/2660193.2660195 (the SplitMix64 finalizer, used as round function).
    """
    half = max(_MIN_HALF_BITS, ((size - 1).bit_length() + 1) // 2)
    text = f"{seed} {epoch}{domain and ' '}{domain}"
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = _apply_feistel(np.asarray(positions).astype(np.uint64), half, keys)
    while len(outside := np.flatnonzero(values >= size)):
        values[outside] = _apply_feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _apply_feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_splitmix64(right ^ key) & mask)
    return (left << bits) | right


def _splitmix64(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class DataOrder:
    def __init__(self, num_sequences: int, batch_size: int, seed: int, *, origin: tuple[int, int] = (0, 0)) -> None:
        """Set the order. `origin`: a step and its position in the global stream."""
        bounds = (("num_sequences", num_sequences, 1), ("batch_size", batch_size, 1), ("seed", seed, 0))
        for name, value, least in bounds:
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self.num_sequences, self.batch_size, self.seed = num_sequences, batch_size, seed
        self._origin = origin

    def compute_position(self, step: int) -> int:
        first, position = self._origin
        return position + (step - first) * self.batch_size

    def get_indices(self, step: int) -> np.ndarray:
        """Return the row indices of the global batch of `step`, counted from 0: (batch_size,), int64."""
        if step < self._origin[0]:
            raise ValueError(f"step must be at least {self._origin[0]}, not {step}")
        position, end = self.compute_position(step), self.compute_position(step + 1)
        pieces = []
        while position < end:
            epoch, offset = divmod(position, self.num_sequences)
            offsets = np.arange(offset, min(offset + end - position, self.num_sequences))
            pieces.append(shuffle_indices(offsets, self.num_sequences, seed=self.seed, epoch=epoch))
            position += len(offsets)
        return np.concatenate(pieces)


def check_batch_size(batch_size: int, *, data_size: int, micro_batch_size: int) -> None:
    """Raise ConfigError if the global batch does not divide into equal microbatches on every data rank."""
    unit = data_size * micro_batch_size
    if batch_size >= 1 and batch_size % unit == 0:
        return
    below, above = batch_size // unit * unit, (batch_size // unit + 1) * unit
    allowed = f"{below} or {above}" if below > 0 else f"{above}"
    raise ConfigError(
        f"batch_size={batch_size} does not divide into microbatches: {data_size} data ranks x "
        f"micro_batch_size={micro_batch_size} = {unit}. batch_size must be a multiple of {unit}: set it to {allowed}, "
        "or change micro_batch_size or the number of ranks (nproc)."
    )


class SourceMixture:
    """Source of each position of an endless mixture, and the row in that source; see [Note: shares]."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self._seed = seed
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None

    def assign(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return, for positions [start, stop), the source and the rank of the row in its source; both int64."""
        sources, ranks = [], []
        for number in range(start // MIXTURE_BLOCK_SIZE, -(-stop // MIXTURE_BLOCK_SIZE)):
            first = number * MIXTURE_BLOCK_SIZE
            chosen = slice(max(start - first, 0), min(stop - first, MIXTURE_BLOCK_SIZE))
            _, own, earlier = self._get_block(number)
            sources.append(own[chosen])
            ranks.append(earlier[chosen])
        return np.concatenate(sources), np.concatenate(ranks)

    def count_before(self, position: int) -> list[int]:
        first = position // MIXTURE_BLOCK_SIZE * MIXTURE_BLOCK_SIZE
        counts = self.count_by_source(first)
        _, own, _ = self._get_block(position // MIXTURE_BLOCK_SIZE)
        inside = np.bincount(own[: position - first], minlength=len(counts))
        return [count + int(more) for count, more in zip(counts, inside, strict=True)]

    def count_by_source(self, num_positions: int) -> list[int]:
        """Return how many of the first `num_positions`, which are full blocks, belong to each source."""
        counts = [int(num_positions * share + Fraction(1, 2)) for share in self._shares]
        sources = range(len(counts))
        # Rounding gives a few too many or too few: remove those of lowest priority, or add those of highest.
        while sum(counts) > num_positions:
            counts[min((k for k in sources if counts[k]), key=lambda k: self._priority(k, counts[k] - 1))] -= 1
        while sum(counts) < num_positions:
            counts[max(sources, key=lambda k: self._priority(k, counts[k]))] += 1
        return counts

    def _priority(self, source: int, num_assigned: int) -> tuple[Fraction, int]:
        """Return the priority of a source with `num_assigned` positions for one more; no two are equal."""
        return self._shares[source] / (2 * num_assigned + 1), -source

    def _get_block(self, number: int) -> tuple[int, np.ndarray, np.ndarray]:
        if self._block is None or self._block[0] != number:
            before = self.count_by_source(number * MIXTURE_BLOCK_SIZE)
            after = self.count_by_source((number + 1) * MIXTURE_BLOCK_SIZE)
            own = np.repeat(range(len(before)), np.subtract(after, before))
            own = own[
                shuffle_indices(
                    np.arange(MIXTURE_BLOCK_SIZE), MIXTURE_BLOCK_SIZE, seed=self._seed, epoch=number, domain="sources"
                )
            ]
            earlier = np.empty(MIXTURE_BLOCK_SIZE, np.int64)
            for source, count in enumerate(before):
                mine = np.flatnonzero(own == source)
                earlier[mine] = count + np.arange(len(mine))
            self._block = (number, own, earlier)
        return self._block


# -- sources that are read during training

RECORDS_PER_BLOCK = 1024
"""Records per block of a stream; part of the order."""


@dataclass(frozen=True)
class _StreamBlock:
    """Rows of one block of a stream: `first_group` groups precede it, and `order` is the order of its groups."""

    first_group: int
    rows: RowDataset
    order: np.ndarray
    state: dict[str, Any]

    @property
    def stop_group(self) -> int:
        return self.first_group + len(self.order)


class StreamingSource:
    def __init__(
        self,
        location: str,
        open_loader: Callable[[int], Any],
        encode: Callable[[list[Record]], TokenizedDocuments | None],
        make_rows: Callable[[TokenizedDocuments], RowDataset],
        *,
        group_size: int = 1,
        records_per_block: int = RECORDS_PER_BLOCK,
    ) -> None:
        """Open nothing yet. `open_loader` returns a loader, as `build_record_loader` does."""
        self.location, self.group_size = location, group_size
        self._open_loader = open_loader
        self._encode = encode
        self._make_rows = make_rows
        self._records = records_per_block
        self._seed = 0
        self._loader: Any = None
        self._iterator: Iterator[list[Record]] = iter(())
        self._next_block = self._num_groups = self._groups_in_epoch = 0
        self._blocks: list[_StreamBlock] = []

    def reset(self, seed: int, state: dict[str, Any] | None = None) -> None:
        self._seed = seed
        self._loader = self._open_loader(self._records)
        self._blocks = []
        self._next_block = self._num_groups = self._groups_in_epoch = 0
        if state is None:
            self._iterator = iter(self._loader)
            return
        try:
            self._next_block, self._num_groups, self._groups_in_epoch = (
                int(state[key]) for key in ("block", "first", "in_epoch")
            )
            self._loader.load_state_dict(state["reader"])
            # The loader applies the state here, and validates it with assertions.
            self._iterator = iter(self._loader)
        except (KeyError, TypeError, ValueError, AssertionError, OverflowError) as error:
            raise CheckpointError(
                f"the checkpoint has no valid position in {self.location!r}, which is read during training: "
                f"{type(error).__name__}: {error}. Is it from another source? Start over with resume=never."
            ) from error

    def read_groups(self, start: int, stop: int) -> Iterator[tuple[RowDataset, np.ndarray]]:
        """Yield the groups [start, stop) in order, as rows and indices of their groups. Earlier ones are discarded."""
        self._blocks = [block for block in self._blocks if block.stop_group > start]
        for block in self._iter_blocks(start, stop):
            yield (
                block.rows,
                block.order[max(start - block.first_group, 0) : min(stop, block.stop_group) - block.first_group],
            )

    def state_dict(self, group: int) -> dict[str, Any]:
        """Return the JSON state for `reset` to resume after `group` groups, not before the last `read_groups`."""
        block = next((block for block in self._blocks if block.first_group <= group < block.stop_group), None)
        return self._reader_state() if block is None else block.state

    def _reader_state(self) -> dict[str, Any]:
        reader = self._loader.state_dict()
        return {
            "reader": reader,
            "block": self._next_block,
            "first": self._num_groups,
            "in_epoch": self._groups_in_epoch,
        }

    def _iter_blocks(self, start: int, stop: int) -> Iterator[_StreamBlock]:
        if start < (self._blocks[0].first_group if self._blocks else self._num_groups):
            raise ValueError(f"a stream cannot go back: row {start} of {self.location!r} was already read")
        yield from [block for block in self._blocks if block.first_group < stop]
        while self._num_groups < stop:
            block = self._read_block()
            if block is not None and block.stop_group > start:
                self._blocks.append(block)
                yield block

    def _read_block(self) -> _StreamBlock | None:
        """Read the next block. Returns None if it has no rows, or the epoch has ended."""
        state = self._reader_state()
        records = next(self._iterator, None)
        if records is None:
            if not self._groups_in_epoch:
                raise DataError(
                    f"{self.location!r} is empty: it has no example that is short enough and has supervised tokens "
                    "among its first seq_len tokens. Increase data.seq_len, or name another source."
                )
            self._groups_in_epoch = 0
            self._iterator = iter(self._loader)
            return None
        documents = self._encode(records)
        number, self._next_block = self._next_block, self._next_block + 1
        rows = None if documents is None else self._make_rows(documents)
        count = 0 if rows is None else len(rows) // self.group_size
        if rows is None or not count:
            return None
        order = shuffle_indices(np.arange(count), count, seed=self._seed, epoch=number, domain="block")
        block = _StreamBlock(self._num_groups, rows, order, state)
        self._num_groups += count
        self._groups_in_epoch += count
        return block


def build_record_loader(config: SourceConfig, batch_size: int) -> Any:
    import torch
    from torch.utils.data import IterableDataset

    with warnings.catch_warnings():
        # Importing torchdata makes torch warn.
        warnings.simplefilter("ignore")
        loaders = import_extra("torchdata.stateful_dataloader", "streaming: true")

    reader = _FileRecords if config.dataset is None else _DatasetRecords
    # The loader requires this base class. A class statement in this module would import torch.
    dataset = type("Records", (reader, IterableDataset), {})(config)
    # The loader draws a random number whenever it starts, which must not come from the run's generator.
    own = torch.Generator()
    return loaders.StatefulDataLoader(dataset, batch_size=batch_size, collate_fn=list, num_workers=0, generator=own)


class _FileRecords:
    def __init__(self, config: SourceConfig) -> None:
        self._found = resolve_source(config)
        self._file = self._record = 0

    def __iter__(self) -> Iterator[Record]:
        while self._file < len(self._found.files):
            single_file = replace(self._found, files=self._found.files[self._file : self._file + 1])
            # A changed file does not hold the data that the run started with.
            single_file.check_unchanged()
            for record in read_records(single_file, self._record):
                self._record += 1
                yield record
            self._file, self._record = self._file + 1, 0
        self._file = 0

    def state_dict(self) -> dict[str, Any]:
        return {"file": self._file, "record": self._record}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._file, self._record = state["file"], state["record"]


class _DatasetRecords:
    def __init__(self, config: SourceConfig) -> None:
        self._config, self._row = config, 0
        self._dataset = open_dataset(config, streaming=True)

    def __iter__(self) -> Iterator[Record]:
        with convert_dataset_errors(self._config):
            for value in self._dataset:
                self._row += 1
                yield build_record(value, format_row_location(self._config, self._row - 1), self._config)
        # A dataset that was resumed from a state would start there again.
        self._row, self._dataset = 0, open_dataset(self._config, streaming=True)

    def state_dict(self) -> dict[str, Any]:
        # The dataset has no state before its first row.
        return {"row": self._row, "dataset": self._dataset.state_dict() if self._row else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._row = state["row"]
        if state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
