"""A stream of tokens, cut into sequences of one length when it is read.

Documents follow each other in the stream, each with an eos token at its end. The tail that does not fill a
sequence is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class PackedSequences:
    """The sequences of a token stream, which may be memory-mapped.

    Attributes:
        seq_len: tokens in each sequence.
    """

    def __init__(self, tokens: np.ndarray, seq_len: int) -> None:
        """Cut `tokens`, (tokens,) of any integer dtype, without copying them.

        Raises:
            ValueError: `tokens` is not a stream of integers, or `seq_len` is below 1.
        """
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be one row of integers, not {tokens.dtype} of shape {tokens.shape}")
        if seq_len < 1:
            raise ValueError(f"seq_len must be at least 1, not {seq_len}")
        self.seq_len = seq_len
        count = len(tokens) // seq_len
        self._sequences = tokens[: count * seq_len].reshape(count, seq_len)

    def __len__(self) -> int:
        return len(self._sequences)

    def take(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        """Read the sequences at `indices`, in their order; an index may come twice.

        Returns:
            (len(indices), seq_len), int64, CPU; a copy.

        Raises:
            IndexError: an index lies outside [0, len).
        """
        import torch

        rows = np.asarray(indices, dtype=np.int64)
        outside = rows[(rows < 0) | (rows >= len(self))]
        if len(outside):
            raise IndexError(f"sequence {outside[0]} does not exist; there are {len(self)}, counted from 0")
        return torch.from_numpy(self._sequences[rows].astype(np.int64))
