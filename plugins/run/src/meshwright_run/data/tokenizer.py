"""Train a byte-level BPE tokenizer, load one from a local directory, and tokenize text with supervised spans.

[Note: no tokenizer threads] The `tokenizers` library has its own thread pool, which a fork (of a data loader, for
example) loses: older releases then warn, and the child may hang. So the pool is disabled here. Documents are encoded
on Python threads, which end with the call; the library releases the GIL meanwhile.

[Note: edges] A span starts where a prompt ends. At inference the model sees only the tokens of the prompt, so in
training no token may cross that edge either. The text is tokenized at once, and split at an edge only if its tokens
before the edge differ from the tokens of the text before the edge. Usually a special token precedes an edge, and they
are equal.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.plugin import DataError, explain_library_error, read_json_object, read_json_object_or_empty

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = "<|endoftext|>"
_PARALLELISM_VARIABLE = "TOKENIZERS_PARALLELISM"
_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
_ANCHORS = ("\n", "a", ".")

Span = tuple[int, int]


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a fast byte-level BPE tokenizer, which can encode any text and ends documents with `EOS`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with disable_tokenizer_threads():
        tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, clean_up_tokenization_spaces=False)


def has_tokenizer(directory: str | Path) -> bool:
    """Return whether `directory` holds the vocabulary of a tokenizer; the directory of a model may not."""
    return any(any(Path(directory).glob(pattern)) for pattern in _VOCABULARY_FILES)


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in a local directory. Raises DataError if it is not usable or has no eos token."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise DataError(
            f"tokenizer directory {str(directory)!r} does not exist ({path.absolute()}). It must be a local directory; "
            "nothing is downloaded. Leave tokenizer out to train one on the corpus."
        )
    # AutoTokenizer silently makes an empty tokenizer from a directory with only a model's config.json.
    if not has_tokenizer(path):
        raise DataError(
            f"{path} holds no tokenizer: none of {', '.join(_VOCABULARY_FILES)}. Save one there with "
            "`tokenizer.save_pretrained`, or leave tokenizer out to train one on the corpus."
        )
    try:
        with disable_tokenizer_threads():
            tokenizer = _find_tokenizer_class(path).from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
    except BaseException as error:  # parsers in transformers can raise any exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # raised by Rust code
            raise
        raise DataError(f"the tokenizer in {path} cannot be loaded: {explain_library_error(error)}") from error
    _check_loaded(tokenizer, path)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"the tokenizer in {path} has no eos token, which separates documents. Set eos_token in its "
            "tokenizer_config.json to a token that ends a text."
        )
    return tokenizer


def _find_tokenizer_class(path: Path) -> Any:
    """Return the class that loads a tokenizer. AutoTokenizer imports torch, which is avoided if possible."""
    settings = path / "tokenizer_config.json"
    if settings.is_file() and not (path / "config.json").exists():
        named = read_json_object(settings).get("tokenizer_class")
        if named in ("TokenizersBackend", "PreTrainedTokenizerFast") and (path / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    from meshwright.plugin import disable_remote_code_prompt

    _check_classes(path)
    disable_remote_code_prompt()
    return AutoTokenizer


def _check_classes(path: Path) -> None:
    """Raise DataError if files name a class other than a tokenizer, such as a model: transformers would load it."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    settings, config = (read_json_object_or_empty(path / name) for name in ("tokenizer_config.json", "config.json"))
    types = [each.get("model_type") for each in (config, config.get("encoder")) if isinstance(each, Mapping)]
    of_types = [TOKENIZER_MAPPING_NAMES.get(each) for each in types if isinstance(each, str)]
    for name in (settings.get("tokenizer_class"), config.get("tokenizer_class"), *of_types):
        # transformers tries a name with and without "Fast" at its end.
        for candidate in (f"{name}Fast", *accumulate(str(name).split("Fast"), "{}Fast{}".format)):
            candidate_cls = getattr(transformers, candidate, None) if isinstance(name, str) else None
            is_missing = (
                type(candidate_cls).__name__ == "DummyObject"
            )  # a placeholder for a class that needs another package
            if not (candidate_cls is None or is_missing or _is_tokenizer_class(candidate_cls)):
                raise DataError(
                    f"the tokenizer in {path} cannot be loaded: tokenizer_class={name!r} is not a tokenizer class. "
                    f"Name the one that it was saved with in its tokenizer_config.json."
                )


