"""A source that is read while training, without a cache.

[Note: blocks] Records are read in blocks of `RECORDS`. The documents of a block become rows by themselves, which come
in a random order of (seed, block). So what a run remembers of a stream is how many rows of it it has used, in which
block that is, and where the reader stood before that block; going on reads one block again. Every rank reads the whole
stream and takes its share of the rows, so that what is remembered does not depend on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...base.errors import CheckpointError, DataError
from ..documents import Documents
from ..reading.records import Record
from .rows import Rows
from .shuffle import shuffled

RECORDS = 1024
"""Of a block; part of the order that a run goes on in."""


@dataclass(frozen=True)
class _Block:
    """Some rows of a stream, in groups that belong together.

    Attributes:
        first: how many groups come before, in all epochs.
        order: the groups of `rows` in the order in which they are used.
    """

    first: int
    rows: Rows
    order: np.ndarray
    state: dict[str, Any]

    @property
    def stop(self) -> int:
        return self.first + len(self.order)


class Stream:
    """The rows of a source, forwards; see [Note: blocks].

    Attributes:
        place: of the source, for errors.
        group: so many rows belong together.
    """

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
        """Nothing is opened yet.

        Args:
            open_loader: gives a loader of lists of so many records, which has state; see `record_loader.loader_of`.
            encode: documents of records; None where none is left.
            make_rows: of the documents of a block.
            records: of a block.
        """
        self.place, self.group = place, group
        self._open_loader, self._encode, self._make_rows, self._records = open_loader, encode, make_rows, records
        self._seed = 0
        self._loader: Any = None
        self._iterator: Iterator[list[Record]] = iter(())
        self._number = self._stop = self._in_epoch = 0
        self._blocks: list[_Block] = []

    def begin(self, seed: int, state: dict[str, Any] | None = None) -> None:
        """Begin to read, at the beginning or where the stream was that has told its state.

        Raises:
            DataError: the source cannot be opened.
            CheckpointError: the state is none of this source.
        """
        self._seed = seed
        self._loader = self._open_loader(self._records)
        self._blocks = []
        self._number = self._stop = self._in_epoch = 0
        if state is not None:
            try:
                self._number, self._stop, self._in_epoch = (int(state[key]) for key in ("block", "first", "in_epoch"))
                self._loader.load_state_dict(state["reader"])
                # It takes the state now, and asserts what is in it.
                self._iterator = iter(self._loader)
            except (KeyError, TypeError, ValueError, AssertionError, OverflowError) as error:
                raise CheckpointError(
                    f"the checkpoint does not tell where it was in {self.place!r}, which is read while training: "
                    f"{type(error).__name__}: {error}. Was it of another source? Start anew, with resume=never."
                ) from error
        else:
            self._iterator = iter(self._loader)

    def take(self, start: int, stop: int) -> Iterator[tuple[Rows, np.ndarray]]:
        """The groups [start, stop), in order: rows, and which groups of them. Earlier ones cannot be had any more.

        Raises:
            DataError: the source cannot be read, or holds nothing.
        """
        self._blocks = [block for block in self._blocks if block.stop > start]
        for block in self._until(start, stop):
            chosen = slice(max(start - block.first, 0), min(stop, block.stop) - block.first)
            yield block.rows, block.order[chosen]

    def state(self, at: int) -> dict[str, Any]:
        """What `begin` needs to go on after so many groups, which may not be before the last `take`; of JSON."""
        block = next((block for block in self._blocks if block.first <= at < block.stop), None)
        return self._state() if block is None else block.state

    def _state(self) -> dict[str, Any]:
        """Before the block that comes next."""
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
        """The next block; None where it holds no row, or an epoch has ended."""
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
