"""From documents to rows of tokens, as a model takes them.

Of three kinds: a stream that is cut anywhere, documents that share a row and are kept apart, and documents in rows of
their own, with padding behind them.

[Note: kept apart] `position_ids` restart at each document of a row, from which transformers finds where one ends; see
[Note: packed documents] in `step.batch`. The first token of a document is predicted from nothing and is not learnt.
What is left of a row is padding, which counts as one more document: its positions restart, and its labels are masked.

[Note: padding without a mask] A causal model sees nothing behind a token, so padding behind a document, with masked
labels, changes nothing of it, and a mask would only make attention slower. Statistics of routers are the exception.

Shapes: T tokens in D documents, B rows of length S.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...base.errors import ConfigError, DataError
from ...base.types import IGNORED_LABEL
from ..config import Packing
from ..documents import Documents
from .best_fit import best_fit, cached_best_fit
from .layout import Layout, bounds, ranges

if TYPE_CHECKING:
    from ...base.types import Batch


class Rows(ABC):
    """Rows that can be read by their numbers.

    Attributes:
        seq_len: tokens of a row at most.
        group: so many rows, one behind the other, belong together.
        columns: of a batch, beside the tokens: name to dtype, int64 or float64, and whether it has a value for each
            token, (B, S), or one for each row, (B,).
    """

    seq_len: int
    group: int = 1
    columns: dict[str, tuple[np.dtype, bool]]

    @abstractmethod
    def __len__(self) -> int:
        """How many there are; a multiple of `group`."""

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        """Tokens of some rows, without padding: (B,), int64; None where all have `seq_len`."""
        return None

    def take(self, indices: Sequence[int] | np.ndarray, length: int | None = None) -> Batch:
        """Read the rows at `indices`, in their order; an index may come twice.

        Args:
            length: S, at least their longest; None: `seq_len`.

        Returns:
            `input_ids` and `labels`, int64, (B, S), CPU, and `columns`; `position_ids` where documents share a row,
            `attention_mask` where padding is to be masked.

        Raises:
            IndexError: an index lies outside [0, len).
        """
        import torch

        rows = np.asarray(indices, dtype=np.int64)
        outside = rows[(rows < 0) | (rows >= len(self))]
        if len(outside):
            raise IndexError(f"row {outside[0]} does not exist; there are {len(self)}, counted from 0")
        found = self._read(rows, self.seq_len if length is None else length)
        return {name: torch.from_numpy(values) for name, values in found.items()}

    @abstractmethod
    def _read(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """What `take` returns."""


class StreamRows(Rows):
    """A stream of tokens, cut into rows of one length; the tail that does not fill one is left out."""

    def __init__(self, documents: Documents, seq_len: int) -> None:
        """Cut the documents' tokens, without copying them.

        Raises:
            ValueError: the tokens are no stream of integers, or `seq_len` is below 1.
        """
        tokens = documents.tokens
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be one row of integers, not {tokens.dtype} of shape {tokens.shape}")
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, not {seq_len}")
        self.seq_len = seq_len
        self.columns = _columns(documents, in_rows=False)
        self.documents = documents
        self._count = len(tokens) // seq_len

    def __len__(self) -> int:
        return self._count

    def _read(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        if length != self.seq_len:
            raise ValueError(f"rows of a stream have {self.seq_len} tokens, not {length}")
        documents = self.documents
        input_ids = self._cut(documents.tokens)[rows].astype(np.int64)
        labels = input_ids.copy()
        if documents.labelled is not None:
            labels[~self._cut(documents.labelled)[rows]] = IGNORED_LABEL
        found = {"input_ids": input_ids, "labels": labels}
        for name, (dtype, _) in self.columns.items():
            column = documents.columns[name]
            if len(column) == len(documents.tokens):
                found[name] = self._cut(column)[rows].astype(dtype)
            else:
                places = rows[:, None] * self.seq_len + np.arange(self.seq_len)
                found[name] = column[np.searchsorted(documents.ends, places, side="right")].astype(dtype)
        return found

    def _cut(self, stream: np.ndarray) -> np.ndarray:
        return stream[: self._count * self.seq_len].reshape(self._count, self.seq_len)


class PackedRows(Rows):
    """Several documents in a row, whole and kept apart; see [Note: kept apart]."""

    def __init__(self, documents: Documents, seq_len: int, *, cache: Path | None = None) -> None:
        """Decide which documents share a row.

        Args:
            cache: where that is kept, in a file that processes share; None: in memory.

        Raises:
            DataError: a document is longer than `seq_len`.
        """
        self.seq_len = seq_len
        self.columns = _columns(documents, in_rows=False)
        self._documents = documents
        ends = documents.ends
        self.packing = best_fit(ends, seq_len) if cache is None else cached_best_fit(ends, seq_len, cache)

    def __len__(self) -> int:
        return len(self.packing)

    def _read(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        if length != self.seq_len:
            raise ValueError(f"packed rows have {self.seq_len} tokens, not {length}")
        starts, stops = bounds(self.packing.ends, rows)
        held = stops - starts
        members = self.packing.documents[ranges(starts, held)].astype(np.int64)
        layout = Layout(self._documents, members, np.repeat(np.arange(len(rows)), held), len(rows), length)
        found = layout.tokens()
        # Padding counts from its own beginning.
        positions = np.tile(np.arange(length), (len(rows), 1)) - layout.used[:, None]
        positions[layout.at] = layout.places
        return {**found, "position_ids": positions, **layout.columns(self.columns)}


class PaddedRows(Rows):
    """Each document in a row of its own, and padding behind it; see [Note: padding without a mask]."""

    def __init__(self, documents: Documents, seq_len: int, *, masks: bool = False) -> None:
        """Take the documents as they are.

        Args:
            masks: give an attention mask, for models in which padding changes something.

        Raises:
            DataError: a document is longer than `seq_len`.
        """
        longest = int(documents.lengths().max(initial=0))
        if longest > seq_len:
            raise DataError(f"a document has {longest} tokens, more than seq_len={seq_len}.")
        self.seq_len, self.group = seq_len, documents.group
        self.columns = _columns(documents, in_rows=True)
        self._documents, self._masks = documents, masks

    def __len__(self) -> int:
        return len(self._documents) // self.group * self.group

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        starts, ends = bounds(self._documents.ends, indices)
        return ends - starts

    def _read(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        layout = Layout(self._documents, rows, np.arange(len(rows)), len(rows), length)
        found = layout.tokens()
        if self._masks:
            mask = np.zeros((len(rows), length), np.int64)
            mask[layout.at] = 1
            found["attention_mask"] = mask
        return {**found, **layout.columns(self.columns)}


class JoinedRows(Rows):
    """Rows of several sources, one source behind the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        """Join at least one.

        Raises:
            DataError: they cannot be in one batch.
        """
        first = parts[0]
        self.seq_len, self.group = first.seq_len, first.group
        self._parts = tuple(parts)
        self.starts = np.cumsum([0, *map(len, parts)])
        for part in parts[1:]:
            if part.group != self.group or {n: t for n, (_, t) in part.columns.items()} != {
                n: t for n, (_, t) in first.columns.items()
            }:
                raise DataError(
                    f"sources do not go together: one has the columns {sorted(first.columns)} and rows {self.group} by "
                    f"{self.group}, another {sorted(part.columns)} and {part.group} by {part.group}."
                )
        self.columns = {
            name: (np.result_type(*(part.columns[name][0] for part in parts)), by_token)
            for name, (_, by_token) in first.columns.items()
        }

    def __len__(self) -> int:
        return int(self.starts[-1])

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        found = np.full(len(indices), self.seq_len)
        for part, chosen, rows in self._shares(indices):
            lengths = part.lengths(rows)
            if lengths is None:
                return None
            found[chosen] = lengths
        return found

    def _read(self, rows: np.ndarray, length: int) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for part, chosen, own in self._shares(rows):
            for name, values in part._read(own, length).items():
                if name not in found:
                    dtype = self.columns[name][0] if name in self.columns else values.dtype
                    found[name] = np.zeros((len(rows), *values.shape[1:]), dtype)
                found[name][chosen] = values
        return found

    def _shares(self, indices: np.ndarray) -> list[tuple[Rows, np.ndarray, np.ndarray]]:
        """Each part that has some of the rows, which of `indices` these are, and their numbers in it."""
        which = np.searchsorted(self.starts, indices, side="right") - 1
        chosen = [(number, np.flatnonzero(which == number)) for number in np.unique(which)]
        return [(self._parts[number], at, indices[at] - self.starts[number]) for number, at in chosen]


