"""Tokenize sources once, and cache the documents.

The key of a cache entry covers everything that changes its tokens; files enter it by path, size and modification time.
The fingerprint covers the tokens, and is equal on all machines for the same data.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.plugin import MAX_JSON_BYTES, ConfigError, DataError, read_json_object, read_regular_file

from .config import DEFAULT_VOCAB_SIZE, DataConfig, SourceConfig
from .conversations import FieldReader
from .documents import (
    SPLITS,
    DocumentWriter,
    Split,
    TokenizedDocuments,
    get_cache_root,
    is_nearer_boundary,
    iter_training_documents,
    load_or_build,
    open_documents,
)
from .encoder import EncodingCounts
from .parallel_tokenization import Tokenization, build_tokenization, tokenize_records
from .progress import ReadProgress, show_progress
from .record_errors import RecordErrors
from .sources import ResolvedSource, read_records, resolve_source
from .tokenizer import EOS, choose_token_dtype, get_vocab_size, has_tokenizer, load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT = "held_out"
"""Name of the evaluation set that is held out of the sources."""
CACHE_FORMAT, TOKENIZER_FORMAT = 4, 1
"""Increase with every change to the content of entries or to tokenization, and to the training of tokenizers."""
_CHUNK = 1 << 20
_TOKENIZER_FILES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja"})


@dataclass(frozen=True)
class PreparedSource:
    """A training source. One that is read during training has no documents and no counts."""

    config: SourceConfig
    train_documents: TokenizedDocuments | None
    counts: EncodingCounts | None
    fingerprint: str


@dataclass(frozen=True)
class PreparedData:
    """Tokenized documents of a run.

    `eval_sets`: documents by set, "held_out" and those of `eval_sets`. `vocab_size`: rows of the embedding.
    `directory`: first cache entry, or the cache root if every source is read during training. `num_documents`: number
    in both splits. `fingerprint`: hexadecimal, of tokens and split. `column_dtypes`: dtypes over all sources and sets.
    """

    sources: tuple[PreparedSource, ...]
    eval_sets: Mapping[str, tuple[TokenizedDocuments, ...]]
    tokenizer_dir: Path
    vocab_size: int
    directory: Path
    num_documents: int
    fingerprint: str
    column_dtypes: Mapping[str, np.dtype]
    group_size: int


def prepare_data(config: DataConfig, *, tokenizer_dir: str | Path | None = None) -> PreparedData:
    """Find the sources of `config`, and tokenize those that are not cached. Of several processes, one does the work.

    `tokenizer_dir`: the model's own tokenizer, used if `config.tokenizer` is None; without either, one is trained.
    """
    root = get_cache_root(config.cache_dir)
    sources_found = [resolve_source(source) for source in config.get_training_sources()]
    sets = {
        name: [resolve_source(each) for each in sources] for name, sources in config.get_evaluation_sources().items()
    }
    tokenizer = _find_tokenizer(config, tokenizer_dir) or _load_or_train_tokenizer(root, sources_found, config)

    def get_entry(source: ResolvedSource, fraction: float) -> CacheEntry:
        return load_or_build_entry(root, source, build_tokenization(source.config, config, fraction), tokenizer)

    entries = [None if each.config.streaming else get_entry(each, config.eval_fraction) for each in sources_found]
    evaluated = {name: [get_entry(each, 0.0) for each in sources] for name, sources in sets.items()}
    for source, entry in zip(sources_found, entries, strict=True):
        if entry is not None and config.resolve_packing() == "stream":
            _check_fills_sequence(source, entry, config)
    kept = [entry for entry in entries if entry is not None]
    held_out = {
        name: tuple(entry.documents["train"] for entry in set_entries) for name, set_entries in evaluated.items()
    }
    if config.eval_fraction > 0:
        held_out = {HELD_OUT: tuple(entry.documents["held_out"] for entry in kept), **held_out}
    sources = tuple(_to_prepared_source(source, entry) for source, entry in zip(sources_found, entries, strict=True))
    # A single source keeps its own fingerprint.
    fingerprints = [source.fingerprint for source in sources]
    documents = [each for entry in chain(kept, *evaluated.values()) for each in entry.documents.values()]
    return PreparedData(
        sources=sources,
        eval_sets=held_out,
        tokenizer_dir=tokenizer,
        vocab_size=kept[0].vocab_size if kept else get_vocab_size(load_tokenizer(tokenizer)),
        directory=kept[0].directory if kept else root,
        num_documents=sum(entry.counts.documents for entry in kept),
        fingerprint=fingerprints[0] if len(fingerprints) == 1 else _digest(" ".join(fingerprints)),
        # A column that has floats in any source is float in all.
        column_dtypes={
            name: np.result_type(np.int64, *(each.columns[name].dtype for each in documents))
            for name in sources_found[0].config.columns
        },
        group_size=sources_found[0].config.group_size,
    )


def _find_tokenizer(config: DataConfig, fallback: str | Path | None) -> Path | None:
    if config.tokenizer is not None:
        return Path(config.tokenizer).expanduser().absolute()
    if fallback is None:
        return None
    if config.vocab_size != DEFAULT_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size={config.vocab_size} applies only to a trained tokenizer, but the model has its own, in "
            f"{fallback}. Leave vocab_size out."
        )
    return Path(fallback).expanduser().absolute()


def _to_prepared_source(source: ResolvedSource, entry: CacheEntry | None) -> PreparedSource:
    if entry is not None:
        return PreparedSource(source.config, entry.documents["train"], entry.counts, entry.fingerprint)
    identity = json.dumps([source.get_cache_key(), source.config.model_dump(mode="json")], sort_keys=True)
    return PreparedSource(source.config, None, None, _digest(identity))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _check_fills_sequence(source: ResolvedSource, entry: CacheEntry, config: DataConfig) -> None:
    documents_by_split = entry.documents
    for split in SPLITS if config.eval_fraction > 0 else SPLITS[:1]:
        tokens, documents = len(documents_by_split[split].tokens), len(documents_by_split[split])
        if tokens >= config.seq_len:
            continue
        share = "larger" if split == "held_out" else "smaller"
        shorter = f", a seq_len of at most {tokens}" if tokens >= 2 else ""
        raise DataError(
            f"the {split} split does not fill one sequence: its {documents} documents hold {tokens} tokens "
            f"({source.config.location!r}), but seq_len={config.seq_len}. Give more documents{shorter}, or a {share} "
            f"eval_fraction (now {config.eval_fraction}: {len(documents_by_split['train'])} documents for training, "
            f"{len(documents_by_split['held_out'])} held out)."
        )


def _load_or_train_tokenizer(root: Path, sources: Sequence[ResolvedSource], config: DataConfig) -> Path:
    for source in sources:
        if source.config.format != "text" or source.config.streaming:
            what = "streaming: true" if source.config.streaming else f"format={source.config.format}"
            raise ConfigError(
                f"{source.config.location!r} ({what}) needs a tokenizer: the model's own, or data.tokenizer. The "
                "model has none: set data.tokenizer to the directory of one (with tokenizer.json), usually that of the "
                "model from which this one was made. One can be trained only on text sources that are read before "
                "training."
            )
    parts = {
        "format": TOKENIZER_FORMAT,
        "python": sys.version,
        "tokenizers": version("tokenizers"),
        "sources": [[source.get_cache_key(), source.config.fields] for source in sources],
        "eval_fraction": config.eval_fraction,
        "vocab_size": config.vocab_size,
        "eos": EOS,
    }

    def documents() -> Iterator[str]:
        for source in sources:
            fields = FieldReader(source.config.fields)
            yield from iter_training_documents(_iter_texts(source, fields), config.eval_fraction)

    def build(directory: Path) -> None:
        tokenizer = train_tokenizer(documents(), config.vocab_size)
        for source in sources:
            source.check_unchanged()
        tokenizer.save_pretrained(directory)

    def load(directory: Path) -> Path | None:
        return directory if has_tokenizer(directory) else None

    return load_or_build(root / "tokenizers" / _digest(json.dumps(parts, sort_keys=True)), load=load, build=build)


def _iter_texts(source: ResolvedSource, fields: FieldReader) -> Iterator[str]:
    """Yield the texts of a source. Raises one DataError for all records that have none."""
    errors, count = RecordErrors(source.config.location), 0
    for record in read_records(source, keep_errors=True):
        count += 1
        try:
            if record.error is not None:
                raise record.error
            yield fields.read_text(record, "text")
        except DataError as error:
            errors.add([error], num_records=count)
    errors.check(count)


# -- entries of the cache


@dataclass(frozen=True)
class CacheEntry:
    """A tokenized source: documents of each split, counts, rows of the embedding, and a hexadecimal fingerprint."""

    directory: Path
    documents: dict[Split, TokenizedDocuments]
    counts: EncodingCounts
    vocab_size: int
    fingerprint: str


def load_or_build_entry(
    root: Path, source: ResolvedSource, tokenization: Tokenization, tokenizer_dir: Path
) -> CacheEntry:
    """Load the entry of a source, or build it. Its key covers everything that changes the tokens or their split."""
    config = source.config
    parts: dict[str, Any] = {
        "format": CACHE_FORMAT,
        "python": sys.version,
        "tokenizers": version("tokenizers"),
        "transformers": version("transformers"),
        "files": source.get_cache_key(),
        "source": [config.format, config.name, config.split],
        "options": tokenization.options,
        "tokenizer": hash_tokenizer_files(tokenizer_dir),
        "fraction": tokenization.held_out_fraction,
    }
    directory = root / "data" / _digest(json.dumps(parts, sort_keys=True))
    return load_or_build(
        directory, load=_load_entry, build=lambda scratch: _build_entry(scratch, source, tokenization, tokenizer_dir)
    )


def hash_tokenizer_files(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(
            read_regular_file(path, max_bytes=MAX_JSON_BYTES)
        ).hexdigest()
        for path in sorted([*directory.glob("*"), *directory.glob("additional_chat_templates/*")])
        if path.is_file() and path.suffix in _TOKENIZER_FILES and not path.name.endswith(".index.json")
    }


def _build_entry(directory: Path, source: ResolvedSource, tokenization: Tokenization, tokenizer_dir: Path) -> None:
    """Fill an entry. The source is read once; neither it nor its tokens are ever fully in memory."""
    # An unusable tokenizer is found before the source is read.
    tokenizer = load_tokenizer(tokenizer_dir)
    try:
        counts = _write_splits(directory, source, tokenization, tokenizer)
    except DataError:
        # A file may seem broken because it is still being written.
        source.check_unchanged()
        raise
    source.check_unchanged()
    columns = tuple(source.config.columns)
    meta = {
        "vocab_size": get_vocab_size(tokenizer),
        "counts": asdict(counts),
        "columns": columns,
        "group_size": source.config.group_size,
        "fingerprint": _compute_fingerprint(directory, columns, is_stream=tokenization.options["too_long"] is None),
        "sizes": _list_file_sizes(directory),
    }
    (directory / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def _write_splits(
    directory: Path, source: ResolvedSource, tokenization: Tokenization, tokenizer: PreTrainedTokenizerBase
) -> EncodingCounts:
    counts, num_kept, progress = EncodingCounts(), 0, ReadProgress()
    # For each split, the record nearest to the other: its hash value, and its documents.
    nearest: dict[Split, tuple[float, int, int]] = {}
    with ExitStack() as stack:
        columns, dtype = tuple(source.config.columns), choose_token_dtype(tokenizer)
        files = {split: DocumentWriter(directory, split, dtype, columns) for split in SPLITS}
        for file in files.values():
            stack.callback(file.discard)
        advance = stack.enter_context(show_progress(source.config.location, progress))
        errors = RecordErrors(source.config.location)
        records = read_records(source, progress=progress, keep_errors=True)
        for piece in tokenize_records(records, tokenization, tokenizer):
            for split, documents in piece.documents.items():
                hash_value, first, stop = piece.nearest_boundary[split]
                before = len(files[split])
                if split not in nearest or is_nearer_boundary(hash_value, nearest[split][0], split):
                    nearest[split] = (hash_value, before + first, before + stop)
                files[split].append(documents)
            counts, num_kept = counts + piece.counts, num_kept + piece.num_kept
            errors.add(piece.errors, num_records=counts.records)
            advance(piece.counts.tokens)
        errors.check(counts.records)
        if num_kept == 0:
            raise DataError(_describe_empty_source(source, counts, tokenization.options["seq_len"]))
        if num_kept == 1 and tokenization.held_out_fraction > 0:
            raise DataError(
                f"{source.config.location!r} holds 1 document, but needs at least 2: complete documents are held out "
                "for the eval loss. Split it into several .txt files, or into lines of a .jsonl file; or set "
                "eval_fraction: 0, and name eval_sets."
            )
        if tokenization.held_out_fraction > 0:
            for full, empty in (SPLITS, SPLITS[::-1]):
                if not len(files[empty]):
                    _, first, stop = nearest[full]
                    files[empty].append(files[full].remove(first, stop))
        for file in files.values():
            file.close()
    return counts


def _describe_empty_source(source: ResolvedSource, counts: EncodingCounts, seq_len: int | None) -> str:
    location = source.config.location
    if not counts.records:
        return f"{location!r} is empty: it holds no example. Name a source that holds some."
    advice = f"Set data.seq_len to more than {seq_len}, or shorten the records."
    if counts.dropped and not counts.unsupervised:
        return (
            f"{location!r} is empty: it holds no example that is short enough: all {counts.dropped:,} documents have "
            f"more than seq_len={seq_len} tokens and were dropped. {advice}"
        )
    # A pair that lost an answer may count only as unsupervised; neither answer can be empty.
    if counts.truncated or counts.split or counts.dropped or source.config.format == "preference":
        return (
            f"{location!r} holds {counts.records:,} records, but none has a supervised token within seq_len={seq_len} "
            "tokens: the supervised parts, such as answers, come after them and were cut off. "
            f"{advice}"
        )
    return (
        f"{location!r} is empty: it holds {counts.records:,} records, but none has anything to supervise. "
        "Name a source with texts, answers or labels that are not empty."
    )


def _compute_fingerprint(directory: Path, columns: tuple[str, ...], *, is_stream: bool) -> str:
    """Hash the documents of an entry; for a stream, in which documents have no bounds, without their ends."""
    digest = hashlib.sha256()
    for split in SPLITS:
        for name, array in open_documents(directory, split, columns, 1).to_arrays().items():
            if is_stream and name == "ends":
                continue
            named = split if name == "tokens" else f"{split} {name}"
            digest.update(f"{named} {array.dtype.str} {len(array)} ".encode())
            for start in range(0, len(array), _CHUNK):
                digest.update(array[start : start + _CHUNK].data)
    return digest.hexdigest()[:32]


def _load_entry(directory: Path) -> CacheEntry | None:
    """Open an entry with memory-mapped arrays. Returns None if it is missing, incomplete or corrupt."""
    try:
        meta = read_json_object(directory / "meta.json")
        if not _list_file_sizes(directory).items() >= meta["sizes"].items():
            return None
        columns, group = tuple(meta["columns"]), meta["group_size"]
        documents = {split: open_documents(directory, split, columns, group) for split in SPLITS}
        return CacheEntry(
            directory, documents, EncodingCounts(**meta["counts"]), meta["vocab_size"], meta["fingerprint"]
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _list_file_sizes(directory: Path) -> dict[str, int]:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != "meta.json"]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in sorted(files)}
