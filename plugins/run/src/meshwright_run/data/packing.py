"""Pack documents into rows of tokens, the inputs of a model.

There are three kinds of rows: parts of a stream that is cut at any token, several isolated documents, and one document
with padding after it.

[Note: isolated] `position_ids` restart at each document of a row, by which transformers finds its bounds; see
[Note: packed documents] in `step.handshake`. The first token of a document is not supervised. Padding at the end counts
as one more document, with masked labels.

[Note: padding without a mask] In a causal model no token attends to later ones, so a mask would only make attention
slower. Router statistics are the exception: they would count padding.

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
"""Token id of padding. No document attends to it, and every vocabulary contains it."""


class RowDataset(ABC):
    """Rows by index, in groups of `group_size`. `column_specs`: dtype, and whether the shape is (B, S), not (B,)."""

    seq_len: int
    group_size: int = 1
    column_specs: dict[str, tuple[np.dtype, bool]]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows, a multiple of `group_size`."""

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        """Return the number of tokens of rows without padding, (B,), int64; None if all rows have `seq_len`."""
        return None

    def count_tokens(self, indices: np.ndarray) -> int:
        """Return the number of tokens of rows, without padding."""
        lengths = self.lengths(indices)
        return len(indices) * self.seq_len if lengths is None else int(lengths.sum())

    def read_batch(self, indices: Sequence[int] | np.ndarray, length: int | None = None) -> Batch:
        """Return rows in the given order, `length` tokens each (None: `seq_len`): `input_ids` and `labels`, int64,
        (B, S), on the CPU, and columns; `position_ids` if documents share rows, `attention_mask` if padding is masked.
        """
        import torch

        rows = np.asarray(indices, dtype=np.int64)
        outside = rows[(rows < 0) | (rows >= len(self))]
        if len(outside):
            raise IndexError(f"row {outside[0]} does not exist; there are {len(self)}, counted from 0")
        arrays = self._read_arrays(rows, self.seq_len if length is None else length)
        return {name: torch.from_numpy(values) for name, values in arrays.items()}

    @abstractmethod
    def _read_arrays(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Return the result of `read_batch` as arrays."""


class ConcatChunkedDataset(RowDataset):
    """A stream of tokens, cut into rows of equal length; an incomplete row at its end is left out."""

    def __init__(self, documents: TokenizedDocuments, seq_len: int) -> None:
        tokens = documents.tokens
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be one-dimensional integers, not {tokens.dtype} of shape {tokens.shape}")
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
        arrays = {"input_ids": input_ids, "labels": labels}
        for name, (dtype, _) in self.column_specs.items():
            column = documents.columns[name]
            if len(column) == len(documents.tokens):
                arrays[name] = self._reshape_to_rows(column)[rows].astype(dtype)
            else:
                positions = rows[:, None] * self.seq_len + np.arange(self.seq_len)
                arrays[name] = column[np.searchsorted(documents.ends, positions, side="right")].astype(dtype)
        return arrays

    def _reshape_to_rows(self, stream: np.ndarray) -> np.ndarray:
        return stream[: self._count * self.seq_len].reshape(self._count, self.seq_len)


class PackedDataset(RowDataset):
    """Rows of several complete, isolated documents; see [Note: isolated]."""

    def __init__(self, documents: TokenizedDocuments, seq_len: int, *, cache: Path | None = None) -> None:
        self.seq_len = seq_len
        self.column_specs = _build_column_specs(documents, is_per_row=False)
        self._documents = documents
        ends = documents.ends
        self._packing = pack_best_fit(ends, seq_len) if cache is None else load_or_pack(ends, seq_len, cache)

    def __len__(self) -> int:
        return len(self._packing)

    def count_tokens(self, indices: np.ndarray) -> int:
        starts, stops = _get_bounds(self._packing.ends, indices)
        members = self._packing.documents[_concat_ranges(starts, stops - starts)].astype(np.int64)
        starts, stops = _get_bounds(self._documents.ends, members)
        return int((stops - starts).sum())

    def _read_arrays(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        if length != self.seq_len:
            raise ValueError(f"packed rows have {self.seq_len} tokens, not {length}")
        starts, stops = _get_bounds(self._packing.ends, rows)
        counts = stops - starts
        members = self._packing.documents[_concat_ranges(starts, counts)].astype(np.int64)
        layout = _BatchLayout(self._documents, members, np.repeat(np.arange(len(rows)), counts), len(rows), length)
        arrays = layout.build_tokens()
        # Positions of padding start at its first token.
        positions = np.tile(np.arange(length), (len(rows), 1)) - layout.row_lengths[:, None]
        positions[layout.token_index] = layout.document_positions
        return {**arrays, "position_ids": positions, **layout.build_columns(self.column_specs)}


class PaddedDataset(RowDataset):
    """Rows of one document each, with padding after it; see [Note: padding without a mask]."""

    def __init__(self, documents: TokenizedDocuments, seq_len: int, *, mask_padding: bool = False) -> None:
        """Use the documents as they are. `mask_padding` adds an attention mask, for models that padding affects."""
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
        arrays = layout.build_tokens()
        if self._mask_padding:
            mask = np.zeros((len(rows), length), np.int64)
            mask[layout.token_index] = 1
            arrays["attention_mask"] = mask
        return {**arrays, **layout.build_columns(self.column_specs)}


class ConcatDataset(RowDataset):
    def __init__(self, datasets: Sequence[RowDataset]) -> None:
        """Concatenate one or more datasets. Raises DataError if their rows cannot be in one batch."""
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
                    f"sources cannot be combined: one has the columns {sorted(first.column_specs)} and groups of "
                    f"{self.group_size} rows, another {sorted(part.column_specs)} and groups of {part.group_size}."
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

    def count_tokens(self, indices: np.ndarray) -> int:
        return sum(part.count_tokens(rows) for part, _, rows in self._split_by_dataset(indices))

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
        """Return each dataset with some of the rows, the positions of these in `indices`, and their row numbers."""
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
    """Build the rows for a packing; see `DataConfig.packing`. `column_dtypes`: dtypes of columns for which other
    documents need a wider one."""
    if packing != "none" and documents.group_size != 1:
        raise ConfigError(
            f"packing={packing} would separate the answers of a preference. Set data.packing=none, or leave it out."
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
    """Return `RowDataset.column_specs`. `is_per_row`: each row is one document, with the document's values."""
    return {
        name: (
            np.dtype(np.float64 if column.dtype.kind == "f" else np.int64),
            not is_per_row or (len(column) != len(documents) and len(column) == len(documents.tokens)),
        )
        for name, column in documents.columns.items()
    }


class _BatchLayout:
    """Layout of the tokens of a batch: `token_index` (row, column), `document_positions` (position in the document),
    `row_lengths` (tokens per row)."""

    def __init__(
        self, documents: TokenizedDocuments, document_ids: np.ndarray, row_index: np.ndarray, num_rows: int, length: int
    ) -> None:
        """Lay out documents in a batch of (num_rows, length). `row_index`: the row of each document, ascending."""
        starts, ends = _get_bounds(documents.ends, document_ids)
        lengths = ends - starts
        self.row_lengths = np.bincount(row_index, lengths, num_rows).astype(np.int64)
        if self.row_lengths.max(initial=0) > length:
            raise ValueError(f"a row has {self.row_lengths.max()} tokens, more than {length}")
        self._documents, self._members, self._shape = documents, document_ids, (num_rows, length)
        self._source_index = _concat_ranges(starts, lengths)
        self._document_index = np.repeat(np.arange(len(document_ids)), lengths)
        self._rows = row_index
        before = np.cumsum(lengths) - lengths
        self.document_positions = np.arange(len(self._document_index)) - before[self._document_index]
        token_rows = row_index[self._document_index]
        self.token_index = (
            token_rows,
            np.arange(len(self._document_index)) - (np.cumsum(self.row_lengths) - self.row_lengths)[token_rows],
        )

    def build_tokens(self) -> dict[str, np.ndarray]:
        tokens = self._documents.tokens[self._source_index].astype(np.int64)
        input_ids = np.full(self._shape, PAD_TOKEN_ID, np.int64)
        input_ids[self.token_index] = tokens
        labels = np.full(self._shape, IGNORE_INDEX, np.int64)
        supervised = self.document_positions > 0
        if self._documents.loss_mask is not None:
            supervised &= self._documents.loss_mask[self._source_index]
        labels[self.token_index] = np.where(supervised, tokens, IGNORE_INDEX)
        return {"input_ids": input_ids, "labels": labels}

    def build_columns(self, columns: dict[str, tuple[np.dtype, bool]]) -> dict[str, np.ndarray]:
        arrays: dict[str, np.ndarray] = {}
        for name, (dtype, by_token) in columns.items():
            column = self._documents.columns[name]
            arrays[name] = np.zeros(self._shape if by_token else self._shape[:1], dtype)
            if not by_token:
                arrays[name][self._rows] = column[self._members]
            elif len(column) == len(self._documents.tokens):
                arrays[name][self.token_index] = column[self._source_index]
            else:
                arrays[name][self.token_index] = column[self._members][self._document_index]
        return arrays


def _get_bounds(ends: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of the given items, where `ends` has those of all consecutive items."""
    return np.where(indices > 0, ends[indices - 1], 0), np.asarray(ends[indices])


def _concat_ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))
