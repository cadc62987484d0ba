"""Rows of several sources in given shares, each place of the mixture computed by itself.

[Note: shares] The mixture is cut into blocks. Of the first n places, each source has the number that the method of
Webster and Sainte-Lague gives it for its weight: within one of its exact share for two sources, and about so for more.
With it no source loses a place when n grows, so the numbers of a block are the differences between its ends. Within a
block the places are in random order. A place then tells its source, and the rank of the row among those of the
source: what the blocks before have, and what comes earlier in this one. Each source goes through epochs of its own.
Source: Balinski and Young 1982, Fair Representation (divisor methods are monotone in the size of the house).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from .shuffle import shuffled

BLOCK = 1024
"""Places; part of the order that a run goes on in."""


class Mixture:
    """Which source each place of an endless mixture is of, and which of its rows; see [Note: shares]."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """Set the shares.

        Args:
            weights: of each source, > 0, finite.
            seed: at least 0.
        """
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self._seed = seed
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None

    def places(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the places [start, stop): the source, and the rank of the row among those of its source; both int64."""
        sources, ranks = [], []
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            chosen = slice(max(start - first, 0), min(stop - first, BLOCK))
            _, own, earlier = self._of_block(number)
            sources.append(own[chosen])
            ranks.append(earlier[chosen])
        return np.concatenate(sources), np.concatenate(ranks)

    def before(self, place: int) -> list[int]:
        """How many rows of each source come before a place."""
        first = place // BLOCK * BLOCK
        counts = self.counts(first)
        _, own, _ = self._of_block(place // BLOCK)
        inside = np.bincount(own[: place - first], minlength=len(counts))
        return [count + int(more) for count, more in zip(counts, inside, strict=True)]

    def counts(self, places: int) -> list[int]:
        """How many of the first places each source has, if they are whole blocks."""
        found = [int(places * share + Fraction(1, 2)) for share in self._shares]
        # Rounding gives a few too many or too few, which are those of the least or most claim.
        while sum(found) > places:
            found[min((k for k in _numbers(found) if found[k]), key=lambda k: self._claim(k, found[k] - 1))] -= 1
        while sum(found) < places:
            found[max(_numbers(found), key=lambda k: self._claim(k, found[k]))] += 1
        return found

    def _claim(self, source: int, held: int) -> tuple[Fraction, int]:
        """Of a source that has so many places to one more; no two are equal."""
        return self._shares[source] / (2 * held + 1), -source

    def _of_block(self, number: int) -> tuple[int, np.ndarray, np.ndarray]:
        if self._block is None or self._block[0] != number:
            before, after = self.counts(number * BLOCK), self.counts((number + 1) * BLOCK)
            own = np.repeat(_numbers(before), np.subtract(after, before))
            own = own[shuffled(np.arange(BLOCK), BLOCK, seed=self._seed, epoch=number, of="sources")]
            earlier = np.empty(BLOCK, np.int64)
            for source, count in enumerate(before):
                mine = np.flatnonzero(own == source)
                earlier[mine] = count + np.arange(len(mine))
            self._block = (number, own, earlier)
        return self._block


def _numbers(values: Sequence[int]) -> range:
    return range(len(values))
