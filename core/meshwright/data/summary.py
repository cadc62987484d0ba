"""What a run trains on, in numbers and as rows of text: for people who look at their data before they train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.types import IGNORED_LABEL
from .config import Packing
from .documents import Documents
from .encoding.examples import Counts
from .prepare import PreparedData
from .rows.feed import Feed
from .rows.layout import FILL
from .rows.rows import Rows
from .rows.stream import Stream
from .run_rows import RunRows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PADDED_STEPS = 20
"""Of rows that are padded, so many steps tell how full they are: that hangs on which ones are side by side."""


@dataclass(frozen=True)
class SourceSummary:
    """A source, without what is held out of it.

    Attributes:
        name: as the run file has it.
        lengths: tokens of each document: (D,), int64.
        learnt: share of the tokens.
        rows: that it fills.
        fill: share of the rows' tokens that is no padding; None where it depends on which rows are side by side.
        counts: of all its records, with those that are held out.
    """

    name: str
    format: str
    lengths: np.ndarray
    learnt: float
    rows: int
    fill: float | None
    counts: Counts


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a row that are learnt, or are not."""

    text: str
    learnt: bool
    tokens: int


@dataclass(frozen=True)
class ShownRow:
    """A row as a model sees it.

    Attributes:
        documents: the runs of each document in it.
        padding: tokens behind them.
        columns: what else it has, where that is a number.
    """

    documents: tuple[tuple[Run, ...], ...]
    padding: int
    columns: dict[str, float]


def summarize(data: PreparedData, rows: RunRows, kind: Packing) -> list[SourceSummary]:
    """Each source that is not read while training."""
    found = []
    for source, own in zip(data.sources, rows.training, strict=True):
        documents, counts = source.train, source.counts
        if not isinstance(own, Stream) and documents is not None and counts is not None:
            lengths = documents.lengths()
            fill = _fill(own, int(lengths.sum()), kind)
            learnt = _learnt(documents) / max(len(documents.tokens), 1)
            config = source.config
            found.append(SourceSummary(config.place, config.format, lengths, learnt, len(own), fill, counts))
    return found


def measured_fill(feed: Feed, steps: int = _PADDED_STEPS) -> float:
    """The share of tokens that is no padding in the first steps."""
    taken = places = 0
    for step in range(steps):
        for batch in feed.microbatches(step):
            for ids, labels in zip(batch["input_ids"].numpy(), batch["labels"].numpy(), strict=True):
                taken += len(ids) - _padding(ids, labels)
                places += len(ids)
    return taken / max(places, 1)


def first_rows(feed: Feed, count: int, kind: Packing, tokenizer: PreTrainedTokenizerBase) -> Iterator[ShownRow]:
    """Yield the first rows of a run, in the order in which it reads them."""
    step = 0
    while count > 0:
        for batch in feed.microbatches(step):
            for number in range(min(count, len(batch["input_ids"]))):
                row = {name: values[number].numpy() for name, values in batch.items()}
                yield shown_row(row, kind, tokenizer)
                count -= 1
        step += 1


def shown_row(row: Mapping[str, Any], kind: Packing, tokenizer: PreTrainedTokenizerBase) -> ShownRow:
    """Decode a row: `input_ids` and `labels`, (S,), and what else a batch has of it."""
    ids, labels = row["input_ids"], row["labels"]
    padding = _padding(ids, labels)
    stop = len(ids) - padding
    begins = np.array([], np.int64)
    if kind == "documents":
        begins = np.flatnonzero(row["position_ids"][:stop] == 0)
    elif kind == "stream":
        begins = np.flatnonzero(ids[: stop - 1] == tokenizer.eos_token_id) + 1
    bounds = [*sorted({0, *begins.tolist()}), stop]
    documents = tuple(tuple(_runs(ids[a:b], labels[a:b], tokenizer)) for a, b in pairwise(bounds))
    return ShownRow(documents, padding, {name: each.item() for name, each in row.items() if np.ndim(each) == 0})


def _runs(ids: np.ndarray, labels: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Iterator[Run]:
    learnt = labels != IGNORED_LABEL
    bounds = [0, *(np.flatnonzero(learnt[1:] != learnt[:-1]) + 1).tolist(), len(ids)]
    for start, stop in pairwise(bounds):
        text = tokenizer.decode(ids[start:stop].tolist(), skip_special_tokens=False)
        yield Run(str(text), bool(learnt[start]), stop - start)


def _padding(ids: np.ndarray, labels: np.ndarray) -> int:
    """How many tokens at the end of a row stand for nothing."""
    filled = np.flatnonzero((ids != FILL) | (labels != IGNORED_LABEL))
    return len(ids) - (int(filled[-1]) + 1 if len(filled) else 0)


def _learnt(documents: Documents) -> int:
    """Tokens that are learnt: never the first of a document."""
    if documents.labelled is None:
        return len(documents.tokens) - len(documents)
    firsts = np.concatenate([[0], documents.ends[:-1]]).astype(np.int64)
    return int(np.count_nonzero(documents.labelled)) - int(np.count_nonzero(documents.labelled[firsts]))


def _fill(rows: Rows, tokens: int, kind: Packing) -> float | None:
    if kind == "stream":
        return 1.0
    return None if kind == "none" else tokens / (len(rows) * rows.seq_len)
