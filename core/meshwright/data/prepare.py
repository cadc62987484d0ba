"""Turn sources into tokenized documents, once, and find them again.

Each source has an entry of its own in the cache, whose key covers all that changes its tokens. Files enter the key by
path, size and time, so that a warm start reads none of them. The fingerprint is of the tokens themselves, and is equal
wherever the same data were prepared. A source that is read while training has no entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from ..base.errors import ConfigError, DataError
from .cache import cache_root
from .config import DEFAULT_VOCAB_SIZE, DataConfig, SourceConfig
from .documents import Documents
from .encoding.examples import Counts
from .encoding.tokenizing import tokenizing
from .entry import Entry, find_entry
from .reading.sources import FoundSource, find_source
from .split import SPLITS
from .tokenizer import load_tokenizer, vocab_size_of
from .trained import find_trained_tokenizer

HELD_OUT = "held_out"
"""Among the sets to evaluate on: what is held out of the sources."""


@dataclass(frozen=True)
class PreparedSource:
    """A source that a run trains on.

    Attributes:
        config: what the run file says of it.
        train: its documents, without those that are held out; None where it is read while training.
        counts: of both sides; None where it is read while training.
        fingerprint: of its tokens and their split, or of its files where it is read while training; hexadecimal.
    """

    config: SourceConfig
    train: Documents | None
    counts: Counts | None
    fingerprint: str


@dataclass(frozen=True)
class PreparedData:
    """Tokenized documents.

    Attributes:
        sources: in the order of the run file.
        held_out: documents to evaluate on by the name of their set: "held_out", of each source those that are held out,
            if any are, and each of `eval_sets`.
        tokenizer_dir: for `AutoTokenizer.from_pretrained`; in the cache where the tokenizer was trained.
        vocab_size: rows that the model's embedding needs.
        directory: the first cache entry; the root of all entries where every source is read while training.
        documents: of all sources, on both sides together.
        fingerprint: of the tokens of all sources and their split, in order, whatever the cache; hexadecimal.
        columns: what each example has beside its tokens, and the dtype in which all sources and sets have it.
        group: so many consecutive documents belong together.
    """

    sources: tuple[PreparedSource, ...]
    held_out: Mapping[str, tuple[Documents, ...]]
    tokenizer_dir: Path
    vocab_size: int
    directory: Path
    documents: int
    fingerprint: str
    columns: Mapping[str, np.dtype]
    group: int


def prepare(config: DataConfig, *, tokenizer_dir: str | Path | None = None) -> PreparedData:
    """Find the sources of `config`, and tokenize them unless that was done before.

    Any number of processes may call this at once; one works and the others wait for it.

    Args:
        config: sources, tokenizer and lengths.
        tokenizer_dir: a model's own tokenizer, used where `config.tokenizer` is None. None trains one on the
            training documents.

    Raises:
        ConfigError: `config.vocab_size` is set, but `tokenizer_dir` leaves nothing to train.
        DataError: a source, the tokenizer or the cache cannot be used, or a side does not fill one sequence.
    """
    root = cache_root(config.cache_dir)
    found = [find_source(source) for source in config.training_sources()]
    sets = {name: [find_source(each) for each in sources] for name, sources in config.evaluation_sources().items()}
    tokenizer = _given_tokenizer(config, tokenizer_dir) or find_trained_tokenizer(root, found, config)

    def entry_of(source: FoundSource, fraction: float) -> Entry:
        return find_entry(root, source, tokenizing(source.config, config, fraction), tokenizer)

    entries = [None if each.config.streaming else entry_of(each, config.eval_fraction) for each in found]
    evaluated = {name: [entry_of(each, 0.0) for each in sources] for name, sources in sets.items()}
    for source, entry in zip(found, entries, strict=True):
        if entry is not None and config.packing_kind() == "stream":
            _check_length(source, entry, config)
    kept = [entry for entry in entries if entry is not None]
    held_out = {name: tuple(entry.documents["train"] for entry in given) for name, given in evaluated.items()}
    if config.eval_fraction > 0:
        held_out = {HELD_OUT: tuple(entry.documents["held_out"] for entry in kept), **held_out}
    sources = tuple(_prepared(source, entry) for source, entry in zip(found, entries, strict=True))
    return PreparedData(
        sources=sources,
        held_out=held_out,
        tokenizer_dir=tokenizer,
        vocab_size=kept[0].vocab_size if kept else vocab_size_of(load_tokenizer(tokenizer)),
        directory=kept[0].directory if kept else root,
        documents=sum(entry.counts.documents for entry in kept),
        fingerprint=_fingerprint(sources),
        columns=_columns([*kept, *chain.from_iterable(evaluated.values())], found[0].config.columns),
        group=found[0].config.group,
    )


def _given_tokenizer(config: DataConfig, fallback: str | Path | None) -> Path | None:
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


def _prepared(source: FoundSource, entry: Entry | None) -> PreparedSource:
    if entry is not None:
        return PreparedSource(source.config, entry.documents["train"], entry.counts, entry.fingerprint)
    identity = json.dumps([source.identity(), source.config.model_dump(mode="json")], sort_keys=True)
    return PreparedSource(source.config, None, None, hashlib.sha256(identity.encode()).hexdigest()[:32])


def _fingerprint(sources: tuple[PreparedSource, ...]) -> str:
    """Of one source its own: it stays what it was before there were several."""
    if len(sources) == 1:
        return sources[0].fingerprint
    return hashlib.sha256(" ".join(source.fingerprint for source in sources).encode()).hexdigest()[:32]


def _columns(entries: list[Entry], names: list[str]) -> dict[str, np.dtype]:
    """Those of all sources in one dtype: one that is real in any is real in all."""
    documents = [each for entry in entries for each in entry.documents.values()]
    return {name: np.result_type(np.int64, *(each.columns[name].dtype for each in documents)) for name in names}


def _check_length(source: FoundSource, entry: Entry, config: DataConfig) -> None:
    """Refuse a side that does not fill one sequence of a stream."""
    for split in SPLITS if config.eval_fraction > 0 else SPLITS[:1]:
        sides = entry.documents
        tokens, documents = len(sides[split].tokens), len(sides[split])
        if tokens >= config.seq_len:
            continue
        share = "larger" if split == "held_out" else "smaller"
        shorter = f", seq_len of at most {tokens}" if tokens >= 2 else ""
        raise DataError(
            f"the {split} split does not fill one sequence: its {documents} documents hold {tokens} tokens "
            f"({source.config.place!r}), but seq_len={config.seq_len}. Give more documents{shorter}, or a {share} "
            f"eval_fraction "
            f"(now {config.eval_fraction}: {len(sides['train'])} documents for training, {len(sides['held_out'])} held "
            f"out)."
        )