def _is_tokenizer_class(found: object) -> bool:
    from transformers import PreTrainedTokenizerBase

    return isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)


def _check_loaded(tokenizer: Any, path: Path) -> None:
    if not _is_tokenizer_class(type(tokenizer)):
        raise DataError(f"{path} holds no tokenizer, but an object of type {type(tokenizer).__name__}.")
    if not isinstance(tokenizer.model_max_length, int | float):
        raise DataError(
            f"the tokenizer in {path} has model_max_length={tokenizer.model_max_length!r}, which is not a number. "
            f"Correct it in its tokenizer_config.json."
        )
    entries = len(tokenizer.get_vocab())
    if get_vocab_size(tokenizer) > 2**20 + 2 * entries:
        raise DataError(
            f"the tokenizer in {path} has {entries:,} tokens, but ids up to {get_vocab_size(tokenizer) - 1:,}. "
            "Each id needs a row of the model's embedding. Number the tokens without large gaps."
        )


def get_vocab_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the number of rows that an embedding needs: the largest token id, including added tokens, plus one."""
    return int(max(tokenizer.get_vocab().values())) + 1


def choose_token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """Return the dtype for stored tokens: uint16 if the vocabulary fits, else uint32."""
    return np.dtype(np.uint16 if get_vocab_size(tokenizer) <= 1 << 16 else np.uint32)


@contextmanager
def disable_tokenizer_threads() -> Iterator[None]:
    """Disable the library's own threads with its environment variable, which it reads at each call."""
    before = os.environ.get(_PARALLELISM_VARIABLE)
    os.environ[_PARALLELISM_VARIABLE] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM_VARIABLE]
        else:
            os.environ[_PARALLELISM_VARIABLE] = before


@dataclass(frozen=True)
class Document:
    """A document before tokenization. `supervised_spans`: disjoint character spans, in order; None: the full text.

    `add_bos`: prepend the tokens that the tokenizer puts before a text. `add_eos`: append those that it puts after a
    text, and an eos token; they are supervised if the end of the text is. `num_trailing_turns`: number of turns after
    the last answer, which are left out.
    """

    text: str
    supervised_spans: tuple[Span, ...] | None = None
    add_bos: bool = False
    add_eos: bool = False
    num_trailing_turns: int = 0


@dataclass(frozen=True)
class _Encoding:
    ids: list[int]
    offsets: list[Span]


