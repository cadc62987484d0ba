"""Tokenize the records of a source in their order, on threads or in processes.

[Note: where tokenizing runs] A small source is tokenized in this process: by its threads where the library releases the
interpreter's lock, else by one. What follows after so many characters goes to processes, whose start would have taken
longer before. The result is the same, for records are grouped before, and taken back in order.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from threading import local
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.processes import usable_cores
from ..config import FIELDS, DataConfig, SourceConfig
from ..documents import Documents, mixed_column
from ..reading.records import Record, theirs
from ..split import Split, is_nearer, place_of, split_of
from ..tokenizer import no_tokenizer_threads, token_dtype
from .chat_template import read_chat_template
from .examples import Counts, Encoder, Example
from .worker import Worker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH_CHARACTERS = 1 << 18
_IN_THIS_PROCESS = 1 << 25
_ON_ONE_THREAD = 1 << 21
"""Characters after which processes take over: where threads share the work, and where they cannot."""
_MOST_PROCESSES = 32
"""One reads for all."""


Work = Callable[[list[Record]], "Piece"]


@dataclass(frozen=True)
class Tokenizing:
    """How the records of a source become tokens; plain values, which a process can be sent.

    Attributes:
        options: of `Encoder`, but for the tokenizer and the format.
        fraction: of the records, which are to be held out.
    """

    source: SourceConfig
    options: dict[str, Any]
    fraction: float


def tokenizing(source: SourceConfig, config: DataConfig, fraction: float) -> Tokenizing:
    """How a run tokenizes one of its sources."""
    too_long = config.too_long_for(source.format)
    options = {
        "loss_on": config.loss_on,
        "chat_template": None if config.chat_template is None else read_chat_template(config.chat_template),
        "too_long": too_long,
        # Documents that are cut anywhere may have any length.
        "seq_len": None if too_long is None else config.seq_len,
        "fields": source.fields,
        "columns": source.columns,
    }
    return Tokenizing(source, options, fraction)


@dataclass(frozen=True)
class Piece:
    """Some records, tokenized.

    Attributes:
        documents: those of each side that has any, in order.
        nearest: of each side, the record that is nearest to the other: its place, and its documents, [first, stop).
        kept: how many of the records have become documents.
    """

    documents: dict[Split, Documents]
    nearest: dict[Split, tuple[float, int, int]]
    counts: Counts
    kept: int


def tokenized(records: Iterable[Record], how: Tokenizing, tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    """Yield the tokens of records, in their order; see [Note: where tokenizing runs].

    Only so many records are in memory at once.

    Raises:
        DataError: a record cannot be read or encoded.
    """
    cores = usable_cores()
    with no_tokenizer_threads():
        encode = PieceEncoder(how, tokenizer)
        on_threads = how.source.format == "text" and encode.on_threads
        batches = _batches(records)
        at_first = _first(batches, _IN_THIS_PROCESS if on_threads else _ON_ONE_THREAD)
        yield from _in_order(at_first, encode, cores if on_threads else 1)
        rest = next(batches, None)
        if rest is not None:
            with _Processes(how, tokenizer) as processes:
                yield from _in_order(chain([rest], batches), processes, min(cores, _MOST_PROCESSES))


class PieceEncoder:
    """Makes pieces of records; each process has one.

    Attributes:
        on_threads: whether several threads may call it, and gain by it.
    """

    def __init__(self, how: Tokenizing, tokenizer: PreTrainedTokenizerBase) -> None:
        self._encoder = Encoder(tokenizer, how.source.format, **how.options)
        self._how = how
        self._dtype = token_dtype(tokenizer)
        # Tokenizers written in Python are not known to be safe on several threads.
        self.on_threads = bool(tokenizer.is_fast)

    def __call__(self, records: list[Record]) -> Piece:
        found, counts = self._encoder.encode(records)
        examples: dict[Split, list[Example]] = {}
        nearest: dict[Split, tuple[float, int, int]] = {}
        for record, made in zip(records, found, strict=True):
            if made:
                place = place_of(content_of(record, self._how.source))
                side = split_of(place, self._how.fraction)
                kept = examples.setdefault(side, [])
                if side not in nearest or is_nearer(place, nearest[side][0], side):
                    nearest[side] = (place, len(kept), len(kept) + len(made))
                kept += made
        columns = tuple(self._how.source.columns)
        documents = {side: joined(kept, self._dtype, columns) for side, kept in examples.items()}
        return Piece(documents, nearest, counts, sum(map(bool, found)))


def content_of(record: Record, source: SourceConfig) -> str:
    """What an example says, whatever else the source tells of it; equal ones are on the same side."""
    value = record.value
    if source.format == "text":
        return str(value[theirs("text", source)])
    names = {theirs(name, source) for name in FIELDS[source.format]}
    return json.dumps({name: value[name] for name in sorted(names & value.keys())}, sort_keys=True, default=str)


def joined(examples: list[Example], dtype: np.dtype, columns: tuple[str, ...]) -> Documents:
    """One after another in arrays.

    Raises:
        DataError: a column has one number in some, and one for each token in others.
    """
    tokens = np.concatenate([example.tokens for example in examples]).astype(dtype, copy=False)
    ends = np.cumsum([len(example.tokens) for example in examples], dtype=np.int64)
    labelled = None
    if any(example.labelled is not None for example in examples):
        every = [np.ones(len(each.tokens), bool) if each.labelled is None else each.labelled for each in examples]
        labelled = np.concatenate(every)
    found = {name: _column([example.columns[name] for example in examples], name) for name in columns}
    return Documents(tokens, ends, labelled, found)


def _column(values: list[Any], name: str) -> np.ndarray:
    kinds = {isinstance(value, list) for value in values}
    if len(kinds) > 1:
        raise mixed_column(name)
    flat = [each for value in values for each in value] if kinds == {True} else values
    return np.array(flat, np.int64 if all(isinstance(each, int) for each in flat) else np.float64)


class _Processes:
    """Encodes in processes, one for each thread that calls it; a context, on leaving which they have ended."""

    def __init__(self, how: Tokenizing, tokenizer: PreTrainedTokenizerBase) -> None:
        # Loading it there would import torch, to look through the models that it may be of.
        self._make = (PieceEncoder, how, tokenizer)
        self._mine = local()
        self._all: list[Worker] = []

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._all:
            worker.close()

    def __call__(self, records: list[Record]) -> Piece:
        worker: Worker | None = getattr(self._mine, "worker", None)
        if worker is None:
            worker = self._mine.worker = Worker(*self._make)
            self._all.append(worker)
        piece: Piece = worker.call(records)
        return piece


def _in_order(batches: Iterable[list[Record]], encode: Work, threads: int) -> Iterator[Piece]:
    """The pieces of batches in their order, by several threads, with few of them in memory."""
    pending: deque[Future[Piece]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for batch in batches:
                pending.append(pool.submit(encode, batch))
                if len(pending) > 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Group records until they hold enough characters to be worth a task."""
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += size_of(record.value)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _first(batches: Iterator[list[Record]], characters: int) -> Iterator[list[Record]]:
    """Those that hold about so many characters."""
    for _, batch in zip(range(max(1, characters // _BATCH_CHARACTERS)), batches, strict=False):
        yield batch


def size_of(value: Any) -> int:
    """About how many characters a value has."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(size_of, value.values()))
    if isinstance(value, list) and value and isinstance(value[0], str | dict | list):
        return sum(map(size_of, value))
    return 4 * len(value) if isinstance(value, list) else 4
