"""The rows that a run trains and is evaluated on, in numbers and as text for people who look at them before."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.plugin import IGNORED_LABEL, DataError

from .cache import cache_root
from .config import DataConfig, Packing, SourceConfig
from .documents import Documents
from .encoder import Counts
from .feed import Feed
from .prepare import HELD_OUT, PreparedData
from .rows import FILL, JoinedRows, Rows, make_rows
from .sources import Record
from .stream import Stream, loader_of
from .tokenizer import load_tokenizer, no_tokenizer_threads
from .tokenizing import PieceEncoder, tokenizing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PADDED_STEPS = 20
"""Steps that tell how full padded rows are: that depends on which ones are in one microbatch."""


@dataclass(frozen=True)
class RunRows:
    """The rows of a run: of each source, its weight (None: by numbers of rows), and evaluation sets by name."""

    training: tuple[Rows | Stream, ...]
    weights: tuple[float, ...] | None
    held_out: Mapping[str, Rows]

    @property
    def streams(self) -> int:
        return sum(isinstance(each, Stream) for each in self.training)

    @property
    def at_hand(self) -> int:
        return sum(len(each) for each in self.training if not isinstance(each, Stream))

    @property
    def rows_per_epoch(self) -> int | None:
        """Of all sources together; None where one is read while training."""
        return None if self.streams else self.at_hand

    @property
    def evaluated(self) -> Rows:
        return self.held_out.get(HELD_OUT) or next(iter(self.held_out.values()))


def lay_out(data: PreparedData, config: DataConfig, *, masks: bool = False) -> RunRows:
    """Make the rows of what was prepared; `masks`: see [Note: padding without a mask] in `rows`."""
    cache = cache_root(config.cache_dir) / "rows"

    def rows_of(documents: Documents, place: str) -> Rows:
        rows = make_rows(
            documents, config.packing_kind(), config.seq_len, cache=cache, masks=masks, dtypes=data.columns
        )
        if not len(rows):
            raise DataError(
                f"{place} fills no row of seq_len={config.seq_len}: it holds {len(documents.tokens)} tokens in "
                f"{len(documents)} documents. Give more, or lower data.seq_len."
            )
        return rows

    def joined(name: str, documents: Sequence[Documents]) -> Rows:
        return JoinedRows([rows_of(each, f"the evaluation set {name!r}") for each in documents])

    weights = tuple(source.config.weight for source in data.sources if source.config.weight is not None)
    return RunRows(
        training=tuple(
            _stream(data, config, source.config, masks)
            if source.train is None
            else rows_of(source.train, repr(source.config.place))
            for source in data.sources
        ),
        weights=weights or None,
        held_out={name: joined(name, documents) for name, documents in data.held_out.items()},
    )


def _stream(data: PreparedData, config: DataConfig, source: SourceConfig, masks: bool) -> Stream:
    how = tokenizing(source, config, 0.0)

    @functools.cache
    def encoder() -> PieceEncoder:
        return PieceEncoder(how, load_tokenizer(data.tokenizer_dir))

    def encode(records: list[Record]) -> Documents | None:
        with no_tokenizer_threads():
            documents = encoder()(records).documents.get("train")
        return None if documents is None else replace(documents, group=data.group)

    def make(documents: Documents) -> Rows:
        return make_rows(documents, config.packing_kind(), config.seq_len, masks=masks)

    return Stream(source.place, lambda records: loader_of(source, records), encode, make, group=data.group)


@dataclass(frozen=True)
class SourceSummary:
    """A source without what is held out: lengths of documents, shares of tokens learnt and of rows filled, counts."""

    name: str
    format: str
    lengths: np.ndarray
    learnt: float
    rows: int
    fill: float | None
    counts: Counts


@dataclass(frozen=True)
class Run:
    text: str
    learnt: bool
    tokens: int


@dataclass(frozen=True)
class ShownRow:
    """A row as a model sees it: runs of each document, tokens of padding behind them, further numbers."""

    documents: tuple[tuple[Run, ...], ...]
    padding: int
    columns: dict[str, float]


def summarize(data: PreparedData, rows: RunRows, kind: Packing) -> list[SourceSummary]:
    found = []
    for source, own in zip(data.sources, rows.training, strict=True):
        documents, counts, config = source.train, source.counts, source.config
        if isinstance(own, Stream) or documents is None or counts is None:
            continue
        lengths, tokens = documents.lengths(), len(documents.tokens)
        fill = {"stream": 1.0, "documents": int(lengths.sum()) / (len(own) * own.seq_len)}.get(kind)
        learnt = _learnt(documents) / max(tokens, 1)
        found.append(SourceSummary(config.place, config.format, lengths, learnt, len(own), fill, counts))
    return found


def measured_fill(feed: Feed, steps: int = _PADDED_STEPS) -> float:
    """Return the share of tokens that is no padding in the first steps."""
    taken = places = 0
    for step in range(steps):
        for batch in feed.microbatches(step):
            for ids, labels in zip(batch["input_ids"].numpy(), batch["labels"].numpy(), strict=True):
                taken += len(ids) - _padding(ids, labels)
                places += len(ids)
    return taken / max(places, 1)


def first_rows(feed: Feed, count: int, kind: Packing, tokenizer: PreTrainedTokenizerBase) -> Iterator[ShownRow]:
    step = 0
    while count > 0:
        for batch in feed.microbatches(step):
            for number in range(min(count, len(batch["input_ids"]))):
                row = {name: values[number].numpy() for name, values in batch.items()}
                yield shown_row(row, kind, tokenizer)
                count -= 1
        step += 1


def shown_row(row: Mapping[str, Any], kind: Packing, tokenizer: PreTrainedTokenizerBase) -> ShownRow:
    """Decode a row: `input_ids` and `labels`, (S,), and the row's other entries of a batch."""
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
    """Count the tokens at the end of a row that stand for nothing."""
    filled = np.flatnonzero((ids != FILL) | (labels != IGNORED_LABEL))
    return len(ids) - (int(filled[-1]) + 1 if len(filled) else 0)


def _learnt(documents: Documents) -> int:
    """Count the tokens that are learnt: never the first of a document."""
    if documents.labelled is None:
        return len(documents.tokens) - len(documents)
    firsts = np.concatenate([[0], documents.ends[:-1]]).astype(np.int64)
    return int(np.count_nonzero(documents.labelled)) - int(np.count_nonzero(documents.labelled[firsts]))
