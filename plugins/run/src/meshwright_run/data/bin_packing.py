"""Decide which documents share a row: best-fit decreasing, by counts of lengths.

[Note: counts of lengths] Longest first, each document goes into the row with the least room that it fits into. Of
documents of one length the next one fits best into the row of the last one, as long as it fits there; so rows of equal
room are filled together, in at most S log S steps, however many documents there are.

Source: Johnson 1974, doi:10.1137/0203025 (best-fit decreasing needs at most 11/9 of the fewest rows, and 4); Krell et
al. 2021, arXiv:2107.02027 (packing by the histogram of lengths). Shapes: D documents, R rows, S room of a row.
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
"""Tokens of a document in which anything is predicted; shorter ones are left out."""
_FORMAT = 1
"""Raised with every change to which documents share a row."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class RowAssignment:
    """Documents of the first row, then of the second, ..., and (R,), int64: where each row ends in them."""

    documents: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)


def pack_best_fit(ends: np.ndarray, seq_len: int) -> RowAssignment:
    """Put documents, given by their ends (D,), into few rows, deterministically; see [Note: counts of lengths]."""
    lengths = _compute_lengths(ends, seq_len)
    counts = np.bincount(lengths, minlength=seq_len + 1)
    kept = int(counts[MIN_DOCUMENT_TOKENS:].sum())
    longest_first = np.argsort(seq_len - lengths, kind="stable")[:kept]
    del lengths
    longest_first = longest_first.astype(np.int32 if len(ends) < 2**31 else np.int64)
    filling = _BinPacker(seq_len)
    for length in np.flatnonzero(counts[MIN_DOCUMENT_TOKENS:])[::-1] + MIN_DOCUMENT_TOKENS:
        filling.add_documents(int(length), int(counts[length]))
    return filling.build_assignment(longest_first)


def load_or_pack(ends: np.ndarray, seq_len: int, root: Path) -> RowAssignment:
    """Return `pack_best_fit` memory-mapped from a directory in `root`, where it is written unless it is there."""
    digest = hashlib.sha256(f"{_FORMAT} {seq_len} {len(ends)} ".encode())
    for start in range(0, len(ends), _CHUNK):
        digest.update(np.ascontiguousarray(ends[start : start + _CHUNK], "<i8").data)

    def build(place: Path) -> None:
        packing = pack_best_fit(ends, seq_len)
        np.save(place / "documents.npy", packing.documents)
        np.save(place / "ends.npy", packing.ends)

    return load_or_build(root / digest.hexdigest()[:32], load=_load_assignment, build=build)


def _load_assignment(directory: Path) -> RowAssignment | None:
    try:
        documents, ends = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("documents", "ends"))
    except (OSError, ValueError):
        return None
    return RowAssignment(documents, ends) if len(ends) == 0 or ends[-1] == len(documents) else None


def _compute_lengths(ends: np.ndarray, seq_len: int) -> np.ndarray:
    """Return lengths, (D,), in the smallest dtype, which is also sorted fastest."""
    lengths = np.empty(len(ends), np.uint16 if seq_len < 2**16 else np.uint32)
    before = 0
    for start in range(0, len(ends), _CHUNK):
        part = ends[start : start + _CHUNK]
        found = np.diff(part, prepend=before)
        if found.max(initial=0) > seq_len:
            document = start + int(found.argmax())
            raise DataError(f"document {document} has {found.max()} tokens, more than seq_len={seq_len}.")
        lengths[start : start + _CHUNK] = found
        before = int(part[-1])
    return lengths


@dataclass
class _BinPacker:
    """Rows while they are filled: `open` by their room, `steps` as (rows, documents of one length for each)."""

    seq_len: int
    num_rows: int = 0
    free_sizes: list[int] = field(default_factory=list)
    open_rows: dict[int, list[np.ndarray]] = field(default_factory=dict)
    fills: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def add_documents(self, length: int, count: int) -> None:
        while count:
            at = bisect_left(self.free_sizes, length)
            room = self.free_sizes[at] if at < len(self.free_sizes) else self.seq_len
            each = room // length
            wanted = -(-count // each)
            if at == len(self.free_sizes):
                found = np.arange(self.num_rows, self.num_rows + wanted)
                self.num_rows += wanted
            else:
                found = self._take_rows(at, wanted)
            whole = min(len(found), count // each)
            self._fill_rows(found[:whole], each, room - each * length)
            count -= whole * each
            if whole < len(found):
                self._fill_rows(found[whole:], count, room - count * length)
                return

    def _take_rows(self, at: int, count: int) -> np.ndarray:
        room, taken, left = self.free_sizes[at], [], count
        pieces = self.open_rows[room]
        while pieces and left:
            piece = pieces.pop()
            taken.append(piece[:left])
            if len(piece) > left:
                pieces.append(piece[left:])
            left -= len(taken[-1])
        if not pieces:
            del self.open_rows[room], self.free_sizes[at]
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
        for rows, each in self.fills:
            per_row[rows] += each
        ends = np.cumsum(per_row)
        free = ends - per_row
        documents = np.empty_like(longest_first)
        start = 0
        for rows, each in self.fills:
            stop = start + len(rows) * each
            documents[free[rows][:, None] + np.arange(each)] = longest_first[start:stop].reshape(-1, each)
            free[rows] += each
            start = stop
        return RowAssignment(documents, ends)
