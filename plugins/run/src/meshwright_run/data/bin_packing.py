"""Decide which documents share a row: best-fit decreasing bin packing on a histogram of lengths.

[Note: counts of lengths] Longest first, each document goes into the row with the least free space that it fits into.
Among documents of equal length, the best row for the next one is the row of the last one, as long as it fits there. So
rows with equal free space are filled together, in at most S log S steps for any number of documents.

Source: Johnson 1974, doi:10.1137/0203025 (best-fit decreasing needs at most 11/9 of the fewest rows, plus 4); Krell et
al. 2021, arXiv:2107.02027 (packing by the histogram of lengths). Shapes: D documents, R rows of S tokens.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshwright.plugin import DataError

from .documents import load_or_build

MIN_DOCUMENT_TOKENS = 2
"""Minimum length of a document. With fewer tokens nothing is predicted, so shorter documents are left out."""
_FORMAT = 1
"""Increase it with every change to which documents share a row."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class RowAssignment:
    """Indices of the documents of the first row, then of the second, ..., and their end in each row, (R,), int64."""

    documents: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)


def pack_best_fit(ends: np.ndarray, seq_len: int) -> RowAssignment:
    """Pack documents, given by their ends (D,), into few rows, deterministically; see [Note: counts of lengths]."""
    lengths = _compute_lengths(ends, seq_len)
    counts = np.bincount(lengths, minlength=seq_len + 1)
    num_kept = int(counts[MIN_DOCUMENT_TOKENS:].sum())
    longest_first = np.argsort(seq_len - lengths, kind="stable")[:num_kept]
    del lengths
    longest_first = longest_first.astype(np.int32 if len(ends) < 2**31 else np.int64)
    packer = _BinPacker(seq_len)
    for length in np.flatnonzero(counts[MIN_DOCUMENT_TOKENS:])[::-1] + MIN_DOCUMENT_TOKENS:
        packer.add_documents(int(length), int(counts[length]))
    return packer.build_assignment(longest_first)


def load_or_pack(ends: np.ndarray, seq_len: int, root: Path) -> RowAssignment:
    """Return the result of `pack_best_fit`, memory-mapped from a directory in `root` that is written if missing."""
    digest = hashlib.sha256(f"{_FORMAT} {seq_len} {len(ends)} ".encode())
    for start in range(0, len(ends), _CHUNK):
        digest.update(np.ascontiguousarray(ends[start : start + _CHUNK], "<i8").data)

    def build(directory: Path) -> None:
        packing = pack_best_fit(ends, seq_len)
        np.save(directory / "documents.npy", packing.documents)
        np.save(directory / "ends.npy", packing.ends)

    return load_or_build(root / digest.hexdigest()[:32], load=_load_assignment, build=build)


def _load_assignment(directory: Path) -> RowAssignment | None:
    try:
        documents, ends = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("documents", "ends"))
    except (OSError, ValueError):
        return None
    return RowAssignment(documents, ends) if len(ends) == 0 or ends[-1] == len(documents) else None


def _compute_lengths(ends: np.ndarray, seq_len: int) -> np.ndarray:
    """Return lengths, (D,), in the smallest dtype, which is also the fastest to sort."""
    lengths = np.empty(len(ends), np.uint16 if seq_len < 2**16 else np.uint32)
    before = 0
    for start in range(0, len(ends), _CHUNK):
        part = ends[start : start + _CHUNK]
        part_lengths = np.diff(part, prepend=before)
        if part_lengths.max(initial=0) > seq_len:
            document = start + int(part_lengths.argmax())
            raise DataError(f"document {document} has {part_lengths.max()} tokens, more than seq_len={seq_len}.")
        lengths[start : start + _CHUNK] = part_lengths
        before = int(part[-1])
    return lengths


@dataclass
class _BinPacker:
    """Rows that are being filled: `open_rows` by free space, `fills` as (rows, documents of one length per row)."""

    seq_len: int
    num_rows: int = 0
    free_sizes: list[int] = field(default_factory=list)
    open_rows: dict[int, list[np.ndarray]] = field(default_factory=dict)
    fills: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def add_documents(self, length: int, count: int) -> None:
        while count:
            index = bisect_left(self.free_sizes, length)
            room = self.free_sizes[index] if index < len(self.free_sizes) else self.seq_len
            per_row = room // length
            num_wanted = -(-count // per_row)
            if index == len(self.free_sizes):
                rows = np.arange(self.num_rows, self.num_rows + num_wanted)
                self.num_rows += num_wanted
            else:
                rows = self._take_rows(index, num_wanted)
            num_full = min(len(rows), count // per_row)
            self._fill_rows(rows[:num_full], per_row, room - per_row * length)
            count -= num_full * per_row
            if num_full < len(rows):
                self._fill_rows(rows[num_full:], count, room - count * length)
                return

    def _take_rows(self, index: int, count: int) -> np.ndarray:
        room, taken, num_left = self.free_sizes[index], [], count
        pieces = self.open_rows[room]
        while pieces and num_left:
            piece = pieces.pop()
            taken.append(piece[:num_left])
            if len(piece) > num_left:
                pieces.append(piece[num_left:])
            num_left -= len(taken[-1])
        if not pieces:
            del self.open_rows[room], self.free_sizes[index]
        return taken[0] if len(taken) == 1 else np.concatenate(taken)

    def _fill_rows(self, rows: np.ndarray, documents_per_row: int, free: int) -> None:
        if not len(rows):
            return
        self.fills.append((rows, documents_per_row))
        if free < MIN_DOCUMENT_TOKENS:
            return
        if free not in self.open_rows:
            insort(self.free_sizes, free)
            self.open_rows[free] = []
        self.open_rows[free].append(rows)

    def build_assignment(self, longest_first: np.ndarray) -> RowAssignment:
        per_row = np.zeros(self.num_rows, np.int64)
        for rows, count in self.fills:
            per_row[rows] += count
        ends = np.cumsum(per_row)
        free = ends - per_row
        documents = np.empty_like(longest_first)
        start = 0
        for rows, count in self.fills:
            stop = start + len(rows) * count
            documents[free[rows][:, None] + np.arange(count)] = longest_first[start:stop].reshape(-1, count)
            free[rows] += count
            start = stop
        return RowAssignment(documents, ends)
