"""Tokenized documents, one after another in memory-mapped arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..base.errors import DataError
from .arrayfile import HEADER_BYTES, ArrayFile


@dataclass(frozen=True)
class Documents:
    """What a source holds after tokenizing. T tokens in D documents; a pair of preferences is two documents.

    Attributes:
        tokens: (T,), uint16 or uint32, the special tokens of each document among them.
        ends: (D,), int64: where each document ends in `tokens`; the first begins at 0.
        labelled: (T,), bool: tokens to be learnt; None: all. The first of a document is never predicted, whatever it
            says.
        columns: further entries by name, int64 or float64: (D,) for one value a document, or (T,) for one a token.
            Sources of one run may differ in the dtype; `PreparedData.columns` has that of all.
        group: so many consecutive documents belong together: 2 for preferences, chosen before rejected.
    """

    tokens: np.ndarray
    ends: np.ndarray
    labelled: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    group: int = 1

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self) -> np.ndarray:
        """Tokens of each document: (D,), int64."""
        return np.diff(self.ends, prepend=0)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays, by names that no two share."""
        of_tokens = {} if self.labelled is None else {"labelled": self.labelled}
        columns = {f"column {name}": column for name, column in sorted(self.columns.items())}
        return {"tokens": self.tokens, "ends": self.ends, **of_tokens, **columns}


def open_documents(directory: Path, split: str, columns: tuple[str, ...], group: int) -> Documents:
    """Map documents that a `DocumentsFile` has written.

    Raises:
        OSError, ValueError: they are not there, or no arrays.
    """
    paths = _Paths(directory, split)
    labelled = _mapped(paths.labelled) if paths.labelled.exists() else None
    found = {name: _mapped(paths.column(place)) for place, name in enumerate(columns)}
    return Documents(_mapped(paths.tokens), _mapped(paths.ends), labelled, found, group)


def mixed_column(name: str) -> DataError:
    return DataError(
        f"column {name!r} has one number an example in some, and one for each token in others. Give all the same."
    )


def _mapped(path: Path) -> np.ndarray:
    """The array of a file; one without values, which cannot be mapped everywhere, is read."""
    array: np.ndarray = np.load(path, mmap_mode="r" if path.stat().st_size > HEADER_BYTES else None)
    return array


class DocumentsFile:
    """Documents that are written some at a time; in memory are those that are written now."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, columns: tuple[str, ...]) -> None:
        self._paths = _Paths(directory, split)
        self._tokens = ArrayFile(self._paths.tokens, dtype)
        self._ends = ArrayFile(self._paths.ends, np.dtype(np.int64))
        self._labelled: ArrayFile | None = None
        self._columns = {name: _ColumnFile(self._paths.column(place)) for place, name in enumerate(columns)}

    def __len__(self) -> int:
        """Of the documents that have been written."""
        return len(self._ends)

    def append(self, documents: Documents) -> None:
        """Write documents.

        Raises:
            DataError: a column has one value a document here, and had one for each token before, or the reverse.
        """
        if documents.labelled is not None and self._labelled is None:
            self._labelled = ArrayFile(self._paths.labelled, np.dtype(bool))
            for _, piece in self._tokens.pieces():
                self._labelled.append(np.ones(len(piece), bool))
        if self._labelled is not None:
            all_of_them = np.ones(len(documents.tokens), bool)
            self._labelled.append(all_of_them if documents.labelled is None else documents.labelled)
        for name, column in self._columns.items():
            column.append(name, documents)
        self._ends.append(documents.ends + len(self._tokens))
        self._tokens.append(documents.tokens)

    def take_out(self, first: int, stop: int) -> Documents:
        """Remove the documents of [first, stop), and return them."""
        begin = int(self._ends.read(first - 1, first)[0]) if first else 0
        ends = self._ends.take_out(first, stop)
        end = int(ends[-1])
        for place, piece in self._ends.pieces(first):
            self._ends.put(place, piece - (end - begin))
        return Documents(
            self._tokens.take_out(begin, end),
            ends - begin,
            None if self._labelled is None else self._labelled.take_out(begin, end),
            {name: column.take_out((first, stop), (begin, end)) for name, column in self._columns.items()},
        )

    def close(self) -> None:
        """Make the files whole."""
        for file in self._files():
            file.close()

    def leave(self) -> None:
        """Close the files as they are: they are no documents."""
        for file in self._files():
            file.leave()

    def _files(self) -> Iterator[ArrayFile]:
        yield self._tokens
        yield self._ends
        if self._labelled is not None:
            yield self._labelled
        yield from (column.file for column in self._columns.values())


class _ColumnFile:
    """A column: whole numbers as long as all are, and real ones from the first on that is none."""

    def __init__(self, path: Path) -> None:
        self.file = ArrayFile(path, np.dtype(np.int64))
        self._of_tokens: bool | None = None

    def append(self, name: str, documents: Documents) -> None:
        values = documents.columns[name]
        if len(documents) != len(documents.tokens):
            of_tokens = len(values) != len(documents)
            if self._of_tokens not in (None, of_tokens):
                raise mixed_column(name)
            self._of_tokens = of_tokens
        if values.dtype.kind == "f" and self.file.dtype.kind != "f":
            self._become_real()
        self.file.append(values)

    def take_out(self, documents: tuple[int, int], tokens: tuple[int, int]) -> np.ndarray:
        return self.file.take_out(*(tokens if self._of_tokens else documents))

    def _become_real(self) -> None:
        whole = self.file
        real = ArrayFile(whole.path.with_suffix(".real"), np.dtype(np.float64))
        for _, piece in whole.pieces():
            real.append(piece)
        whole.leave()
        real.path.replace(whole.path)
        real.path = whole.path
        self.file = real


@dataclass(frozen=True)
class _Paths:
    """The files of one side of a source."""

    directory: Path
    split: str

    @property
    def tokens(self) -> Path:
        return self.directory / f"{self.split}.npy"

    @property
    def ends(self) -> Path:
        return self.directory / f"{self.split}.ends.npy"

    @property
    def labelled(self) -> Path:
        return self.directory / f"{self.split}.labelled.npy"

    def column(self, place: int) -> Path:
        """By its place: a name may hold anything."""
        return self.directory / f"{self.split}.column{place}.npy"
