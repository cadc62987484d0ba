"""Where the tokens of documents go in a batch.

Shapes: B rows of length S.
"""

from __future__ import annotations

import numpy as np

from ...base.types import IGNORED_LABEL
from ..documents import Documents

FILL = 0
"""The token of padding; nothing sees it, and any vocabulary has it."""


class Layout:
    """Where the tokens of documents go in a batch: each behind the one before it in its row.

    Attributes:
        at: (row, column) of each token.
        places: (tokens,): of each token in its document.
        used: (B,): tokens of each row.
    """

    def __init__(self, documents: Documents, members: np.ndarray, rows: np.ndarray, count: int, length: int) -> None:
        """Lay out documents; `rows` rises."""
        starts, ends = bounds(documents.ends, members)
        lengths = ends - starts
        self.used = np.bincount(rows, lengths, count).astype(np.int64)
        if self.used.max(initial=0) > length:
            raise ValueError(f"a row has {self.used.max()} tokens, more than {length}")
        self._documents, self._members, self._shape = documents, members, (count, length)
        self._source = ranges(starts, lengths)
        self._of = np.repeat(np.arange(len(members)), lengths)
        self._rows = rows
        behind = np.cumsum(lengths) - lengths
        self.places = np.arange(len(self._of)) - behind[self._of]
        token_rows = rows[self._of]
        self.at = (token_rows, np.arange(len(self._of)) - (np.cumsum(self.used) - self.used)[token_rows])

    def tokens(self) -> dict[str, np.ndarray]:
        found = self._documents.tokens[self._source].astype(np.int64)
        input_ids = np.full(self._shape, FILL, np.int64)
        input_ids[self.at] = found
        labels = np.full(self._shape, IGNORED_LABEL, np.int64)
        learnt = self.places > 0
        if self._documents.labelled is not None:
            learnt &= self._documents.labelled[self._source]
        labels[self.at] = np.where(learnt, found, IGNORED_LABEL)
        return {"input_ids": input_ids, "labels": labels}

    def columns(self, columns: dict[str, tuple[np.dtype, bool]]) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for name, (dtype, by_token) in columns.items():
            column = self._documents.columns[name]
            found[name] = np.zeros(self._shape if by_token else self._shape[:1], dtype)
            if not by_token:
                found[name][self._rows] = column[self._members]
            elif len(column) == len(self._documents.tokens):
                found[name][self.at] = column[self._source]
            else:
                found[name][self.at] = column[self._members][self._of]
        return found


def bounds(ends: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where some of what lies one behind the other begins and ends, given all ends."""
    return np.where(indices > 0, ends[indices - 1], 0), np.asarray(ends[indices])


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`counts` numbers from each start on, one range behind the other."""
    behind = np.cumsum(counts) - counts
    return np.repeat(starts - behind, counts) + np.arange(int(counts.sum()))