def make_rows(
    documents: Documents,
    kind: Packing,
    seq_len: int,
    *,
    cache: Path | None = None,
    masks: bool = False,
    dtypes: Mapping[str, np.dtype] | None = None,
) -> Rows:
    """Rows of a kind; see `DataConfig.packing`.

    Args:
        cache: see `PackedRows`.
        masks: see `PaddedRows`.
        dtypes: of columns, where other documents have more to say of them.

    Raises:
        ConfigError, DataError: the documents cannot be laid out so.
    """
    if kind != "none" and documents.group != 1:
        raise ConfigError(
            f"packing={kind} would part the answers of a preference. Set data.packing=none, or leave it out."
        )
    rows: Rows
    if kind == "documents":
        rows = PackedRows(documents, seq_len, cache=cache)
    elif kind == "none":
        rows = PaddedRows(documents, seq_len, masks=masks)
    else:
        rows = StreamRows(documents, seq_len)
    rows.columns |= {name: (dtype, rows.columns[name][1]) for name, dtype in (dtypes or {}).items()}
    return rows


def _columns(documents: Documents, *, in_rows: bool) -> dict[str, tuple[np.dtype, bool]]:
    """See `Rows.columns`.

    Args:
        in_rows: whether a row is a document, and has its values.
    """
    return {
        name: (
            np.dtype(np.float64 if column.dtype.kind == "f" else np.int64),
            not in_rows or (len(column) != len(documents) and len(column) == len(documents.tokens)),
        )
        for name, column in documents.columns.items()
    }
