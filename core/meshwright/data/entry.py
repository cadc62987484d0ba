"""A source's entry in the cache: its documents, tokenized and divided into two sides."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import DataError
from ..files.parsing import MAX_JSON_BYTES, read_json_object, read_regular
from .cache import cached_entry
from .documents import Documents, DocumentsFile, open_documents
from .encoding.examples import Counts
from .encoding.tokenizing import Tokenizing, tokenized
from .progress import Meter, progress
from .reading.records import read_records
from .reading.sources import FoundSource
from .split import SPLITS, Split, is_nearer
from .tokenizer import load_tokenizer, token_dtype, vocab_size_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 3
"""Raised with every change to what an entry holds, or to how the tokens are made."""

_CHUNK = 1 << 20
_TOKENIZER_FILES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja"})


@dataclass(frozen=True)
class Entry:
    """A source that is tokenized.

    Attributes:
        documents: of each side; where nothing is held out, the other side has none.
        counts: of both.
        vocab_size: rows that the model's embedding needs.
        fingerprint: of the tokens and their side; hexadecimal.
    """

    directory: Path
    documents: dict[Split, Documents]
    counts: Counts
    vocab_size: int
    fingerprint: str


@dataclass(frozen=True)
class _Meta:
    """What an entry says of itself, written last."""

    vocab_size: int
    counts: dict[str, int]
    columns: list[str]
    group: int
    fingerprint: str
    sizes: dict[str, int]
    """Bytes of each file of the entry, by relative path: an entry that lacks any is incomplete."""


def find_entry(root: Path, source: FoundSource, how: Tokenizing, tokenizer_dir: Path) -> Entry:
    """Find the entry of a source, or make it; any number of processes may call this at once.

    Raises:
        DataError: the source, the tokenizer or the cache cannot be used.
    """
    directory = root / "data" / _key(source, how, tokenizer_dir)
    return cached_entry(directory, load=_load, build=lambda place: _build(place, source, how, tokenizer_dir))


def tokenizer_key(directory: Path) -> dict[str, str]:
    """What changes whenever a tokenizer does: a digest of each of its files."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(read_regular(path, max_bytes=MAX_JSON_BYTES)).hexdigest()
        for path in sorted([*directory.glob("*"), *directory.glob("additional_chat_templates/*")])
        if path.is_file() and path.suffix in _TOKENIZER_FILES and not path.name.endswith(".index.json")
    }


