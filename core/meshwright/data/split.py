"""Choose the documents that are held out from training.

The choice hangs on a document's text alone: not on its place, its neighbours or the sequence length, so a corpus
that grows or is reordered keeps its split, and copies of one document never lie on both sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from ..errors import DataError


def held_out_mask(documents: Iterable[str], fraction: float) -> np.ndarray:
    """Mark the documents that are held out.

    A split that would be empty gets the document that is nearest to it, so both hold at least one.

    Args:
        documents: at least two, in any order.
        fraction: share to hold out, in (0, 1).

    Returns:
        (documents,), bool, True where held out.

    Raises:
        DataError: there are fewer than two documents.
    """
    places = np.array([_place(document) for document in documents])
    if len(places) == 0:
        raise DataError("the corpus is empty: its files hold no text. Name files that hold some.")
    if len(places) == 1:
        raise DataError(
            "the corpus holds 1 document, but needs at least 2: whole documents are held out for the eval loss. "
            "Cut it into several .txt files, or into the lines of a .jsonl file."
        )
    mask = places < fraction
    if not mask.any():
        mask[places.argmin()] = True
    elif mask.all():
        mask[places.argmax()] = False
    return mask


def _place(document: str) -> float:
    """Spread documents evenly over [0, 1) by their text."""
    digest = hashlib.blake2b(document.encode(), digest_size=6).digest()
    return int.from_bytes(digest) / 2**48
