"""From documents to rows of tokens, as a model takes them.

There are three kinds: a stream that is cut anywhere, documents that share a row and are isolated, and documents in
rows of their own, with padding behind them.

[Note: isolated] `position_ids` restart at each document of a row, from which transformers finds where one ends; see
[Note: packed documents] in `step.agreement`. The first token of a document is not supervised. Padding at the end counts
as one more document, with masked labels.

[Note: padding without a mask] A causal model sees nothing behind a token, so a mask would only make attention slower.
Statistics of routers are the exception.

Shapes: T tokens in D documents, B rows of length S.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwright.plugin import IGNORE_INDEX, ConfigError, DataError

from .bin_packing import load_or_pack, pack_best_fit
from .config import Packing
from .documents import TokenizedDocuments

if TYPE_CHECKING:
    from meshwright.plugin import Batch

PAD_TOKEN_ID = 0
"""The token of padding; nothing sees it, and any vocabulary has it."""


class RowDataset(ABC):
    """Rows by their numbers, `group` of which belong together; `columns`: dtype, and whether (B, S) or (B,)."""

    seq_len: int
    group_size: int = 1
    column_specs: dict[str, tuple[np.dtype, bool]]

    @abstractmethod
    def __len__(self) -> int:
        """Return how many there are, a multiple of `group`."""

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        """Return the tokens of some rows, without padding: (B,), int64; None where all have `seq_len`."""
        return None

    def read_batch(self, indices: Sequence[int] | np.ndarray, length: int | None = None) -> Batch:
        """Read rows in their order, of `length` (None: `seq_len`): `input_ids` and `labels`, int64, (B, S), CPU, and
        `columns`; `position_ids` where documents share a row, `attention_mask` where padding is to be masked.
        """
        import torch

        rows = np.asarray(indices, dtype=np.int64)
        outside = rows[(rows < 0) | (rows >= len(self))]
        if len(outside):
            raise IndexError(f"row {outside[0]} does not exist; there are {len(self)}, counted from 0")
        found = self._read_arrays(rows, self.seq_len if length is None else length)
        return {name: torch.from_numpy(values) for name, values in found.items()}

    @abstractmethod
    def _read_arrays(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Return what `take` does, as arrays."""


