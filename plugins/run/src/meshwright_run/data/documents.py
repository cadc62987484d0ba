"""Tokenized documents in memory-mapped arrays, which of them are held out from training, and the cache that holds them.

[Note: held out] The side of a document depends only on its text. So a corpus that grows or is reordered keeps its
split, and copies of a document are never on both sides.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from filelock import FileLock

from meshwright.plugin import DataError

EntryT = TypeVar("EntryT")


def get_cache_root(cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    # The XDG specification has relative paths ignored.
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "meshwright"


def load_or_build(directory: Path, *, load: Callable[[Path], EntryT | None], build: Callable[[Path], None]) -> EntryT:
    """Load the entry in `directory`, building it first where it is missing or broken (`load` returns None).

    It is built beside its place under a file lock, and renamed into it. The name of `directory` must change with
    everything that changes the content; `build` fills an empty directory.
    """
    entry = load(directory)
    if entry is not None:
        return entry
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.with_name(directory.name + ".lock")):
            entry = load(directory)  # another process may have built it meanwhile
            if entry is None:
                scratch = directory.with_name(directory.name + ".building")
                for stale in (scratch, directory):
                    if stale.exists():
                        shutil.rmtree(stale)
                scratch.mkdir()
                try:
                    build(scratch)
                    os.replace(scratch, directory)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
                entry = load(directory)
    except OSError as error:
        raise DataError(
            f"cannot keep the tokenized corpus in {directory.parent}: {error}. Set cache_dir to a directory that can "
            "be written and has room."
        ) from error
    if entry is None:
        raise DataError(f"the tokenized corpus in {directory} cannot be read back just after it was written.")
    return entry


_HEADER_BYTES = 128
_CHUNK = 1 << 20

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True)
class TokenizedDocuments:
    """A tokenized source. T tokens in D documents; a pair of preferences is two documents.

    `tokens`: (T,), uint16 or uint32, with special tokens. `ends`: (D,), int64, of each document. `loss_mask`: (T,),
    bool, what is supervised; None: all. `columns`: int64 or float64, (D,) or (T,). `group_size`: so many consecutive
    documents belong together: 2 for preferences, chosen before rejected.
    """

    tokens: np.ndarray
    ends: np.ndarray
    loss_mask: np.ndarray | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    group_size: int = 1

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)

    def to_arrays(self) -> dict[str, np.ndarray]:
        of_tokens = {} if self.loss_mask is None else {"labelled": self.loss_mask}
        columns = {f"column {name}": column for name, column in sorted(self.columns.items())}
        return {"tokens": self.tokens, "ends": self.ends, **of_tokens, **columns}


class NpyWriter:
    """A .npy file of one dimension, written in pieces; its header is written last. Source: numpy.lib.format."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype = path, dtype
        self._count = 0
        self._file = path.open("w+b")
        self._file.write(bytes(_HEADER_BYTES))

    def __len__(self) -> int:
        return self._count

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self.dtype, copy=False).tobytes())
        self._count += len(values)

    def read(self, start: int, stop: int) -> np.ndarray:
        self._seek(start)
        found = np.frombuffer(self._file.read((stop - start) * self.dtype.itemsize), self.dtype)
        self._seek(self._count)
        return found

    def iter_chunks(self, start: int = 0) -> Iterator[tuple[int, np.ndarray]]:
        for position in range(start, self._count, _CHUNK):
            yield position, self.read(position, min(position + _CHUNK, self._count))

    def write_at(self, start: int, values: np.ndarray) -> None:
        self._seek(start)
        self._file.write(values.astype(self.dtype, copy=False).tobytes())
        self._seek(self._count)

    def remove(self, start: int, stop: int) -> np.ndarray:
        taken = self.read(start, stop)
        for position, moved in self.iter_chunks(stop):
            self.write_at(position - (stop - start), moved)
        self._count -= stop - start
        self._seek(self._count)
        self._file.truncate()
        return taken

    def close(self) -> None:
        start = np.lib.format.magic(1, 0)
        text = repr({"descr": self.dtype.str, "fortran_order": False, "shape": (self._count,)}).encode("latin1")
        size = _HEADER_BYTES - len(start) - 2
        with self._file:
            self._file.seek(0)
            self._file.write(start + size.to_bytes(2, "little") + text.ljust(size - 1) + b"\n")

    def discard(self) -> None:
        self._file.close()

    def _seek(self, index: int) -> None:
        self._file.seek(_HEADER_BYTES + index * self.dtype.itemsize)


def _build_paths(directory: Path, split: str, columns: int) -> tuple[Path, Path, Path, list[Path]]:
    """Return the files of one side: tokens, ends, labelled, columns (by number, since a name may hold anything)."""
    tokens, ends, labelled = (directory / f"{split}{part}.npy" for part in ("", ".ends", ".loss_mask"))
    return tokens, ends, labelled, [directory / f"{split}.column{number}.npy" for number in range(columns)]


def open_documents(directory: Path, split: str, columns: tuple[str, ...], group_size: int) -> TokenizedDocuments:
    """Map documents that a `DocumentWriter` has written; raise OSError or ValueError where there are none."""
    tokens, ends, labelled, others = _build_paths(directory, split, len(columns))
    found = {name: _memory_map(path) for name, path in zip(columns, others, strict=True)}
    return TokenizedDocuments(
        _memory_map(tokens), _memory_map(ends), _memory_map(labelled) if labelled.exists() else None, found, group_size
    )


