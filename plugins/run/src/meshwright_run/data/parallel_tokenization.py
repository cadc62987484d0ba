"""Tokenize the records of a source in order, on threads or in processes.

[Note: where tokenizing runs] A small source is tokenized in this process, on threads if the library releases the GIL.
After a number of characters that takes about as long as starting a process, processes take over, with the same result.

[Note: worker processes] A fork would lose the threads of torch and tokenizers and may hang; multiprocessing would run
the user's script again. So a worker is a new Python process that runs `run_worker`, and ends when its input does.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from meshwright.plugin import SAFE_PYTHON, DataError, count_usable_cores, install_output_escaping

from .chat_template import read_chat_template
from .config import FIELDS, DataConfig, SourceConfig
from .documents import (
    Split,
    TokenizedDocuments,
    assign_split,
    hash_to_unit_interval,
    is_nearer_boundary,
    mixed_column_error,
)
from .encoder import Encoder, EncodingCounts, Example
from .prompt_template import ALPACA, NONE, get_placeholders
from .sources import Record, get_source_field
from .tokenizer import choose_token_dtype, disable_tokenizer_threads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS_PER_BATCH = 1 << 18
_MAX_THREADED_CHARACTERS = 1 << 25
_MAX_SINGLE_THREAD_CHARACTERS = 1 << 21
"""Characters after which processes take over, if threads share the work and if they cannot."""
_MAX_PROCESSES = 32
"""Limit, since one process reads for all."""
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Tokenization:
    """How the records of a source are tokenized: options of `Encoder`, and the fraction that is held out."""

    source: SourceConfig
    options: dict[str, Any]
    held_out_fraction: float


def build_tokenization(source: SourceConfig, config: DataConfig, held_out_fraction: float) -> Tokenization:
    too_long = config.resolve_too_long(source.format)
    options = {
        "loss_on": config.loss_on,
        "chat_template": None if config.chat_template is None else read_chat_template(config.chat_template),
        "too_long": too_long,
        # Documents of a stream may have any length.
        "seq_len": None if too_long is None else config.seq_len,
        "fields": source.field_names,
        "columns": source.columns,
    }
    # Entries that were written before there were templates keep their keys.
    if (template := config.resolve_template(source)) != NONE:
        options["template"] = template
    return Tokenization(source, options, held_out_fraction)


@dataclass(frozen=True)
class TokenizedChunk:
    """Tokenized records; `num_kept` of them became documents.

    `errors`: of the records that cannot be used. `nearest_boundary`: for each split, the record nearest to the other:
    its hash value and documents, [first, stop).
    """

    documents: dict[Split, TokenizedDocuments]
    nearest_boundary: dict[Split, tuple[float, int, int]]
    counts: EncodingCounts
    num_kept: int
    errors: tuple[DataError, ...] = ()


EncodeRecords = Callable[[list[Record]], TokenizedChunk]


def tokenize_records(
    records: Iterable[Record], tokenization: Tokenization, tokenizer: PreTrainedTokenizerBase
) -> Iterator[TokenizedChunk]:
    """Yield the tokens of records in order, with few of them in memory; see [Note: where tokenizing runs]."""
    cores = count_usable_cores()
    with disable_tokenizer_threads():
        encode = ChunkEncoder(tokenization, tokenizer, keep_errors=True)
        # Tokenizers written in Python are not known to be thread-safe.
        use_threads = tokenization.source.base_format == "text" and bool(tokenizer.is_fast)
        batches = _batches(records)
        max_characters = _MAX_THREADED_CHARACTERS if use_threads else _MAX_SINGLE_THREAD_CHARACTERS
        first_batches = islice(batches, max(1, max_characters // _CHARACTERS_PER_BATCH))
        yield from _map_in_order(first_batches, encode, cores if use_threads else 1)
        rest = next(batches, None)
        if rest is not None:
            with _start_workers(tokenization, tokenizer) as encode_there:
                yield from _map_in_order(chain([rest], batches), encode_there, min(cores, _MAX_PROCESSES))


class ChunkEncoder:
    def __init__(
        self, tokenization: Tokenization, tokenizer: PreTrainedTokenizerBase, keep_errors: bool = False
    ) -> None:
        """Load nothing. With `keep_errors`, errors of records are in the result instead of raised."""
        self._encoder = Encoder(tokenizer, tokenization.source.base_format, **tokenization.options)
        self._tokenization, self._dtype = tokenization, choose_token_dtype(tokenizer)
        self._keep_errors = keep_errors

    def __call__(self, records: list[Record]) -> TokenizedChunk:
        errors: list[DataError] = []
        encoded, counts = self._encoder.encode(records, errors if self._keep_errors else None)
        examples: dict[Split, list[Example]] = {}
        nearest: dict[Split, tuple[float, int, int]] = {}
        for record, record_examples in zip(records, encoded, strict=True):
            if record_examples:
                hash_value = hash_to_unit_interval(_get_split_content(record, self._tokenization))
                split = assign_split(hash_value, self._tokenization.held_out_fraction)
                split_examples = examples.setdefault(split, [])
                if split not in nearest or is_nearer_boundary(hash_value, nearest[split][0], split):
                    nearest[split] = (hash_value, len(split_examples), len(split_examples) + len(record_examples))
                split_examples += record_examples
        columns = tuple(self._tokenization.source.columns)
        documents = {
            split: _concat_examples(split_examples, self._dtype, columns) for split, split_examples in examples.items()
        }
        return TokenizedChunk(documents, nearest, counts, sum(map(bool, encoded)), tuple(errors))


def _get_split_content(record: Record, tokenization: Tokenization) -> str:
    """Return the text or fields of a record, without columns. Records with equal content are in the same split."""
    value, source = record.fields, tokenization.source
    if source.format == "text":
        return str(value[get_source_field("text", source)])
    template = tokenization.options.get("template", NONE)
    optional = ("input",) if template == ALPACA else ()
    used = (*FIELDS[source.base_format], *source.field_names, *get_placeholders(template), *optional)
    names = {get_source_field(name, source) for name in used if name not in source.columns}
    return json.dumps({name: value[name] for name in sorted(names & value.keys())}, sort_keys=True, default=str)


def _concat_examples(examples: list[Example], dtype: np.dtype, columns: tuple[str, ...]) -> TokenizedDocuments:
    tokens = np.concatenate([example.tokens for example in examples]).astype(dtype, copy=False)
    ends = np.cumsum([len(example) for example in examples], dtype=np.int64)
    loss_mask = None
    if any(example.loss_mask is not None for example in examples):
        masks = [np.ones(len(each), bool) if each.loss_mask is None else each.loss_mask for each in examples]
        loss_mask = np.concatenate(masks)
    found = {name: _concat_column([example.columns[name] for example in examples], name) for name in columns}
    return TokenizedDocuments(tokens, ends, loss_mask, found)


def _concat_column(values: list[Any], name: str) -> np.ndarray:
    kinds = {isinstance(value, list) for value in values}
    if len(kinds) > 1:
        raise mixed_column_error(name)
    flat = [each for value in values for each in value] if kinds == {True} else values
    return np.array(flat, np.int64 if all(isinstance(each, int) for each in flat) else np.float64)


def _map_in_order(batches: Iterable[list[Record]], encode: EncodeRecords, num_threads: int) -> Iterator[TokenizedChunk]:
    pending: deque[Future[TokenizedChunk]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for batch in batches:
                pending.append(pool.submit(encode, batch))
                if len(pending) > 2 * num_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Group records into batches with enough characters to be worth a task."""
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += _count_characters(record.fields)
        if characters >= _CHARACTERS_PER_BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _count_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_count_characters, value.values()))
    if isinstance(value, list) and value and isinstance(value[0], str | dict | list):
        return sum(map(_count_characters, value))
    return 4 * len(value) if isinstance(value, list) else 4


