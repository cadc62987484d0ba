"""What becomes of documents that are longer than a sequence, or in which nothing is learnt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from ...base.errors import DataError
from ..config import TooLong


@dataclass(frozen=True)
class Example:
    """A tokenized document of T tokens.

    Attributes:
        tokens: (T,), uint16 or uint32, special tokens among them.
        labelled: (T,), bool: tokens to be learnt; None: all, and then so for all documents of a source.
        columns: further entries by name: a number, or a list of T numbers.
    """

    tokens: np.ndarray
    labelled: np.ndarray | None = None
    columns: dict[str, float | int | list[float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def learnt(self) -> int:
        """How many tokens are learnt: the first is not, whatever it says, since nothing stands before it."""
        return max(len(self) - 1, 0) if self.labelled is None else int(np.count_nonzero(self.labelled[1:]))

    def part(self, start: int, stop: int) -> Example:
        """The tokens of [start, stop), with what goes with them."""
        labelled = None if self.labelled is None else self.labelled[start:stop]
        columns = {
            name: value[start:stop] if isinstance(value, list) else value for name, value in self.columns.items()
        }
        return Example(self.tokens[start:stop], labelled, columns)


@dataclass(frozen=True)
class Counts:
    """What became of records; the counts of parts of a source add up.

    Attributes:
        records: that were read.
        documents: that were made of them.
        tokens: of these documents.
        labelled: their tokens that are learnt.
        cut: documents that were too long, of which the beginning is left.
        dropped: documents that were too long and are left out.
        split: documents that were too long and became several.
        unlearnt: documents, or pieces of one, that are left out since nothing in them is learnt: empty texts, and
            answers that were cut off.
        unanswered: turns of conversations behind their last answer, which are left out.
    """

    records: int = 0
    documents: int = 0
    tokens: int = 0
    labelled: int = 0
    cut: int = 0
    dropped: int = 0
    split: int = 0
    unlearnt: int = 0
    unanswered: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(Counts)))


def fitted(
    documents: Sequence[Example], *, where: str, too_long: TooLong, seq_len: int | None, together: bool
) -> tuple[list[Example], Counts]:
    """Make documents of at most `seq_len` tokens in which something is learnt.

    Args:
        documents: of one record.
        where: the record.
        too_long: see `DataConfig.too_long`.
        seq_len: None: any length.
        together: if one of the documents is left out, so are the others.

    Raises:
        DataError: one is longer, and that is an error.
    """
    kept: list[Example] = []
    counts = Counts()
    for document in documents:
        pieces, own = _pieces(document, where, too_long, seq_len)
        counts += own
        for piece in pieces:
            if piece.learnt():
                kept.append(piece)
            else:
                counts += Counts(unlearnt=1)
    if together and len(kept) < len(documents):
        if counts.dropped:
            counts = replace(counts, dropped=len(documents), cut=0, unlearnt=0)
        else:
            counts = replace(counts, unlearnt=len(documents), cut=0)
        kept = []
    return kept, counts + _totals(kept)


def _pieces(document: Example, where: str, too_long: TooLong, seq_len: int | None) -> tuple[list[Example], Counts]:
    length = len(document)
    if seq_len is None or length <= seq_len:
        return [document], Counts()
    if too_long == "cut":
        return [document.part(0, seq_len)], Counts(cut=1)
    if too_long == "drop":
        return [], Counts(dropped=1)
    if too_long == "split":
        return list(_split(document, seq_len)), Counts(split=1)
    raise DataError(
        f"{where}: {length:,} tokens, but seq_len={seq_len:,}. Set seq_len to at least {length}, or say what becomes "
        "of what is longer: too_long: cut keeps the beginning, split makes several of it, drop leaves it out."
    )


def _split(document: Example, seq_len: int) -> Iterator[Example]:
    for start in range(0, len(document), seq_len):
        yield document.part(start, min(start + seq_len, len(document)))


def _totals(documents: Sequence[Example]) -> Counts:
    return Counts(
        documents=len(documents),
        tokens=sum(map(len, documents)),
        labelled=sum(document.learnt() for document in documents),
    )
