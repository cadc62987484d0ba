"""Tokenized documents in memory-mapped arrays, their split into training and held-out documents, and their cache.

[Note: held out] The split of a document depends only on its text. So documents keep their split when a corpus grows or
is reordered, and copies of a document are always in the same split.
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
    # The XDG specification says that relative paths are ignored.
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "meshwright"


def load_or_build(directory: Path, *, load: Callable[[Path], EntryT | None], build: Callable[[Path], None]) -> EntryT:
    """Load the entry in `directory`, and build it first if it is missing or broken (`load` returns None).

    It is built in a temporary directory under a file lock, and then renamed. The name of `directory` must change with
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
            f"cannot write the tokenized corpus to {directory.parent}: {error}. Set cache_dir to a writable directory "
            "with enough free space."
        ) from error
    if entry is None:
        raise DataError(f"the tokenized corpus in {directory} cannot be read right after it was written.")
    return entry


_HEADER_BYTES = 128
_CHUNK = 1 << 20

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


@dataclass(frozen=True)
class TokenizedDocuments:
    """A tokenized source: T tokens in D documents. A preference pair is two documents.

    `tokens`: (T,), uint16 or uint32, with special tokens. `ends`: (D,), int64, end of each document. `loss_mask`: (T,),
    bool, supervised tokens; None: all. `columns`: int64 or float64, (D,) or (T,). `group_size`: number of consecutive
    documents that belong together: 2 for preferences, chosen before rejected.
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
        masks = {} if self.loss_mask is None else {"labelled": self.loss_mask}
        columns = {f"column {name}": column for name, column in sorted(self.columns.items())}
        return {"tokens": self.tokens, "ends": self.ends, **masks, **columns}


class NpyWriter:
    """Write a one-dimensional .npy file in parts, with the header last. Source: numpy.lib.format."""

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
        values = np.frombuffer(self._file.read((stop - start) * self.dtype.itemsize), self.dtype)
        self._seek(self._count)
        return values

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
    """Return the files of a split: tokens, ends, loss mask, columns (by number: names may be invalid in a path)."""
    tokens, ends, loss_mask = (directory / f"{split}{part}.npy" for part in ("", ".ends", ".loss_mask"))
    return tokens, ends, loss_mask, [directory / f"{split}.column{number}.npy" for number in range(columns)]


def open_documents(directory: Path, split: str, columns: tuple[str, ...], group_size: int) -> TokenizedDocuments:
    """Memory-map documents written by a `DocumentWriter`. Raises OSError or ValueError if there are none."""
    tokens, ends, labelled, others = _build_paths(directory, split, len(columns))
    found = {name: _memory_map(path) for name, path in zip(columns, others, strict=True)}
    return TokenizedDocuments(
        _memory_map(tokens), _memory_map(ends), _memory_map(labelled) if labelled.exists() else None, found, group_size
    )


def _memory_map(path: Path) -> np.ndarray:
    # Not every platform can map an empty array.
    array: np.ndarray = np.load(path, mmap_mode="r" if path.stat().st_size > _HEADER_BYTES else None)
    return array


def mixed_column_error(name: str) -> DataError:
    return DataError(
        f"column {name!r} has one number per example in some examples, and one per token in others. Use one form only."
    )


class DocumentWriter:
    """Write documents in parts, with only the current part in memory."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype, columns: tuple[str, ...]) -> None:
        tokens, ends, self._loss_mask_path, others = _build_paths(directory, split, len(columns))
        self._tokens, self._ends = NpyWriter(tokens, dtype), NpyWriter(ends, np.dtype(np.int64))
        self._loss_mask: NpyWriter | None = None
        self._columns = {name: _ColumnWriter(path) for name, path in zip(columns, others, strict=True)}

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, documents: TokenizedDocuments) -> None:
        """Write documents. Raises DataError if a column mixes one value per document and one value per token."""
        if documents.loss_mask is not None and self._loss_mask is None:
            self._loss_mask = NpyWriter(self._loss_mask_path, np.dtype(bool))
            for _, piece in self._tokens.iter_chunks():
                self._loss_mask.append(np.ones(len(piece), bool))
        if self._loss_mask is not None:
            full_mask = np.ones(len(documents.tokens), bool)
            self._loss_mask.append(full_mask if documents.loss_mask is None else documents.loss_mask)
        for name, column in self._columns.items():
            column.append(name, documents)
        self._ends.append(documents.ends + len(self._tokens))
        self._tokens.append(documents.tokens)

    def remove(self, first: int, stop: int) -> TokenizedDocuments:
        begin = int(self._ends.read(first - 1, first)[0]) if first else 0
        ends = self._ends.remove(first, stop)
        end = int(ends[-1])
        for index, piece in self._ends.iter_chunks(first):
            self._ends.write_at(index, piece - (end - begin))
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
    """Write a column: as int64 until the first float value, then as float64."""

    def __init__(self, path: Path) -> None:
        self.file = NpyWriter(path, np.dtype(np.int64))
        self.is_per_token: bool | None = None

    def append(self, name: str, documents: TokenizedDocuments) -> None:
        values = documents.columns[name]
        if len(documents) != len(documents.tokens):
            is_per_token = len(values) != len(documents)
            if self.is_per_token not in (None, is_per_token):
                raise mixed_column_error(name)
            self.is_per_token = is_per_token
        if values.dtype.kind == "f" and self.file.dtype.kind != "f":
            integers = self.file
            self.file = NpyWriter(integers.path.with_suffix(".real"), np.dtype(np.float64))
            for _, piece in integers.iter_chunks():
                self.file.append(piece)
            integers.discard()
            self.file.path = self.file.path.replace(integers.path)
        self.file.append(values)


# -- held out


def hash_to_unit_interval(document: str) -> float:
    """Hash the text of a document to [0, 1), evenly distributed; see [Note: held out]."""
    digest = hashlib.blake2b(document.encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48


def assign_split(hash_value: float, fraction: float) -> Split:
    """Return the split of a document with this hash value. `fraction`, in [0, 1), is held out."""
    return "held_out" if hash_value < fraction else "train"


def is_nearer_boundary(hash_value: float, other_hash_value: float, split: Split) -> bool:
    """Return whether a document is nearer to the other split than one with `other_hash_value`; an empty split gets
    the nearest document of the other."""
    return hash_value < other_hash_value if split == "train" else hash_value > other_hash_value


def iter_training_documents(documents: Iterable[str], fraction: float) -> Iterator[str]:
    """Yield the training documents, roughly in order, with few of them in memory."""
    if fraction == 0:
        yield from documents
        return
    seen: set[Split] = set()
    # Changes to the other split if that stays empty.
    nearest: str | None = None
    for document in documents:
        hash_value = hash_to_unit_interval(document)
        split = assign_split(hash_value, fraction)
        seen.add(split)
        left: str | None = document
        if len(seen) == 2:
            if nearest is not None and split == "held_out":
                yield nearest
            nearest = None
        elif nearest is None or is_nearer_boundary(hash_value, hash_to_unit_interval(nearest), split):
            left, nearest = nearest, document
        if split == "train" and left is not None:
            yield left
    if nearest is not None and seen == {"held_out"}:
        yield nearest
