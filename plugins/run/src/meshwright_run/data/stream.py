"""A source that is read while training, without a cache.

[Note: blocks] Records are read in blocks of `RECORDS`. The documents of a block become rows by themselves, which come
in a random order of (seed, block). So the state of a stream is how many of its rows were used, in which block that is,
and where the reader was before that block; resuming reads one block again. Every rank reads the whole stream and takes
its share of the rows, so the state does not depend on the mesh.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshwright.plugin import CheckpointError, DataError

from .config import SourceConfig
from .documents import Documents
from .files import extra
from .order import shuffled
from .rows import Rows
from .sources import Record, find_source, open_dataset, place_of_row, read_records, reading_dataset, record_of

RECORDS = 1024
"""Of a block; part of the order."""


@dataclass(frozen=True)
class _Block:
    """Some rows of a stream: `first` groups come before, and `order` is that of the block's groups."""

    first: int
    rows: Rows
    order: np.ndarray
    state: dict[str, Any]

    @property
    def stop(self) -> int:
        return self.first + len(self.order)


class Stream:
    """The rows of a source, forwards; see [Note: blocks]."""

    def __init__(
        self,
        place: str,
        open_loader: Callable[[int], Any],
        encode: Callable[[list[Record]], Documents | None],
        make_rows: Callable[[Documents], Rows],
        *,
        group: int = 1,
        records: int = RECORDS,
    ) -> None:
        """Open nothing yet; `open_loader` makes a loader as `loader_of` does."""
        self.place, self.group = place, group
        self._open_loader, self._encode, self._make_rows, self._records = open_loader, encode, make_rows, records
        self._seed = 0
        self._loader: Any = None
        self._iterator: Iterator[list[Record]] = iter(())
        self._number = self._stop = self._in_epoch = 0
        self._blocks: list[_Block] = []

    def begin(self, seed: int, state: dict[str, Any] | None = None) -> None:
        self._seed = seed
        self._loader = self._open_loader(self._records)
        self._blocks = []
        self._number = self._stop = self._in_epoch = 0
        if state is None:
            self._iterator = iter(self._loader)
            return
        try:
            self._number, self._stop, self._in_epoch = (int(state[key]) for key in ("block", "first", "in_epoch"))
            self._loader.load_state_dict(state["reader"])
            # The loader takes the state now, and asserts what is in it.
            self._iterator = iter(self._loader)
        except (KeyError, TypeError, ValueError, AssertionError, OverflowError) as error:
            raise CheckpointError(
                f"the checkpoint does not tell where it was in {self.place!r}, which is read while training: "
                f"{type(error).__name__}: {error}. Was it of another source? Start anew, with resume=never."
            ) from error

    def take(self, start: int, stop: int) -> Iterator[tuple[Rows, np.ndarray]]:
        """Yield the groups [start, stop), in order: rows, and which groups of them. Earlier ones are forgotten."""
        self._blocks = [block for block in self._blocks if block.stop > start]
        for block in self._until(start, stop):
            yield block.rows, block.order[max(start - block.first, 0) : min(stop, block.stop) - block.first]

    def state(self, at: int) -> dict[str, Any]:
        """Return what `begin` needs to resume after `at` groups, not before the last `take`; of JSON."""
        block = next((block for block in self._blocks if block.first <= at < block.stop), None)
        return self._state() if block is None else block.state

    def _state(self) -> dict[str, Any]:
        reader = self._loader.state_dict()
        return {"reader": reader, "block": self._number, "first": self._stop, "in_epoch": self._in_epoch}

    def _until(self, start: int, stop: int) -> Iterator[_Block]:
        if start < (self._blocks[0].first if self._blocks else self._stop):
            raise ValueError(f"a stream goes forwards: row {start} of {self.place!r} was read before")
        yield from [block for block in self._blocks if block.first < stop]
        while self._stop < stop:
            block = self._next()
            if block is not None and block.stop > start:
                self._blocks.append(block)
                yield block

    def _next(self) -> _Block | None:
        """Read the next block; None where it holds no row, or an epoch has ended."""
        state = self._state()
        records = next(self._iterator, None)
        if records is None:
            if not self._in_epoch:
                raise DataError(
                    f"{self.place!r} is empty: it holds no example that is short enough, with something to be learnt "
                    f"in its first seq_len tokens. Set data.seq_len to more, or name another source."
                )
            self._in_epoch = 0
            self._iterator = iter(self._loader)
            return None
        documents = self._encode(records)
        number, self._number = self._number, self._number + 1
        rows = None if documents is None else self._make_rows(documents)
        count = 0 if rows is None else len(rows) // self.group
        if rows is None or not count:
            return None
        order = shuffled(np.arange(count), count, seed=self._seed, epoch=number, of="block")
        block = _Block(self._stop, rows, order, state)
        self._stop += count
        self._in_epoch += count
        return block


def loader_of(config: SourceConfig, records: int) -> Any:
    import torch
    from torch.utils.data import IterableDataset

    with warnings.catch_warnings():
        # Of torch, about what torchdata still calls when it is imported.
        warnings.simplefilter("ignore")
        loaders = extra("torchdata.stateful_dataloader", "streaming: true")

    reader = _FileRecords if config.dataset is None else _DatasetRecords
    # The loader asks for this base class, which would make the module import torch.
    dataset = type("Records", (reader, IterableDataset), {})(config)
    # The loader draws a number whenever it begins, which must not be one of the run's.
    own = torch.Generator()
    return loaders.StatefulDataLoader(dataset, batch_size=records, collate_fn=list, num_workers=0, generator=own)


class _FileRecords:
    def __init__(self, config: SourceConfig) -> None:
        self._found = find_source(config)
        self._file = self._record = 0

    def __iter__(self) -> Iterator[Record]:
        while self._file < len(self._found.files):
            one = replace(self._found, files=self._found.files[self._file : self._file + 1])
            # A file that has changed holds other data than the run has begun with.
            one.check_unchanged()
            for record in read_records(one, self._record):
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
        with reading_dataset(self._config):
            for value in self._dataset:
                self._row += 1
                yield record_of(value, place_of_row(self._config, self._row - 1), self._config)
        # A dataset that was resumed from a state would begin there again.
        self._row, self._dataset = 0, open_dataset(self._config, streaming=True)

    def state_dict(self) -> dict[str, Any]:
        # Before its first row, the dataset has none.
        return {"row": self._row, "dataset": self._dataset.state_dict() if self._row else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._row = state["row"]
        if state["dataset"] is not None:
            self._dataset.load_state_dict(state["dataset"])
