"""Which rows a step trains on, on every rank, without any state to save.

[Note: the global stream] Each epoch is one random order of all rows, of (seed, epoch), and epochs follow each other.
Step s takes batch_size rows from position s x batch_size. So a run resumes from its step alone, and the global batch
does not depend on how many ranks share it. A run that resumes with another batch size has an origin: a step and its
position.

[Note: shares] A mixture of sources is cut into blocks. Of the first n places, each source has the number that the
method of Webster and Sainte-Lague gives it for its weight. With it no source loses a place when n grows, so the numbers
of a block are the differences between its ends. Within a block places are in random order. A place tells its source and
the rank of the row in the source, which has epochs of its own.
Source: Balinski and Young 1982, Fair Representation (divisor methods are monotone in the size of the house).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from meshwright.plugin import ConfigError

ORDER_VERSION = 2
"""Raised with every change to the order, which checkpoints name."""
BLOCK = 1024
"""Places of a mixture; part of the order."""
_ROUNDS = 8
_LEAST_BITS = 3
"""Of a half: with fewer there are so few functions that orders of a few places are not equally likely."""


def shuffled(places: np.ndarray, size: int, *, seed: int, epoch: int, of: str = "") -> np.ndarray:
    """Return what stands at `places`, int64, of a random order of [0, size), each computed by itself; size <= 2^62.

    A keyed bijection: a Feistel network permutes the least [0, 4^h) that holds [0, size), and what falls outside goes
    through it again. All numbers are unsigned integers of 64 bits, whose products wrap, so it is the same everywhere.
    Source: Luby and Rackoff 1988, doi:10.1137/0217022; Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9 (cycle
    walking); Steele et al. 2014, doi:10.1145/2660193.2660195 (the finalizer of SplitMix64, each round's function).
    """
    half = max(_LEAST_BITS, ((size - 1).bit_length() + 1) // 2)
    text = f"{seed} {epoch}{of and ' '}{of}"
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = _permuted(np.asarray(places).astype(np.uint64), half, keys)
    while len(outside := np.flatnonzero(values >= size)):
        values[outside] = _permuted(values[outside], half, keys)
    return values.astype(np.int64)


def _permuted(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class DataOrder:
    """The order in which a run reads its rows; see [Note: the global stream]."""

    def __init__(self, num_sequences: int, batch_size: int, seed: int, *, origin: tuple[int, int] = (0, 0)) -> None:
        """Set the order; `origin`: a step, and its position in the global stream."""
        given = (("num_sequences", num_sequences, 1), ("batch_size", batch_size, 1), ("seed", seed, 0))
        for name, value, least in given:
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self.num_sequences, self.batch_size, self.seed = num_sequences, batch_size, seed
        self._origin = origin

    def position(self, step: int) -> int:
        first, position = self._origin
        return position + (step - first) * self.batch_size

    def indices(self, step: int) -> np.ndarray:
        """Return the global batch of `step`, counted from 0: (batch_size,), int64."""
        if step < self._origin[0]:
            raise ValueError(f"step must be at least {self._origin[0]}, not {step}")
        position, end = self.position(step), self.position(step + 1)
        pieces = []
        while position < end:
            epoch, offset = divmod(position, self.num_sequences)
            places = np.arange(offset, min(offset + end - position, self.num_sequences))
            pieces.append(shuffled(places, self.num_sequences, seed=self.seed, epoch=epoch))
            position += len(places)
        return np.concatenate(pieces)


def check_batch_size(batch_size: int, *, data_size: int, micro_batch_size: int) -> None:
    """Raise ConfigError for a global batch that does not divide into equal microbatches on every data rank."""
    unit = data_size * micro_batch_size
    if batch_size >= 1 and batch_size % unit == 0:
        return
    below, above = batch_size // unit * unit, (batch_size // unit + 1) * unit
    allowed = f"{below} or {above}" if below > 0 else f"{above}"
    raise ConfigError(
        f"batch_size={batch_size} does not divide into microbatches: {data_size} data ranks x "
        f"micro_batch_size={micro_batch_size} = {unit}. batch_size must be a multiple of {unit}: set it to {allowed}, "
        "or change micro_batch_size."
    )


class Mixture:
    """Which source each place of an endless mixture belongs to, and which of its rows; see [Note: shares]."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        self._seed = seed
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None

    def places(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return for the places [start, stop) the source, and the rank of the row in its source; both int64."""
        sources, ranks = [], []
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            chosen = slice(max(start - first, 0), min(stop - first, BLOCK))
            _, own, earlier = self._of_block(number)
            sources.append(own[chosen])
            ranks.append(earlier[chosen])
        return np.concatenate(sources), np.concatenate(ranks)

    def before(self, place: int) -> list[int]:
        first = place // BLOCK * BLOCK
        counts = self.counts(first)
        _, own, _ = self._of_block(place // BLOCK)
        inside = np.bincount(own[: place - first], minlength=len(counts))
        return [count + int(more) for count, more in zip(counts, inside, strict=True)]

    def counts(self, places: int) -> list[int]:
        """Count how many of the first places, in full blocks, each source has."""
        found = [int(places * share + Fraction(1, 2)) for share in self._shares]
        sources = range(len(found))
        # Rounding gives a few too many or too few, which are those of the least or most claim.
        while sum(found) > places:
            found[min((k for k in sources if found[k]), key=lambda k: self._claim(k, found[k] - 1))] -= 1
        while sum(found) < places:
            found[max(sources, key=lambda k: self._claim(k, found[k]))] += 1
        return found

    def _claim(self, source: int, held: int) -> tuple[Fraction, int]:
        """Return the claim of a source with `held` places to one more; no two are equal."""
        return self._shares[source] / (2 * held + 1), -source

    def _of_block(self, number: int) -> tuple[int, np.ndarray, np.ndarray]:
        if self._block is None or self._block[0] != number:
            before, after = self.counts(number * BLOCK), self.counts((number + 1) * BLOCK)
            own = np.repeat(range(len(before)), np.subtract(after, before))
            own = own[shuffled(np.arange(BLOCK), BLOCK, seed=self._seed, epoch=number, of="sources")]
            earlier = np.empty(BLOCK, np.int64)
            for source, count in enumerate(before):
                mine = np.flatnonzero(own == source)
                earlier[mine] = count + np.arange(len(mine))
            self._block = (number, own, earlier)
        return self._block
