"""The tokenizer of a run that has none: trained on its sources, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from ..base.errors import ConfigError
from .cache import cached_entry
from .config import DataConfig
from .encoding.fields import Fields
from .reading.records import read_records
from .reading.sources import FoundSource
from .split import training_documents
from .tokenizer import EOS, holds_tokenizer, train_tokenizer

FORMAT = 1
"""Raised with every change to how a tokenizer is trained."""


def find_trained_tokenizer(root: Path, sources: Sequence[FoundSource], config: DataConfig) -> Path:
    """Find the directory of the tokenizer that is trained on the training documents of sources, or train it.

    Raises:
        ConfigError: there are sources that need a tokenizer which knows their format.
        DataError: a source or the cache cannot be used.
    """
    for source in sources:
        if source.config.format != "text" or source.config.streaming:
            what = "streaming: true" if source.config.streaming else f"format={source.config.format}"
            raise ConfigError(
                f"{source.config.place!r} ({what}) needs a tokenizer: the model's own, or data.tokenizer. One is "
                "trained on sources of text alone, which are read before."
            )
    directory = root / "tokenizers" / _key(sources, config)
    return cached_entry(directory, load=_load, build=lambda place: _build(place, sources, config))


def _key(sources: Sequence[FoundSource], config: DataConfig) -> str:
    parts = {
        "format": FORMAT,
        "python": sys.version,
        "tokenizers": version("tokenizers"),
        "sources": [[source.identity(), source.config.fields] for source in sources],
        "eval_fraction": config.eval_fraction,
        "vocab_size": config.vocab_size,
        "eos": EOS,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _build(directory: Path, sources: Sequence[FoundSource], config: DataConfig) -> None:
    def documents() -> Iterator[str]:
        for source in sources:
            fields = Fields("text", source.config.fields)
            texts = (fields.text(record, "text") for record in read_records(source))
            yield from training_documents(texts, config.eval_fraction)

    tokenizer = train_tokenizer(documents(), config.vocab_size)
    for source in sources:
        source.check_unchanged()
    tokenizer.save_pretrained(directory)


def _load(directory: Path) -> Path | None:
    """The directory, which is renamed into its place when it is whole."""
    return directory if holds_tokenizer(directory) else None
