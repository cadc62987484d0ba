"""Documents of words for tests of data."""

from __future__ import annotations

import random

WORDS = ["the", "mesh", "has", "an", "axis", "for", "every", "way", "to", "split", "models", "and", "each", "rank"]


def build_prose(seed: int, words: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words)) + f" {seed}."