@contextmanager
def _start_workers(tokenization: Tokenization, tokenizer: PreTrainedTokenizerBase) -> Iterator[EncodeRecords]:
    """Yield a function that encodes in worker processes, one per concurrent call. They end with the context."""
    idle: SimpleQueue[TokenizerWorker] = SimpleQueue()
    workers: list[TokenizerWorker] = []

    def encode(records: list[Record]) -> TokenizedChunk:
        try:
            worker = idle.get_nowait()
        except Empty:
            # The tokenizer is sent, since loading it may import torch.
            worker = TokenizerWorker(ChunkEncoder, tokenization, tokenizer, True)
            workers.append(worker)
        piece: TokenizedChunk = worker.call(records)
        idle.put(worker)
        return piece

    try:
        yield encode
    finally:
        for worker in workers:
            worker.close()


class TokenizerWorker:
    """A process that calls the result of `factory(*args)`, for one thread; see [Note: worker processes]."""

    def __init__(self, factory: Callable[..., Callable[[Any], Any]], *args: Any) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import run_worker; run_worker()"
        self._process = subprocess.Popen(
            [*SAFE_PYTHON, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
        )
        self._factory_call = (factory, args)
        self._is_initialized = False

    def call(self, argument: Any) -> Any:
        if not self._is_initialized:
            self._is_initialized = True
            self._request(self._factory_call)
        return self._request(argument)

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()

    def _request(self, request: Any) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise DataError("the tokenizer process has no pipes.")
        try:
            _send(stdin, request)
            is_error, answer = _receive(stdout)
        except (EOFError, BrokenPipeError):
            code = self._process.wait()
            raise DataError(
                f"a tokenizer process ended unexpectedly (exit code {code}); code -9 may mean that memory ran out."
            ) from None
        if is_error:
            raise answer
        return answer


def run_worker() -> None:
    """Serve requests on standard input and output. Output of libraries goes to stderr."""
    # Schedulers send these signals to all processes; a worker ends with its parent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    install_output_escaping()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    function: Callable[[Any], Any] | None = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            request = _receive(sys.stdin.buffer)
            try:
                if function is None:
                    factory, args = request
                    function, result = factory(*args), None
                else:
                    result = function(request)
                answer: tuple[bool, Any] = (False, result)
            except Exception as error:
                answer = (True, error)
            _send(answers, answer)


def _send(pipe: IO[bytes], value: Any) -> None:
    content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(len(content).to_bytes(_LENGTH_BYTES, "little"))
    pipe.write(content)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    return pickle.loads(_read(pipe, int.from_bytes(_read(pipe, _LENGTH_BYTES), "little")))


def _read(pipe: IO[bytes], count: int) -> bytes:
    content = pipe.read(count)
    if len(content) < count:
        raise EOFError
    return content
