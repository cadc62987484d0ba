"""Choose the documents that are held out from training.

The choice hangs on a document's text alone: not on its place, its neighbours or the sequence length, so a corpus
that grows or is reordered keeps its split, and copies of one document never lie on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")


def split_of(place: float, fraction: float) -> Split:
    """The side of a document whose `place_of` is given, where `fraction`, in [0, 1), is to be held out."""
    return "held_out" if place < fraction else "train"


def is_nearer(place: float, other: float, side: Split) -> bool:
    """Whether a document is nearer to the other side than another one of its side.

    A side that would be empty gets the document that is nearest to it (of equal ones, the first), so both hold at
    least one where there are two.
    """
    return place < other if side == "train" else place > other


def training_documents(documents: Iterable[str], fraction: float) -> Iterator[str]:
    """Yield those to train on, in about their order and with one of them in memory."""
    seen: set[Split] = set()
    # What changes sides if the other one stays empty.
    nearest: str | None = None
    if fraction == 0:
        yield from documents
        return
    for document in documents:
        place = place_of(document)
        side = split_of(place, fraction)
        seen.add(side)
        left: str | None = document
        if len(seen) == 2:
            if nearest is not None and side == "held_out":
                yield nearest
            nearest = None
        elif nearest is None or is_nearer(place, place_of(nearest), side):
            left, nearest = nearest, document
        if side == "train" and left is not None:
            yield left
    if nearest is not None and seen == {"held_out"}:
        yield nearest


def place_of(document: str) -> float:
    """Spread documents evenly over [0, 1) by their text."""
    digest = hashlib.blake2b(document.encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48
