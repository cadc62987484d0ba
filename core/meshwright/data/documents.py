"""Tokenized documents, one after another in memory-mapped arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Documents:
    """What a source holds after tokenizing. T tokens in D documents; a pair of preferences is two documents.

    Attributes:
        tokens: (T,), uint16 or uint32, the special tokens of each document among them.
        ends: (D,), int64: where each document ends in `tokens`; the first begins at 0.
        labelled: (T,), bool: tokens to be learnt; None: all. The first of a document is never predicted, whatever it
            says.
        columns: further entries by name: (D,) for one value a document, or (T,) for one a token.
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