class DocumentTokenizer:
    """Tokenize documents, and add special tokens around them as `tokenizer("x")` does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        if self._backend is not None:
            # A tokenizer saved with a maximum length would truncate documents.
            self._backend.no_truncation()
            self._backend.no_padding()
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._dtype = choose_token_dtype(tokenizer)
        self._prefix, self._suffix = self._find_special_tokens()
        # Some tokenizers put a space before a text.
        self._is_position_independent = self._encode_ids("\na") == self._encode_ids("\n") + self._encode_ids("a")

    def tokenize(self, documents: Sequence[Document]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """Return the tokens, (T,), and loss mask, (T,) bool or None for all supervised, of each document."""
        full_texts = iter(
            self._encode_batch([document.text for document in documents if document.supervised_spans is None])
        )
        tokenized = []
        for document in documents:
            if document.supervised_spans is None:
                tokenized.append(self._add_special_tokens(document, next(full_texts), {}))
            else:
                edges = sorted({edge for span in document.supervised_spans for edge in span})
                tokenized.append(
                    self._add_special_tokens(
                        document, *self._encode_with_edges(document.text, edges, is_continuation=False)
                    )
                )
        return tokenized

    def _add_special_tokens(
        self, document: Document, ids: list[int], token_counts: Mapping[int, int]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Add the special tokens that a document lacks at its ends, without duplicates."""
        before = self._prefix if document.add_bos and ids[: len(self._prefix)] != self._prefix else []
        after = self._suffix if document.add_eos and ids[-1:] != self._suffix[-1:] else []
        tokens = np.array([*before, *ids, *after], self._dtype)
        if document.supervised_spans is None:
            return tokens, None
        loss_mask = np.zeros(len(tokens), bool)
        for start, stop in document.supervised_spans:
            loss_mask[len(before) + token_counts[start] : len(before) + token_counts[stop]] = True
        if document.supervised_spans and document.supervised_spans[-1][1] == len(document.text):
            loss_mask[len(before) + len(ids) :] = True
        return tokens, loss_mask

    def _encode_with_edges(
        self, text: str, edges: list[int], is_continuation: bool
    ) -> tuple[list[int], dict[int, int]]:
        """Return the tokens of a text, and how many of them precede each edge; see [Note: edges]."""
        encoding = self._encode(text, is_continuation)
        added = [index for index in range(len(encoding.offsets)) if encoding.ids[index] in self._added]
        counts: dict[int, int] = {}
        for number, edge in enumerate(edges):
            count = self._count_tokens_before(text, edge, encoding, added, is_continuation)
            if count is None:
                left, left_counts = self._encode_with_edges(text[:edge], edges[:number], is_continuation)
                right, right_counts = self._encode_with_edges(
                    text[edge:], [each - edge for each in edges[number + 1 :]], True
                )
                moved = {each + edge: count + len(left) for each, count in right_counts.items()}
                return left + right, {**left_counts, edge: len(left), **moved}
            counts[edge] = count
        return encoding.ids, counts

    def _count_tokens_before(
        self, text: str, edge: int, encoding: _Encoding, added_indices: list[int], is_continuation: bool
    ) -> int | None:
        """Return the number of tokens before an edge; None if the text before the edge has other tokens on its own."""
        if edge in (0, len(text)):
            return len(encoding.ids) if edge else 0
        start = index = 0
        before = bisect_right(added_indices, edge, key=lambda each: encoding.offsets[each][1])
        if before:
            index = added_indices[before - 1]
            start, stop = encoding.offsets[index]
            if stop == edge:
                return index + 1
        prefix = self._encode(text[start:edge], is_continuation and start == 0).ids
        return index + len(prefix) if encoding.ids[index : index + len(prefix)] == prefix else None

    def _encode(self, text: str, is_continuation: bool) -> _Encoding:
        if is_continuation and not self._is_position_independent:
            for anchor in _ANCHORS:
                alone, shift = self._encode_ids(anchor), len(anchor)
                both = self._encode(anchor + text, is_continuation=False)
                if both.ids[: len(alone)] == alone:
                    offsets = [(a - shift, b - shift) for a, b in both.offsets[len(alone) :]]
                    return _Encoding(both.ids[len(alone) :], offsets)
        if self._backend is None:
            return _Encoding(self._encode_ids(text), [])
        encoding = self._backend.encode(text, add_special_tokens=False)
        return _Encoding(encoding.ids, encoding.offsets)

    def _encode_ids(self, text: str) -> list[int]:
        return self._encode_batch([text])[0]

    def _encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._backend is not None:
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]
        return [list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in texts]

    def _find_special_tokens(self) -> tuple[list[int], list[int]]:
        """Return the tokens that `tokenizer("x")` puts before and after a text, with an eos token at the end."""
        inner = self._encode_ids("x")
        full = list(self._tokenizer("x", verbose=False)["input_ids"])
        starts = [start for start in range(len(full)) if full[start : start + len(inner)] == inner]
        start = starts[0] if starts else 0
        after = full[start + len(inner) :] if starts else []
        eos = self._tokenizer.eos_token_id
        return full[:start], after if after[-1:] == [eos] else [*after, eos]
