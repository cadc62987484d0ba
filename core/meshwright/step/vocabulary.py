"""How the entries of logits lie over ranks.

Whole on each here; an axis that divides them brings a `Vocabulary` of its own. What is computed of them is in
`token_statistics`.
"""

from __future__ import annotations

from torch import Tensor


class Vocabulary:
    """A vocabulary that every rank has whole.

    Attributes:
        start: the first entry of this rank.
    """

    start: int = 0

    def size(self, local: int) -> int:
        """Entries in all, where this rank has so many."""
        return local

    def each(self, local: Tensor) -> Tensor:
        """What each rank that shares the entries has of a tensor, one behind the other along a new first dim; without
        autograd. Collective where ranks share them."""
        return local[None]

    def gathered(self, logits: Tensor) -> Tensor:
        """Logits of all entries, from those of this rank; without autograd. Collective likewise."""
        return logits


WHOLE = Vocabulary()