def _key(source: FoundSource, how: Tokenizing, tokenizer_dir: Path) -> str:
    """Hash everything that changes the tokens or their side."""
    config = source.config
    parts: dict[str, Any] = {
        "format": FORMAT,
        "python": sys.version,
        "tokenizers": version("tokenizers"),
        "transformers": version("transformers"),
        "files": source.identity(),
        "source": [config.format, config.name, config.split],
        "options": how.options,
        "tokenizer": tokenizer_key(tokenizer_dir),
        "fraction": how.fraction,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _build(directory: Path, source: FoundSource, how: Tokenizing, tokenizer_dir: Path) -> None:
    """Fill an entry: the documents of each side, and last what it holds.

    The source is read once; neither it nor its tokens are ever in memory whole.
    """
    # An unusable tokenizer is found before the source is read.
    tokenizer = load_tokenizer(tokenizer_dir)
    try:
        counts = _write_sides(directory, source, how, tokenizer)
    except DataError:
        # What seems broken may be what is still written.
        source.check_unchanged()
        raise
    source.check_unchanged()
    columns = tuple(source.config.columns)
    meta = _Meta(
        vocab_size=vocab_size_of(tokenizer),
        counts=asdict(counts),
        columns=list(columns),
        group=source.config.group,
        fingerprint=_fingerprint(directory, columns, of_stream=how.options["too_long"] is None),
        sizes=_sizes(directory),
    )
    (directory / "meta.json").write_text(json.dumps(asdict(meta), indent=1), encoding="utf-8")


def _write_sides(directory: Path, source: FoundSource, how: Tokenizing, tokenizer: PreTrainedTokenizerBase) -> Counts:
    """Write the documents of each side.

    Raises:
        DataError: there are none, or too few for two sides.
    """
    counts, kept, meter = Counts(), 0, Meter()
    # Of each side, the record that is nearest to the other: its place, and its documents.
    nearest: dict[Split, tuple[float, int, int]] = {}
    with ExitStack() as stack:
        columns, dtype = tuple(source.config.columns), token_dtype(tokenizer)
        files = {split: DocumentsFile(directory, split, dtype, columns) for split in SPLITS}
        for file in files.values():
            stack.callback(file.leave)
        bar = stack.enter_context(progress(source.config.place, meter))
        for piece in tokenized(read_records(source, meter=meter), how, tokenizer):
            for split, documents in piece.documents.items():
                place, first, stop = piece.nearest[split]
                before = len(files[split])
                if split not in nearest or is_nearer(place, nearest[split][0], split):
                    nearest[split] = (place, before + first, before + stop)
                files[split].append(documents)
            counts, kept = counts + piece.counts, kept + piece.kept
            bar.advance(piece.counts.tokens)
        _check_kept(source, counts, kept, how.fraction, how.options["seq_len"])
        if how.fraction > 0:
            for full, empty in (SPLITS, SPLITS[::-1]):
                if not len(files[empty]):
                    _, first, stop = nearest[full]
                    files[empty].append(files[full].take_out(first, stop))
        for file in files.values():
            file.close()
    return counts


def _check_kept(source: FoundSource, counts: Counts, kept: int, fraction: float, seq_len: int | None) -> None:
    place = source.config.place
    if kept == 0:
        raise DataError(_why_nothing_is_kept(source, counts, seq_len))
    if kept == 1 and fraction > 0:
        raise DataError(
            f"{place!r} holds 1 document, but needs at least 2: whole documents are held out for the eval loss. "
            "Cut it into several .txt files, or into the lines of a .jsonl file; or set eval_fraction: 0, and name "
            "eval_sets."
        )


def _why_nothing_is_kept(source: FoundSource, counts: Counts, seq_len: int | None) -> str:
    place = source.config.place
    if not counts.records:
        return f"{place!r} is empty: it holds no example. Name a source that holds some."
    longer = f"Set data.seq_len to more than {seq_len}, or shorten the records."
    if counts.dropped and not counts.unlearnt:
        return (
            f"{place!r} is empty: it holds no example that is short enough: all {counts.dropped:,} documents have more "
            f"than seq_len={seq_len} tokens, and were dropped. {longer}"
        )
    # Both answers of a pair that has lost one are counted as unlearnt alone; neither can be empty.
    if counts.cut or counts.split or counts.dropped or source.config.format == "preference":
        return (
            f"{place!r} holds {counts.records:,} records, and in none of them is anything learnt within seq_len="
            f"{seq_len} tokens: what is to be learnt, such as the answers, stands behind them and was cut off. {longer}"
        )
    return (
        f"{place!r} is empty: it holds {counts.records:,} records, and in none of them is anything to be learnt. Name "
        f"a source with texts, answers or labels that are not empty."
    )


def _fingerprint(directory: Path, columns: tuple[str, ...], *, of_stream: bool) -> str:
    """Of the documents of an entry; of a stream, in which documents have no bounds, of the tokens alone."""
    digest = hashlib.sha256()
    for split in SPLITS:
        documents = open_documents(directory, split, columns, 1)
        for name, array in documents.arrays().items():
            if of_stream and name == "ends":
                continue
            named = split if name == "tokens" else f"{split} {name}"
            digest.update(f"{named} {array.dtype.str} {len(array)} ".encode())
            for start in range(0, len(array), _CHUNK):
                digest.update(array[start : start + _CHUNK].data)
    return digest.hexdigest()[:32]


def _load(directory: Path) -> Entry | None:
    """Open an entry, its arrays memory-mapped; None where it is missing, incomplete or corrupt."""
    try:
        meta = _Meta(**read_json_object(directory / "meta.json"))
        if not _sizes(directory).items() >= meta.sizes.items():
            return None
        documents = {split: open_documents(directory, split, tuple(meta.columns), meta.group) for split in SPLITS}
        counts = Counts(**meta.counts)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    return Entry(directory, documents, counts, meta.vocab_size, meta.fingerprint)


def _sizes(directory: Path) -> dict[str, int]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "meta.json"]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in sorted(files)}