class ConcatChunkedDataset(RowDataset):
    """A stream of tokens, cut into rows of one length; the tail that does not fill one is left out."""

    def __init__(self, documents: TokenizedDocuments, seq_len: int) -> None:
        tokens = documents.tokens
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be one row of integers, not {tokens.dtype} of shape {tokens.shape}")
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, not {seq_len}")
        self.seq_len, self.documents = seq_len, documents
        self.column_specs = _build_column_specs(documents, is_per_row=False)
        self._count = len(tokens) // seq_len

    def __len__(self) -> int:
        return self._count

    def _read_arrays(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        if length != self.seq_len:
            raise ValueError(f"rows of a stream have {self.seq_len} tokens, not {length}")
        documents = self.documents
        input_ids = self._reshape_to_rows(documents.tokens)[rows].astype(np.int64)
        labels = input_ids.copy()
        if documents.loss_mask is not None:
            labels[~self._reshape_to_rows(documents.loss_mask)[rows]] = IGNORE_INDEX
        found = {"input_ids": input_ids, "labels": labels}
        for name, (dtype, _) in self.column_specs.items():
            column = documents.columns[name]
            if len(column) == len(documents.tokens):
                found[name] = self._reshape_to_rows(column)[rows].astype(dtype)
            else:
                places = rows[:, None] * self.seq_len + np.arange(self.seq_len)
                found[name] = column[np.searchsorted(documents.ends, places, side="right")].astype(dtype)
        return found

    def _reshape_to_rows(self, stream: np.ndarray) -> np.ndarray:
        return stream[: self._count * self.seq_len].reshape(self._count, self.seq_len)


class PackedDataset(RowDataset):
    """Several documents in a row, complete and isolated; see [Note: isolated]."""

    def __init__(self, documents: TokenizedDocuments, seq_len: int, *, cache: Path | None = None) -> None:
        self.seq_len = seq_len
        self.column_specs = _build_column_specs(documents, is_per_row=False)
        self._documents = documents
        ends = documents.ends
        self._packing = pack_best_fit(ends, seq_len) if cache is None else load_or_pack(ends, seq_len, cache)

    def __len__(self) -> int:
        return len(self._packing)

    def _read_arrays(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        if length != self.seq_len:
            raise ValueError(f"packed rows have {self.seq_len} tokens, not {length}")
        starts, stops = _get_bounds(self._packing.ends, rows)
        held = stops - starts
        members = self._packing.documents[_concat_ranges(starts, held)].astype(np.int64)
        layout = _BatchLayout(self._documents, members, np.repeat(np.arange(len(rows)), held), len(rows), length)
        found = layout.build_tokens()
        # Padding counts from its own beginning.
        positions = np.tile(np.arange(length), (len(rows), 1)) - layout.row_lengths[:, None]
        positions[layout.token_index] = layout.document_positions
        return {**found, "position_ids": positions, **layout.build_columns(self.column_specs)}


class PaddedDataset(RowDataset):
    """Each document in a row of its own, and padding behind it; see [Note: padding without a mask]."""

    def __init__(self, documents: TokenizedDocuments, seq_len: int, *, mask_padding: bool = False) -> None:
        """Take the documents as they are; `mask_padding` adds an attention mask, for models in which padding
        matters."""
        longest = int(documents.lengths().max(initial=0))
        if longest > seq_len:
            raise DataError(f"a document has {longest} tokens, more than seq_len={seq_len}.")
        self.seq_len, self.group_size = seq_len, documents.group_size
        self.column_specs = _build_column_specs(documents, is_per_row=True)
        self._documents, self._mask_padding = documents, mask_padding

    def __len__(self) -> int:
        return len(self._documents) // self.group_size * self.group_size

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        starts, ends = _get_bounds(self._documents.ends, indices)
        return ends - starts

    def _read_arrays(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        layout = _BatchLayout(self._documents, rows, np.arange(len(rows)), len(rows), length)
        found = layout.build_tokens()
        if self._mask_padding:
            mask = np.zeros((len(rows), length), np.int64)
            mask[layout.token_index] = 1
            found["attention_mask"] = mask
        return {**found, **layout.build_columns(self.column_specs)}


class ConcatDataset(RowDataset):
    def __init__(self, datasets: Sequence[RowDataset]) -> None:
        """Join at least one; raise DataError where they cannot be in one batch."""
        first = datasets[0]
        self.seq_len, self.group_size = first.seq_len, first.group_size
        self._datasets = tuple(datasets)
        self.offsets = np.cumsum([0, *map(len, datasets)])
        by_token = {name: each for name, (_, each) in first.column_specs.items()}
        for part in datasets[1:]:
            if (
                part.group_size != self.group_size
                or {name: each for name, (_, each) in part.column_specs.items()} != by_token
            ):
                raise DataError(
                    f"sources do not go together: one has the columns {sorted(first.column_specs)} and rows "
                    f"{self.group_size} by {self.group_size}, another {sorted(part.column_specs)} and "
                    f"{part.group_size} by {part.group_size}."
                )
        self.column_specs = {
            name: (np.result_type(*(part.column_specs[name][0] for part in datasets)), each)
            for name, each in by_token.items()
        }

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        found = np.full(len(indices), self.seq_len)
        for part, chosen, rows in self._split_by_dataset(indices):
            lengths = part.lengths(rows)
            if lengths is None:
                return None
            found[chosen] = lengths
        return found

    def _read_arrays(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for part, chosen, own in self._split_by_dataset(rows):
            for name, values in part._read_arrays(own, length).items():
                if name not in found:
                    dtype = self.column_specs[name][0] if name in self.column_specs else values.dtype
                    found[name] = np.zeros((len(rows), *values.shape[1:]), dtype)
                found[name][chosen] = values
        return found

    def _split_by_dataset(self, indices: np.ndarray) -> list[tuple[RowDataset, np.ndarray, np.ndarray]]:
        """Return each part that has some of the rows, which of `indices` these are, and their numbers in it."""
        which = np.searchsorted(self.offsets, indices, side="right") - 1
        chosen = [(number, np.flatnonzero(which == number)) for number in np.unique(which)]
        return [(self._datasets[number], at, indices[at] - self.offsets[number]) for number, at in chosen]


def build_row_dataset(
    documents: TokenizedDocuments,
    packing: Packing,
    seq_len: int,
    *,
    cache: Path | None = None,
    mask_padding: bool = False,
    column_dtypes: Mapping[str, np.dtype] | None = None,
) -> RowDataset:
    """Make rows of a kind, see `DataConfig.packing`; `column_dtypes` of columns where other documents need a wider
    one."""
    if packing != "none" and documents.group_size != 1:
        raise ConfigError(
            f"packing={packing} would part the answers of a preference. Set data.packing=none, or leave it out."
        )
    rows: RowDataset
    if packing == "documents":
        rows = PackedDataset(documents, seq_len, cache=cache)
    elif packing == "none":
        rows = PaddedDataset(documents, seq_len, mask_padding=mask_padding)
    else:
        rows = ConcatChunkedDataset(documents, seq_len)
    rows.column_specs |= {name: (dtype, rows.column_specs[name][1]) for name, dtype in (column_dtypes or {}).items()}
    return rows


def _build_column_specs(documents: TokenizedDocuments, *, is_per_row: bool) -> dict[str, tuple[np.dtype, bool]]:
    """Return `Rows.columns`; `is_per_row`: a row is a document, and has its values."""
    return {
        name: (
            np.dtype(np.float64 if column.dtype.kind == "f" else np.int64),
            not is_per_row or (len(column) != len(documents) and len(column) == len(documents.tokens)),
        )
        for name, column in documents.columns.items()
    }


class _BatchLayout:
    """Where tokens go in a batch: `token_index` (row, column), `document_positions`, `row_lengths`: tokens of each
    row."""

    def __init__(
        self, documents: TokenizedDocuments, document_ids: np.ndarray, row_index: np.ndarray, num_rows: int, length: int
    ) -> None:
        """Lay out the documents `document_ids`, in the rows `row_index`, which rise, of a batch of (count, length)."""
        starts, ends = _get_bounds(documents.ends, document_ids)
        lengths = ends - starts
        self.row_lengths = np.bincount(row_index, lengths, num_rows).astype(np.int64)
        if self.row_lengths.max(initial=0) > length:
            raise ValueError(f"a row has {self.row_lengths.max()} tokens, more than {length}")
        self._documents, self._members, self._shape = documents, document_ids, (num_rows, length)
        self._source_index = _concat_ranges(starts, lengths)
        self._document_index = np.repeat(np.arange(len(document_ids)), lengths)
        self._rows = row_index
        behind = np.cumsum(lengths) - lengths
        self.document_positions = np.arange(len(self._document_index)) - behind[self._document_index]
        token_rows = row_index[self._document_index]
        self.token_index = (
            token_rows,
            np.arange(len(self._document_index)) - (np.cumsum(self.row_lengths) - self.row_lengths)[token_rows],
        )

    def build_tokens(self) -> dict[str, np.ndarray]:
        found = self._documents.tokens[self._source_index].astype(np.int64)
        input_ids = np.full(self._shape, PAD_TOKEN_ID, np.int64)
        input_ids[self.token_index] = found
        labels = np.full(self._shape, IGNORE_INDEX, np.int64)
        supervised = self.document_positions > 0
        if self._documents.loss_mask is not None:
            supervised &= self._documents.loss_mask[self._source_index]
        labels[self.token_index] = np.where(supervised, found, IGNORE_INDEX)
        return {"input_ids": input_ids, "labels": labels}

    def build_columns(self, columns: dict[str, tuple[np.dtype, bool]]) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name, (dtype, by_token) in columns.items():
            column = self._documents.columns[name]
            found[name] = np.zeros(self._shape if by_token else self._shape[:1], dtype)
            if not by_token:
                found[name][self._rows] = column[self._members]
            elif len(column) == len(self._documents.tokens):
                found[name][self.token_index] = column[self._source_index]
            else:
                found[name][self.token_index] = column[self._members][self._document_index]
        return found


def _get_bounds(ends: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where some of consecutive items begin and end, given all ends."""
    return np.where(indices > 0, ends[indices - 1], 0), np.asarray(ends[indices])


def _concat_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    behind = np.cumsum(counts) - counts
    return np.repeat(starts - behind, counts) + np.arange(int(counts.sum()))