def _memory_map(path: Path) -> np.ndarray:
    # An array without values cannot be mapped everywhere.
    array: np.ndarray = np.load(path, mmap_mode="r" if path.stat().st_size > _HEADER_BYTES else None)
    return array


def mixed_column_error(name: str) -> DataError:
    return DataError(
        f"column {name!r} has one number an example in some, and one for each token in others. Give all the same."
    )


class DocumentWriter:
    """Documents that are written in parts; only the current part is in memory."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, columns: tuple[str, ...]) -> None:
        tokens, ends, self._loss_mask_path, others = _build_paths(directory, split, len(columns))
        self._tokens, self._ends = NpyWriter(tokens, dtype), NpyWriter(ends, np.dtype(np.int64))
        self._loss_mask: NpyWriter | None = None
        self._columns = {name: _ColumnWriter(path) for name, path in zip(columns, others, strict=True)}

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, documents: TokenizedDocuments) -> None:
        """Write documents; raise DataError where a column changes between a value a document and a value a token."""
        if documents.loss_mask is not None and self._loss_mask is None:
            self._loss_mask = NpyWriter(self._loss_mask_path, np.dtype(bool))
            for _, piece in self._tokens.iter_chunks():
                self._loss_mask.append(np.ones(len(piece), bool))
        if self._loss_mask is not None:
            all_of_them = np.ones(len(documents.tokens), bool)
            self._loss_mask.append(all_of_them if documents.loss_mask is None else documents.loss_mask)
        for name, column in self._columns.items():
            column.append(name, documents)
        self._ends.append(documents.ends + len(self._tokens))
        self._tokens.append(documents.tokens)

    def remove(self, first: int, stop: int) -> TokenizedDocuments:
        begin = int(self._ends.read(first - 1, first)[0]) if first else 0
        ends = self._ends.remove(first, stop)
        end = int(ends[-1])
        for place, piece in self._ends.iter_chunks(first):
            self._ends.write_at(place, piece - (end - begin))
        return TokenizedDocuments(
            self._tokens.remove(begin, end),
            ends - begin,
            None if self._loss_mask is None else self._loss_mask.remove(begin, end),
            {
                name: column.file.remove(*((begin, end) if column.is_per_token else (first, stop)))
                for name, column in self._columns.items()
            },
        )

    def close(self) -> None:
        for file in self._files():
            file.close()

    def discard(self) -> None:
        for file in self._files():
            file.discard()

    def _files(self) -> list[NpyWriter]:
        labelled = [] if self._loss_mask is None else [self._loss_mask]
        return [self._tokens, self._ends, *labelled, *(column.file for column in self._columns.values())]


class _ColumnWriter:
    """A column: int64 until the first value that is no whole number, then float64."""

    def __init__(self, path: Path) -> None:
        self.file = NpyWriter(path, np.dtype(np.int64))
        self.is_per_token: bool | None = None

    def append(self, name: str, documents: TokenizedDocuments) -> None:
        values = documents.columns[name]
        if len(documents) != len(documents.tokens):
            of_tokens = len(values) != len(documents)
            if self.is_per_token not in (None, of_tokens):
                raise mixed_column_error(name)
            self.is_per_token = of_tokens
        if values.dtype.kind == "f" and self.file.dtype.kind != "f":
            whole = self.file
            self.file = NpyWriter(whole.path.with_suffix(".real"), np.dtype(np.float64))
            for _, piece in whole.iter_chunks():
                self.file.append(piece)
            whole.discard()
            self.file.path = self.file.path.replace(whole.path)
        self.file.append(values)


# -- held out


def hash_to_unit_interval(document: str) -> float:
    """Spread documents evenly over [0, 1) by their text; see [Note: held out]."""
    digest = hashlib.blake2b(document.encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48


def assign_split(hash_value: float, fraction: float) -> Split:
    """Return the side of a document at a place, where `fraction`, in [0, 1), is held out."""
    return "held_out" if hash_value < fraction else "train"


def is_nearer_boundary(hash_value: float, other_hash_value: float, split: Split) -> bool:
    """Return whether a document is nearer to the other side, which gets the nearest if it is empty, than
    `other_hash_value`."""
    return hash_value < other_hash_value if split == "train" else hash_value > other_hash_value


def iter_training_documents(documents: Iterable[str], fraction: float) -> Iterator[str]:
    """Yield the documents to train on, in about their order and with one of them in memory."""
    if fraction == 0:
        yield from documents
        return
    seen: set[Split] = set()
    # What changes sides if the other one stays empty.
    nearest: str | None = None
    for document in documents:
        place = hash_to_unit_interval(document)
        side = assign_split(place, fraction)
        seen.add(side)
        left: str | None = document
        if len(seen) == 2:
            if nearest is not None and side == "held_out":
                yield nearest
            nearest = None
        elif nearest is None or is_nearer_boundary(place, hash_to_unit_interval(nearest), side):
            left, nearest = nearest, document
        if side == "train" and left is not None:
            yield left
    if nearest is not None and seen == {"held_out"}:
        yield nearest
