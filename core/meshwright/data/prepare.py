"""Turn a corpus into packed sequences, once, and find them again.

The cache key covers all that changes the token streams; `seq_len` does not, and only cuts them. Files of a corpus
enter the key by path, size and time, so that a warm start reads none of them. The fingerprint is of the tokens
themselves, and is equal wherever the same data were prepared.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ConfigError, DataError
from .cache import cache_root, cached_entry
from .config import DEFAULT_VOCAB_SIZE, DataConfig
from .corpus import Corpus, find_corpus
from .documents import Documents
from .rows import StreamRows
from .split import SPLITS, Split, is_nearer, place_of, split_of, training_documents
from .tokenfile import TokenFile
from .tokenizer import encode, load_tokenizer, token_dtype, train_tokenizer, vocab_size_of

FORMAT = 1
"""Raised with every change to what an entry holds, or to how the tokens are made."""

_CHUNK = 1 << 20
_TOKENIZER_FILES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja"})


@dataclass(frozen=True)
class PreparedData:
    """A tokenized corpus, cut into sequences.

    Attributes:
        tokenizer_dir: for `AutoTokenizer.from_pretrained`; in the cache where the tokenizer was trained.
        vocab_size: rows that the model's embedding needs.
        directory: the cache entry.
        documents: in both splits together.
        fingerprint: of the tokens and their split, whatever the cache and `seq_len`; hexadecimal.
    """

    train: StreamRows
    held_out: StreamRows
    tokenizer_dir: Path
    vocab_size: int
    directory: Path
    documents: int
    fingerprint: str


@dataclass(frozen=True)
class _Meta:
    """What an entry says of itself, written last."""

    vocab_size: int
    documents: dict[str, int]
    fingerprint: str
    sizes: dict[str, int]
    """Bytes of each file of the entry, by relative path: an entry that lacks any is incomplete."""


@dataclass(frozen=True)
class _Entry:
    meta: _Meta
    tokens: dict[Split, np.ndarray]


def prepare(config: DataConfig, *, tokenizer_dir: str | Path | None = None) -> PreparedData:
    """Find the corpus of `config`, tokenize it unless that was done before, and cut it into sequences.

    Any number of processes may call this at once; one works and the others wait for it.

    Args:
        config: corpus, tokenizer and lengths.
        tokenizer_dir: a model's own tokenizer, used where `config.tokenizer` is None. None trains one on the
            training documents.

    Raises:
        ConfigError: `config.vocab_size` is set, but `tokenizer_dir` leaves nothing to train.
        DataError: the corpus, the tokenizer or the cache cannot be used, or a split does not fill one sequence.
    """
    corpus = find_corpus(config.corpus, config.text_field)
    source = _tokenizer_source(config, tokenizer_dir)
    directory = cache_root(config.cache_dir) / "data" / _key(config, corpus, source)
    entry = cached_entry(directory, load=_load, build=lambda place: _build(place, config, corpus, source))
    for split in SPLITS:
        _check_length(split, entry, config)
    return PreparedData(
        train=_stream(entry.tokens["train"], config.seq_len),
        held_out=_stream(entry.tokens["held_out"], config.seq_len),
        tokenizer_dir=source or directory / "tokenizer",
        vocab_size=entry.meta.vocab_size,
        directory=directory,
        documents=sum(entry.meta.documents.values()),
        fingerprint=entry.meta.fingerprint,
    )


def _stream(tokens: np.ndarray, seq_len: int) -> StreamRows:
    return StreamRows(Documents(tokens, np.array([len(tokens)])), seq_len)


def _tokenizer_source(config: DataConfig, fallback: str | Path | None) -> Path | None:
    if config.tokenizer is not None:
        return Path(config.tokenizer).expanduser().absolute()
    if fallback is None:
        return None
    if config.vocab_size != DEFAULT_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size={config.vocab_size} is the size of a trained tokenizer, but the model brings its own, in "
            f"{fallback}. Leave vocab_size out."
        )
    return Path(fallback).expanduser().absolute()


def _key(config: DataConfig, corpus: Corpus, source: Path | None) -> str:
    """Hash everything that changes the token streams."""
    parts: dict[str, Any] = {
        "format": FORMAT,
        "python": sys.version,
        "tokenizers": version("tokenizers"),
        "files": [(str(file.path), file.size, file.mtime_ns) for file in corpus.files],
        "text_field": config.text_field,
        "eval_fraction": config.eval_fraction,
    }
    if source is None:
        parts["vocab_size"] = config.vocab_size
    else:
        parts["transformers"] = version("transformers")
        parts["tokenizer"] = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(source.glob("*"))
            if path.is_file() and path.suffix in _TOKENIZER_FILES and not path.name.endswith(".index.json")
        }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _build(directory: Path, config: DataConfig, corpus: Corpus, source: Path | None) -> None:
    """Fill an entry: the token stream of each split, the tokenizer if it is trained, and last what it holds.

    The corpus is read once, and once before to train a tokenizer; neither it nor its tokens are ever in memory whole.
    """
    # An unusable tokenizer is found before the corpus is read.
    tokenizer = load_tokenizer(source) if source else None
    if tokenizer is None:
        tokenizer = train_tokenizer(training_documents(corpus.documents(), config.eval_fraction), config.vocab_size)
        tokenizer.save_pretrained(directory / "tokenizer")
    documents = _write_splits(directory, tokenizer, corpus, config.eval_fraction)
    corpus.check_unchanged()

    meta = _Meta(
        vocab_size=vocab_size_of(tokenizer),
        documents=documents,
        fingerprint=_fingerprint(directory),
        sizes=_sizes(directory),
    )
    (directory / "meta.json").write_text(json.dumps(asdict(meta), indent=1), encoding="utf-8")


def _write_splits(directory: Path, tokenizer: Any, corpus: Corpus, fraction: float) -> dict[str, int]:
    """Write the token stream of each split; returns the documents of each.

    Raises:
        DataError: there are fewer than two documents.
    """
    places: deque[float] = deque()
    documents: Counter[Split] = Counter()
    # Of each side, the document that is nearest to the other: its place, and where its tokens are.
    nearest: dict[Split, tuple[float, int, int]] = {}

    def read() -> Iterator[str]:
        for document in corpus.documents():
            places.append(place_of(document))
            yield document

    with ExitStack() as stack:
        dtype = token_dtype(tokenizer)
        files = {split: stack.enter_context(TokenFile(directory / f"{split}.npy", dtype)) for split in SPLITS}
        for tokens in encode(tokenizer, read()):
            place = places.popleft()
            side = split_of(place, fraction)
            start = files[side].tokens
            files[side].append(tokens)
            documents[side] += 1
            if side not in nearest or is_nearer(place, nearest[side][0], side):
                nearest[side] = (place, start, files[side].tokens)
        _check_documents(documents.total())
        for full, empty in (SPLITS, SPLITS[::-1]):
            if not documents[empty]:
                _, start, stop = nearest[full]
                files[empty].append(files[full].take_out(start, stop))
                documents.update({full: -1, empty: 1})
    return {split: documents[split] for split in SPLITS}


def _check_documents(count: int) -> None:
    if count == 0:
        raise DataError("the corpus is empty: its files hold no text. Name files that hold some.")
    if count == 1:
        raise DataError(
            "the corpus holds 1 document, but needs at least 2: whole documents are held out for the eval loss. "
            "Cut it into several .txt files, or into the lines of a .jsonl file."
        )


def _fingerprint(directory: Path) -> str:
    """Of the tokens of an entry; see `PreparedData`."""
    digest = hashlib.sha256()
    for split in SPLITS:
        tokens = np.load(directory / f"{split}.npy", mmap_mode="r")
        digest.update(f"{split} {tokens.dtype.str} {len(tokens)} ".encode())
        for start in range(0, len(tokens), _CHUNK):
            digest.update(tokens[start : start + _CHUNK].data)
    return digest.hexdigest()[:32]


def _load(directory: Path) -> _Entry | None:
    """Open an entry, the tokens memory-mapped; None where it is missing, incomplete or corrupt."""
    try:
        meta = _Meta(**json.loads((directory / "meta.json").read_text(encoding="utf-8")))
        if not _sizes(directory).items() >= meta.sizes.items():
            return None
        tokens = {split: np.load(directory / f"{split}.npy", mmap_mode="r") for split in SPLITS}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return _Entry(meta, tokens)


def _sizes(directory: Path) -> dict[str, int]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "meta.json"]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in sorted(files)}


def _check_length(split: Split, entry: _Entry, config: DataConfig) -> None:
    tokens, documents = len(entry.tokens[split]), entry.meta.documents[split]
    if tokens >= config.seq_len:
        return
    share = "larger" if split == "held_out" else "smaller"
    shorter = f", seq_len of at most {tokens}" if tokens >= 2 else ""
    raise DataError(
        f"the {split} split does not fill one sequence: its {documents} documents hold {tokens} tokens, but "
        f"seq_len={config.seq_len}. Give more documents{shorter}, or a {share} eval_fraction "
        f"(now {config.eval_fraction}: {entry.meta.documents['train']} documents for training, "
        f"{entry.meta.documents['held_out']} held out)."
    )
