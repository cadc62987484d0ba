"""A random order of any number of places, of which each can be asked for by itself.

A keyed bijection on [0, size) in constant memory: a Feistel network permutes the least [0, 4^h) that holds them, and
what falls outside of [0, size) goes through it again until it falls inside, which it does after four rounds of this on
average at most. All numbers are unsigned integers of 64 bits, whose products wrap, so the order is the same everywhere.
Source: Luby and Rackoff 1988, doi:10.1137/0217022; Black and Rogaway 2002, doi:10.1007/3-540-45760-7_9 (cycle walking);
Steele et al. 2014, doi:10.1145/2660193.2660195 (the finalizer of SplitMix64, which makes each round's function).
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 8
_LEAST_BITS = 3
"""Of a half: with fewer, so few functions are there that orders of a few places are not equally likely."""


def shuffled(places: np.ndarray, size: int, *, seed: int, epoch: int, of: str = "") -> np.ndarray:
    """Return what stands at some places of a random order of [0, size).

    Args:
        places: (places,), int64, each in [0, size); may repeat.
        size: at least 1, at most 2^62.
        seed, epoch: each pair has an order of its own; at least 0.
        of: what is put in order, where one seed serves several things.

    Returns:
        (places,), int64.
    """
    half = max(_LEAST_BITS, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(f"{seed} {epoch}{of and ' '}{of}")
    values = _permuted(np.asarray(places).astype(np.uint64), half, keys)
    while len(outside := np.flatnonzero(values >= size)):
        values[outside] = _permuted(values[outside], half, keys)
    return values.astype(np.int64)


def _keys(text: str) -> np.ndarray:
    digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _permuted(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """The Feistel network, on numbers of two halves of so many bits."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
