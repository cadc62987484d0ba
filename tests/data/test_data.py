"""The data pipeline: corpus, tokenizer, split, packing, cache and order."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from meshwright.base.errors import ConfigError, DataError
from meshwright.base.validation import validated
from meshwright.data import (
    EOS,
    DataConfig,
    DataOrder,
    Documents,
    Feed,
    Place,
    PreparedData,
    Record,
    SourceConfig,
    StreamRows,
    check_batch_size,
    eval_microbatches,
    holds_tokenizer,
    load_tokenizer,
    prepare,
    read_records,
    train_tokenizer,
)
from meshwright.data.arrayfile import ArrayFile
from meshwright.data.cache import cache_root
from meshwright.data.config import DEFAULT_VOCAB_SIZE
from meshwright.data.encoding.examples import Encoder
from meshwright.data.encoding.fields import Fields
from meshwright.data.encoding.tokenizing import tokenized, tokenizing
from meshwright.data.reading.sources import find_source
from meshwright.data.rows.shuffle import shuffled
from meshwright.data.split import training_documents

WORDS = ["the", "mesh", "has", "an", "axis", "for", "every", "way", "to", "split", "models", "and", "each", "rank"]
EXAMPLES = settings(deadline=None, max_examples=60)
ENTRY_MODULE = importlib.import_module("meshwright.data.entry")
SOURCES_MODULE = importlib.import_module("meshwright.data.reading.sources")


def prose(seed: int, words: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words)) + f" {seed}."


def held_out_mask(texts: list[str], fraction: float) -> np.ndarray:
    """Which of different texts are held out."""
    trained_on = set(training_documents(texts, fraction))
    return np.array([text not in trained_on for text in texts])


def stream_of(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> np.ndarray:
    found, _ = Encoder(tokenizer).encode([Record({"text": text}, "here") for text in texts])
    return np.concatenate([example.tokens for examples in found for example in examples])


def texts_in(files: str | list[str], text_field: str = "text") -> list[str]:
    """The documents of a source, read in full."""
    source = SourceConfig(files=files, fields={} if text_field == "text" else {"text": text_field})
    return [Fields("text", source.fields).text(record, "text") for record in read_records(source)]


def in_sequences(data: PreparedData, seq_len: int) -> StreamRows:
    """What a run trains on."""
    (source,) = data.sources
    assert source.train is not None
    return StreamRows(source.train, seq_len)


def write_corpus(directory: Path, documents: int = 12) -> str:
    """Write documents as .txt files and return a glob of them."""
    directory.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        (directory / f"{index:03}.txt").write_text(prose(index), encoding="utf-8")
    return str(directory / "*.txt")


def config_for(tmp_path: Path, **changes: Any) -> DataConfig:
    values: dict[str, Any] = {
        "corpus": str(tmp_path / "corpus" / "*.txt"),
        "vocab_size": 300,
        "seq_len": 16,
        "eval_fraction": 0.3,
        "cache_dir": str(tmp_path / "cache"),
    }
    return DataConfig(**{**values, **changes})


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "corpus")
    return tmp_path / "corpus"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories of the entries that were built rather than found."""
    built: list[Path] = []
    real = ENTRY_MODULE._build

    def recorded(directory: Path, *args: object) -> None:
        built.append(directory)
        real(directory, *args)

    monkeypatch.setattr(ENTRY_MODULE, "_build", recorded)
    return built


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return train_tokenizer([prose(seed) for seed in range(20)], 320)


@pytest.fixture(scope="module")
def trained_dir(trained: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    trained.save_pretrained(directory)
    return directory


def texts_of(tokens: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Split a stream at its eos tokens."""
    ends = np.flatnonzero(tokens == tokenizer.eos_token_id)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[part != tokenizer.eos_token_id]) for part in np.split(tokens, ends[:-1] + 1)]


# --- config


def test_unknown_key_error_names_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'seq_len'"):
        validated(DataConfig, {"seq_length": 4}, where="run.yaml")


@pytest.mark.parametrize(
    "values",
    [
        {"vocab_size": 256},
        {"seq_len": 1},
        {"eval_fraction": 0.0},
        {"eval_fraction": 1.0},
        {"corpus": []},
        {"corpus": " "},
        {"corpus": ["a.txt", ""]},
    ],
)
def test_config_refuses_values_out_of_range(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        validated(DataConfig, values, where="run.yaml")


def test_config_refuses_a_vocab_size_that_a_given_tokenizer_would_drop() -> None:
    with pytest.raises(ConfigError, match="vocab_size=300"):
        validated(DataConfig, {"tokenizer": "somewhere", "vocab_size": 300}, where="run.yaml")


def test_config_with_tokenizer_survives_being_dumped_and_read() -> None:
    config = DataConfig(tokenizer="somewhere")
    assert DataConfig(**config.model_dump()) == config


def test_every_field_is_described_in_the_schema() -> None:
    properties = DataConfig.model_json_schema()["properties"]
    assert set(properties) == set(DataConfig.model_fields)
    assert all(entry["description"] for entry in properties.values())


# --- corpus


def test_recursive_globs_are_read_in_order_and_a_file_only_once(tmp_path: Path) -> None:
    for name in ("b/x.txt", "b/a/y.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    globs = [str(tmp_path / "**" / "*.txt"), str(tmp_path / "a.txt")]
    assert texts_in(globs) == ["a.txt", "b/a/y.txt", "b/x.txt"]


@pytest.mark.parametrize(
    "pattern", ["run[1]/a[2].txt", "run[1]/*.txt", "run[1]/../run[1]/?[[]2].txt"], ids=["file", "glob", "brackets"]
)
def test_what_exists_by_its_name_is_no_pattern(pattern: str, tmp_path: Path) -> None:
    for name in ("run[1]/a[2].txt", "run1/a2.txt", "run[1]/b/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts_in([str(tmp_path / pattern)]) == ["run[1]/a[2].txt"]


def test_brackets_that_name_nothing_are_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run1/a.txt", "run2/a.txt", "run3/a.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    for pattern in ("run[12]/a.txt", "./run[12]/*.txt"):
        assert texts_in([pattern]) == ["run1/a.txt", "run2/a.txt"]


def test_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("home")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert texts_in("~/*.txt") == ["home"]


def test_text_files_are_read_exactly_apart_from_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\u2028né".encode())
    assert texts_in(str(tmp_path / "a.txt")) == ["one\r\ntwo\u2028né"]


def test_each_json_line_is_a_document_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    lines = [{"body": "one\u2028still one"}, {"body": ""}, {"body": "two", "other": 3}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    source = find_source(SourceConfig(files=str(tmp_path / "a.jsonl"), fields={"text": "body"}))
    for _ in range(2):
        assert [record.value["body"] for record in read_records(source)] == ["one\u2028still one", "two"]
        assert [record.where for record in read_records(source)] == [f"{tmp_path}/a.jsonl:{line}" for line in (1, 5)]


@pytest.mark.parametrize("line", ["[" * 20_000, '{"text": ' + "1" * 5000 + "}"])
def test_a_line_that_python_cannot_read_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(DataError, match=r"a\.jsonl:1: not valid JSON"):
        texts_in(str(tmp_path / "a.jsonl"), "text")


def test_stdlib_holds_sources_without_tests_and_installed_packages() -> None:
    names = [file.path.as_posix() for file in find_source(SourceConfig(files="stdlib")).files]
    assert names == sorted(names, key=Path)
    assert any(name.endswith("/json/decoder.py") for name in names)
    for part in ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"):
        assert not any(f"/{part}/" in name.split("/lib/")[-1] for name in names), part


def test_glob_without_match_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "there")
    with pytest.raises(DataError, match=r"glob '.*nowhere/\*\.txt' matches no file"):
        texts_in([str(tmp_path / "there" / "*.txt"), str(tmp_path / "nowhere" / "*.txt")])


def test_directory_instead_of_a_glob_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is a directory: add '/\*\*/\*\.txt'"):
        texts_in(str(tmp_path))


def test_wrong_suffix_is_named_with_the_allowed_ones(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text")
    with pytest.raises(DataError, match=r"a\.md, whose suffix is '\.md'\. Allowed: \.txt, \.jsonl, \.json, "):
        texts_in(str(tmp_path / "*"))


def test_broken_link_is_an_error_instead_of_a_missing_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"a\.txt cannot be read"):
        texts_in(str(tmp_path / "*.txt"))


def test_text_field_without_json_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no fields such as 'body'"):
        texts_in(write_corpus(tmp_path), "body")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"a\.jsonl:2: not valid JSON \(.* at column \d+\)"),
        ('["text"]', r"a\.jsonl:2: holds a JSON list"),
        ('{"texts": "x", "id": 1}', r"a\.jsonl:2: no field 'text'\. Fields of this line: id, texts\..*'texts'\?"),
        ('{"text": null}', r"a\.jsonl:2: field 'text' holds None, a NoneType, but must hold a string"),
        (r'{"text": "a\ud800"}', r"a\.jsonl:2: .*surrogate"),
    ],
)
def test_bad_json_line_is_named_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        texts_in(str(tmp_path / "a.jsonl"))


def test_file_that_is_not_utf8_is_named_with_the_offset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8: byte 0xe9 at offset 3"):
        texts_in(str(tmp_path / "a.txt"))


# --- tokenizer


@EXAMPLES
@given(text=st.text())
def test_any_text_survives_the_tokenizer(trained: PreTrainedTokenizerFast, text: str) -> None:
    assert trained.decode(trained.encode(text)) == text


@EXAMPLES
@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_stream_holds_each_document_and_an_eos(trained: PreTrainedTokenizerFast, texts: list[str]) -> None:
    stream = stream_of(trained, texts)
    expected = [token for text in texts for token in [*trained.encode(text), trained.eos_token_id]]
    assert stream.dtype == np.uint16
    assert stream.tolist() == expected


def test_documents_keep_their_order_over_many_batches(
    trained: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.data.encoding.tokenizing._BATCH_CHARACTERS", 50)
    texts = [prose(seed, words=seed % 7 + 1) for seed in range(200)]
    records = (Record({"text": text}, "here") for text in texts)
    source = SourceConfig(files="unused")
    pieces = tokenized(records, tokenizing(source, DataConfig(sources=[source]), 0.0), trained)
    assert texts_of(np.concatenate([piece.documents["train"].tokens for piece in pieces]), trained) == texts


def test_training_reaches_the_vocabulary_size_or_as_far_as_the_corpus_goes() -> None:
    texts = [prose(seed) for seed in range(20)]
    assert len(train_tokenizer(texts, 280)) == 280
    assert 257 < len(train_tokenizer(["ab ab"], 5000)) < 300


def test_saved_tokenizer_loads_in_transformers_with_equal_encodings(
    trained: PreTrainedTokenizerFast, trained_dir: Path
) -> None:
    loaded = AutoTokenizer.from_pretrained(trained_dir)
    text = f"a mesh\n\thas Äxes {EOS} 🙂"
    assert loaded(text)["input_ids"] == trained(text)["input_ids"]
    assert (loaded.eos_token, loaded.eos_token_id) == (EOS, trained.eos_token_id)
    assert len(loaded) == len(trained)


def test_saved_maximum_length_does_not_cut_documents(tmp_path: Path, trained_dir: Path) -> None:
    shutil.copytree(trained_dir, tmp_path / "cut")
    backend = Tokenizer.from_file(str(trained_dir / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(tmp_path / "cut" / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "cut")
    assert texts_of(stream_of(tokenizer, [prose(1), prose(2)]), tokenizer) == [prose(1), prose(2)]


def test_large_vocabulary_is_stored_in_32_bits() -> None:
    vocabulary = {EOS: 0, "a": 1, "b": 70_000}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=EOS))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    stream = stream_of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS), ["a b"])
    assert stream.dtype == np.uint32
    assert stream.tolist() == [1, 70_000, 0]


def test_missing_tokenizer_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone' does not exist .* nothing is downloaded"):
        load_tokenizer(tmp_path / "gone")


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_model_directory_without_tokenizer_is_refused(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert not holds_tokenizer(tmp_path)
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


PANICS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "continuing_subword_prefix": "xxx"}


@pytest.mark.parametrize("content", [{}, {"version": "1.0", "added_tokens": [], "model": PANICS}])
def test_broken_tokenizer_file_is_a_data_error(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert holds_tokenizer(tmp_path)
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="has no eos token"):
        load_tokenizer(tmp_path)


# --- held-out split


@EXAMPLES
@given(
    texts=st.lists(st.text(), min_size=2, max_size=40, unique=True),
    fraction=st.floats(0.001, 0.999),
    order=st.randoms(use_true_random=False),
)
def test_split_has_both_sides_and_does_not_depend_on_order(
    texts: list[str], fraction: float, order: random.Random
) -> None:
    mask = held_out_mask(texts, fraction)
    assert 0 < mask.sum() < len(texts)
    shuffled = order.sample(texts, len(texts))
    assert dict(zip(shuffled, held_out_mask(shuffled, fraction), strict=True)) == dict(zip(texts, mask, strict=True))


def test_split_of_a_document_does_not_depend_on_the_other_documents() -> None:
    texts = [prose(seed) for seed in range(100)]
    whole, half = held_out_mask(texts, 0.3), held_out_mask(texts[::2], 0.3)
    assert half.any()
    np.testing.assert_array_equal(whole[::2], half)


def test_split_holds_out_about_the_fraction() -> None:
    assert 0.2 < held_out_mask([prose(seed, words=5) for seed in range(1000)], 0.25).mean() < 0.3


def test_split_stays_what_it_was_in_earlier_releases() -> None:
    mask = held_out_mask([f"document {index}" for index in range(12)], 0.3)
    assert np.flatnonzero(mask).tolist() == [6, 8, 11]


# --- a stream


def in_rows(tokens: np.ndarray, seq_len: int) -> StreamRows:
    return StreamRows(Documents(tokens, np.array([len(tokens)])), seq_len)


@EXAMPLES
@given(tokens=st.lists(st.integers(0, 60_000), max_size=60), seq_len=st.integers(1, 9), data=st.data())
def test_sequences_are_the_stream_cut_without_its_tail(tokens: list[int], seq_len: int, data: st.DataObject) -> None:
    sequences = in_rows(np.array(tokens, np.uint16), seq_len)
    assert len(sequences) == len(tokens) // seq_len
    if len(sequences):
        chosen = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=5))
        taken = sequences.take(chosen)["input_ids"]
        assert taken.dtype == torch.int64
        assert taken.shape == (len(chosen), seq_len)
        assert taken.tolist() == [tokens[index * seq_len : (index + 1) * seq_len] for index in chosen]


@pytest.mark.parametrize("index", [-1, 3])
def test_sequence_out_of_range_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} does not exist; there are 3"):
        in_rows(np.arange(6), 2).take([0, index])


def test_packing_refuses_what_is_no_token_stream() -> None:
    with pytest.raises(ValueError, match="one row of integers"):
        in_rows(np.zeros((2, 2), np.int64), 2)
    with pytest.raises(ValueError, match="one row of integers"):
        in_rows(np.zeros(4), 2)
    with pytest.raises(ValueError, match="seq_len must be at least 1"):
        in_rows(np.arange(4), 0)


# --- prepare


def test_prepared_splits_hold_the_documents_of_the_corpus(tmp_path: Path, corpus: Path) -> None:
    data = prepare(config_for(tmp_path, seq_len=2))
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    streams = {split: np.load(data.directory / f"{split}.npy") for split in ("train", "held_out")}
    texts = {split: texts_of(tokens, tokenizer) for split, tokens in streams.items()}
    assert len(texts["held_out"]) >= 1
    assert sorted(texts["train"] + texts["held_out"]) == sorted(prose(index) for index in range(12))
    assert data.documents == 12
    assert data.vocab_size == len(tokenizer) == 300
    for split, documents in (("train", data.sources[0].train), ("held_out", data.held_out["held_out"][0])):
        assert documents is not None
        sequences = StreamRows(documents, 2)
        whole = sequences.take(range(len(sequences)))["input_ids"].flatten().tolist()
        assert whole == streams[split].tolist()[: len(whole)]
        assert len(streams[split]) - len(whole) < 2


def test_tokenizer_is_trained_on_training_documents_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "corpus")
    seen: list[str] = []

    def spy(documents: object, vocab_size: int) -> object:
        seen.extend(documents)  # type: ignore[arg-type]
        return train_tokenizer(seen, vocab_size)

    monkeypatch.setattr("meshwright.data.trained.train_tokenizer", spy)
    data = prepare(config_for(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    assert sorted(seen) == sorted(texts_of(np.load(data.directory / "train.npy"), tokenizer))
    assert 0 < len(seen) < 12


@pytest.mark.parametrize("fraction", [1e-6, 0.5, 1 - 1e-6])
def test_streams_and_tokenizer_have_the_same_sides_in_the_order_of_the_corpus(tmp_path: Path, fraction: float) -> None:
    write_corpus(tmp_path / "corpus", documents=5)
    data = prepare(config_for(tmp_path, eval_fraction=fraction))
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    texts = [prose(index) for index in range(5)]
    mask = held_out_mask(texts, fraction)
    for split, wanted in (("train", ~mask), ("held_out", mask)):
        expected = [text for text, is_in in zip(texts, wanted, strict=True) if is_in]
        assert texts_of(np.load(data.directory / f"{split}.npy"), tokenizer) == expected


@pytest.mark.parametrize(
    ("documents", "fraction", "fingerprint"),
    [
        (12, 0.3, "d4aa8131de46037daeba587c0cb455ac"),
        (3, 0.0001, "692ca1ed6a911090a500b7b4e845499f"),
        (3, 0.9999, "b4c992051c0e4638f83ed1a8eea6f46e"),
    ],
)
def test_fingerprint_stays_what_it_was_in_earlier_releases(
    tmp_path: Path, documents: int, fraction: float, fingerprint: str
) -> None:
    write_corpus(tmp_path / "corpus", documents)
    assert prepare(config_for(tmp_path, eval_fraction=fraction)).fingerprint == fingerprint


def test_text_is_read_once_and_once_more_to_train_a_tokenizer(
    tmp_path: Path, corpus: Path, trained_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    real = SOURCES_MODULE.read_file

    def counted(path: Path, *args: object) -> object:
        read.append(path)
        return real(path, *args)

    monkeypatch.setattr(SOURCES_MODULE, "read_file", counted)
    prepare(config_for(tmp_path, tokenizer=str(trained_dir), vocab_size=DEFAULT_VOCAB_SIZE))
    assert len(read) == len(set(read)) == 12
    prepare(config_for(tmp_path))
    assert len(read) == 36


def test_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, trained_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.data.encoding.tokenizing._BATCH_CHARACTERS", 1 << 12)
    monkeypatch.setattr("meshwright.data.encoding.tokenizing.usable_cores", lambda: 2)
    peaks = []
    for number, documents in enumerate((10, 200, 1600)):
        text = "\n".join(json.dumps({"text": prose(index, words=120)}) for index in range(documents))
        (tmp_path / f"{number}.jsonl").write_text(text)
        del text
        config = config_for(
            tmp_path,
            corpus=str(tmp_path / f"{number}.jsonl"),
            tokenizer=str(trained_dir),
            vocab_size=DEFAULT_VOCAB_SIZE,
        )
        tracemalloc.start()
        prepare(config)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # The first one imports what is needed.
    assert peaks[2] < 1.1 * peaks[1]


@given(data=st.data(), lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6))
@settings(deadline=None, max_examples=30)
def test_a_file_of_tokens_is_what_was_written_without_what_was_taken_out(
    data: st.DataObject, lengths: list[int]
) -> None:
    pieces = [np.arange(length, dtype=np.uint16) + 100 * index for index, length in enumerate(lengths)]
    whole = np.concatenate(pieces)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.data.arrayfile._CHUNK", 7)
        path = Path(directory) / "tokens.npy"
        file = ArrayFile(path, np.dtype(np.uint16))
        for piece in pieces:
            file.append(piece)
        taken = file.take_out(start, stop)
        file.append(np.array([9], np.uint16))
        file.close()
        np.testing.assert_array_equal(taken, whole[start:stop])
        np.testing.assert_array_equal(np.load(path), [*whole[:start], *whole[stop:], 9])
        assert np.load(path, mmap_mode="r").dtype == np.uint16


def test_second_call_finds_the_entry_and_other_lengths_share_it(
    tmp_path: Path, corpus: Path, builds: list[Path]
) -> None:
    first = prepare(config_for(tmp_path))
    again = prepare(config_for(tmp_path))
    longer = prepare(config_for(tmp_path, seq_len=32))
    assert len(builds) == 1
    assert first.directory == again.directory == longer.directory
    assert first.fingerprint == again.fingerprint == longer.fingerprint
    rows = in_sequences(first, 16).take([0, 1])["input_ids"]
    assert in_sequences(longer, 32).take([0])["input_ids"][0].tolist() == rows.flatten().tolist()


def test_entry_is_memory_mapped(tmp_path: Path, corpus: Path) -> None:
    sequences = in_sequences(prepare(config_for(tmp_path)), 16).documents.tokens
    while isinstance(sequences.base, np.ndarray):
        sequences = sequences.base
    assert isinstance(sequences, np.memmap)


def test_same_data_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    write_corpus(tmp_path / "one" / "corpus")
    write_corpus(tmp_path / "two" / "corpus")
    one, two = prepare(config_for(tmp_path / "one")), prepare(config_for(tmp_path / "two"))
    assert one.directory.parent != two.directory.parent
    assert one.fingerprint == two.fingerprint


def grow(corpus: Path) -> dict[str, object]:
    (corpus / "new.txt").write_text(prose(99))
    return {}


def shrink(corpus: Path) -> dict[str, object]:
    (corpus / "003.txt").unlink()
    return {}


def edit_in_place(corpus: Path) -> dict[str, object]:
    path = corpus / "003.txt"
    before = path.stat()
    path.write_text(path.read_text().swapcase())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    return {}


@pytest.mark.parametrize(
    "change",
    [
        grow,
        shrink,
        edit_in_place,
        lambda corpus: {"vocab_size": 290},
        lambda corpus: {"eval_fraction": 0.6},
    ],
)
def test_what_changes_the_tokens_makes_a_new_entry(
    tmp_path: Path, corpus: Path, builds: list[Path], change: object
) -> None:
    before = prepare(config_for(tmp_path))
    after = prepare(config_for(tmp_path, **change(corpus)))  # type: ignore[operator]
    assert len(builds) == 2
    assert before.directory != after.directory
    assert before.fingerprint != after.fingerprint


def test_text_field_makes_a_new_entry(tmp_path: Path, builds: list[Path]) -> None:
    lines = [json.dumps({"a": prose(index), "b": prose(index + 100)}) for index in range(8)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    found = [prepare(config_for(tmp_path, corpus=str(tmp_path / "c.jsonl"), text_field=field)) for field in "ab"]
    assert len(builds) == 2
    assert found[0].fingerprint != found[1].fingerprint


def test_new_format_or_library_version_makes_a_new_entry(
    tmp_path: Path, corpus: Path, builds: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config_for(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(ENTRY_MODULE, "FORMAT", 0)
        prepare(config_for(tmp_path))
    monkeypatch.setattr(ENTRY_MODULE, "version", lambda name: "0.0")
    prepare(config_for(tmp_path))
    assert len(builds) == 3


def test_given_tokenizer_is_used_and_its_change_makes_a_new_entry(
    tmp_path: Path, corpus: Path, trained_dir: Path, builds: list[Path]
) -> None:
    own = tmp_path / "own"
    shutil.copytree(trained_dir, own)
    config = config_for(tmp_path, tokenizer=str(own), vocab_size=1024)
    first = prepare(config)
    assert (first.tokenizer_dir, first.vocab_size) == (own, 320)
    assert not (first.directory / "tokenizer").exists()
    tokens = np.load(first.directory / "train.npy")
    assert set(texts_of(tokens, AutoTokenizer.from_pretrained(own))) < {prose(index) for index in range(12)}

    train_tokenizer([prose(1), "other words"], 270).save_pretrained(own)
    second = prepare(config)
    assert second.vocab_size == 270
    assert second.fingerprint != first.fingerprint
    assert len(builds) == 2


def test_fallback_tokenizer_gives_way_to_that_of_the_config(tmp_path: Path, corpus: Path, trained_dir: Path) -> None:
    other = tmp_path / "other"
    train_tokenizer([prose(1)], 270).save_pretrained(other)
    plain = config_for(tmp_path, vocab_size=1024)
    assert prepare(plain, tokenizer_dir=trained_dir).vocab_size == 320
    chosen = config_for(tmp_path, vocab_size=1024, tokenizer=str(other))
    assert prepare(chosen, tokenizer_dir=trained_dir).vocab_size == 270


def test_vocab_size_that_the_fallback_would_drop_is_refused(tmp_path: Path, corpus: Path, trained_dir: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size=300"):
        prepare(config_for(tmp_path), tokenizer_dir=trained_dir)


@pytest.mark.parametrize(
    ("documents", "message"), [([], "is empty"), (["one document"], "holds 1 document, but needs at least 2")]
)
def test_corpus_too_small_to_split_is_explained(tmp_path: Path, documents: list[str], message: str) -> None:
    (tmp_path / "empty.txt").write_text("")
    for index, document in enumerate(documents):
        (tmp_path / f"{index}.txt").write_text(document)
    with pytest.raises(DataError, match=message):
        prepare(config_for(tmp_path, corpus=str(tmp_path / "*.txt")))


@pytest.mark.parametrize(("split", "share"), [("held_out", "larger"), ("train", "smaller")])
def test_split_shorter_than_a_sequence_gives_counts_and_remedy(tmp_path: Path, split: str, share: str) -> None:
    # Of two documents each side gets one; these seeds put the short one on the side under test.
    pairs = ([prose(seed, words=1), prose(seed, words=900)] for seed in range(100))
    short, long = next(pair for pair in pairs if held_out_mask(pair, 0.5)[0] == (split == "held_out"))
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "short.txt").write_text(short)
    (tmp_path / "corpus" / "long.txt").write_text(long)
    with pytest.raises(DataError) as caught:
        prepare(config_for(tmp_path, seq_len=40, eval_fraction=0.5))
    (entry,) = (tmp_path / "cache" / "data").glob("*/")
    tokens = len(np.load(entry / f"{split}.npy"))
    assert f"the {split} split does not fill one sequence: its 1 documents hold {tokens} tokens" in str(caught.value)
    assert f"seq_len=40. Give more documents, seq_len of at most {tokens}, or a {share}" in str(caught.value)
    assert "(now 0.5: 1 documents for training, 1 held out)" in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: (entry / "meta.json").unlink(),
        lambda entry: (entry / "meta.json").write_text("{"),
        lambda entry: (entry / "meta.json").write_text('{"vocab_size": 3}'),
        lambda entry: os.truncate(entry / "train.npy", 200),
        lambda entry: (entry / "held_out.npy").write_bytes(b"x" * (entry / "held_out.npy").stat().st_size),
        lambda entry: (entry / "train.ends.npy").unlink(),
    ],
    ids=["no meta", "no json", "other meta", "cut short", "garbage", "no ends"],
)
def test_damaged_entry_is_rebuilt(tmp_path: Path, corpus: Path, builds: list[Path], damage: object) -> None:
    first = prepare(config_for(tmp_path))
    want = in_sequences(first, 16).take([0, 1])["input_ids"]
    damage(first.directory)  # type: ignore[operator]
    again = prepare(config_for(tmp_path))
    assert len(builds) == 2
    assert again.fingerprint == first.fingerprint
    assert torch.equal(in_sequences(again, 16).take([0, 1])["input_ids"], want)
    AutoTokenizer.from_pretrained(again.tokenizer_dir)


def test_unwritable_cache_is_explained(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="Set cache_dir"):
        prepare(config_for(tmp_path, cache_dir=str(tmp_path / "file")))


def test_corpus_that_changes_while_it_is_read_leaves_no_entry(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(documents: object, vocab_size: int) -> object:
        (corpus / "003.txt").write_text("shorter")
        return train_tokenizer(documents, vocab_size)  # type: ignore[arg-type]

    monkeypatch.setattr("meshwright.data.trained.train_tokenizer", meddle)
    with pytest.raises(DataError, match=r"003\.txt changed while it was read"):
        prepare(config_for(tmp_path))
    assert [path.suffix for path in (tmp_path / "cache").glob("*/*")] == [".lock"]


def test_cache_root_follows_config_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root("~/mine") == tmp_path / "mine"
    assert cache_root(None) == Path("/elsewhere/meshwright")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_root(None) == tmp_path / ".cache" / "meshwright"


# --- several processes

_SCRIPT = """
import os, sys
from meshwright.data import DataConfig, prepare
module = sys.modules["meshwright.data.entry"]
real = module._build
def build(directory, *args):
    print("built", flush=True)
    real(directory, *args)
    if mode == "die":
        os._exit(9)
module._build = build
mode, config = sys.argv[1], DataConfig.model_validate_json(sys.argv[2])
print("ready", flush=True)
count_threads = lambda: len(os.listdir("/proc/self/task"))
before = count_threads() if mode == "threads" else 0
data = prepare(config)
print(data.fingerprint, flush=True)
if mode == "imports":
    print("torch" in sys.modules)
if mode == "threads":
    print(count_threads() - before)
if mode == "fork":
    child = os.fork()
    if child == 0:
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(str(data.tokenizer_dir / "tokenizer.json"))
        print(len(tokenizer.encode_batch(["a", "b"])), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def start(mode: str, config: DataConfig) -> subprocess.Popen[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, mode, config.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_of_two_processes_one_builds_and_both_get_the_result(tmp_path: Path, corpus: Path) -> None:
    config = config_for(tmp_path)
    expected = prepare(config)
    shutil.rmtree(expected.directory)
    with FileLock(expected.directory.with_name(expected.directory.name + ".lock")):
        processes = [start("plain", config) for _ in range(2)]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        assert [process.poll() for process in processes] == [None, None]
        assert not expected.directory.exists()
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [line for output, _ in outputs for line in output.split()]
    assert sorted(lines) == sorted(["built", expected.fingerprint, expected.fingerprint])


def test_killed_builder_leaves_nothing_that_counts(tmp_path: Path, corpus: Path, builds: list[Path]) -> None:
    config = config_for(tmp_path)
    process = start("die", config)
    process.communicate(timeout=60)
    assert process.returncode == 9
    left = sorted(path.suffix for path in (tmp_path / "cache" / "data").iterdir())
    assert left == [".building", ".lock"]
    data = prepare(config)
    assert len(builds) == 1
    assert data.documents == 12
    left = sorted(path.suffix for path in (tmp_path / "cache" / "data").iterdir())
    assert left == ["", ".lock"]


def test_fork_after_preparing_gives_no_warning_and_children_can_tokenize(tmp_path: Path, corpus: Path) -> None:
    process = start("fork", config_for(tmp_path))
    output, errors = process.communicate(timeout=60)
    assert output.split()[-1] == "2"
    assert "fork" not in errors
    assert process.returncode == 0


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts the threads of a process in /proc")
def test_preparing_leaves_no_threads_that_a_fork_would_lose(tmp_path: Path, corpus: Path) -> None:
    output, errors = start("threads", config_for(tmp_path)).communicate(timeout=60)
    assert output.split()[-1] == "0", errors


def test_preparing_imports_no_torch(tmp_path: Path, corpus: Path) -> None:
    output, errors = start("imports", config_for(tmp_path)).communicate(timeout=60)
    assert output.split()[-1] == "False", errors


@pytest.mark.parametrize("before", [None, "true"])
def test_switch_of_the_tokenizer_library_is_put_back(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    stream_of(train_tokenizer(["a b"], 257), ["a"])
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


# --- order


orders = st.builds(DataOrder, st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**70))


@EXAMPLES
@given(order=orders)
def test_every_epoch_covers_every_sequence_once(order: DataOrder) -> None:
    epochs = 3
    steps = -(-epochs * order.num_sequences // order.batch_size)
    stream = np.concatenate([order.indices(step) for step in range(steps)])
    assert stream.dtype == np.int64
    assert len(stream) == steps * order.batch_size
    for epoch in range(epochs):
        part = stream[epoch * order.num_sequences : (epoch + 1) * order.num_sequences]
        assert sorted(part) == list(range(order.num_sequences))


@EXAMPLES
@given(order=orders, steps=st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_a_step_does_not_depend_on_the_steps_before_it(order: DataOrder, steps: list[int]) -> None:
    for step in steps:
        fresh = DataOrder(order.num_sequences, order.batch_size, order.seed)
        np.testing.assert_array_equal(order.indices(step), fresh.indices(step))


def test_batches_are_cut_from_one_stream_whatever_the_batch_size() -> None:
    small, large = DataOrder(10, 3, 0), DataOrder(10, 12, 0)
    np.testing.assert_array_equal(np.concatenate([small.indices(step) for step in range(4)]), large.indices(0))


def test_epochs_and_seeds_differ() -> None:
    first, second = np.split(DataOrder(50, 100, seed=3).indices(0), 2)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.arange(50))
    assert not np.array_equal(DataOrder(50, 50, seed=4).indices(0), first)


def test_changing_a_returned_batch_does_not_change_the_order() -> None:
    order = DataOrder(8, 8, 1)
    want = order.indices(0).copy()
    order.indices(0)[:] = 0
    np.testing.assert_array_equal(order.indices(0), want)


def test_order_stays_what_it_was_in_earlier_releases() -> None:
    assert DataOrder(8, 12, seed=5, version=1).indices(0).tolist() == [3, 2, 4, 6, 7, 0, 5, 1, 1, 0, 6, 7]
    assert DataOrder(8, 12, seed=5).indices(0).tolist() == [4, 3, 1, 7, 5, 6, 0, 2, 0, 1, 4, 5]
    far = DataOrder(10**15, 3, seed=5).indices(10**17)
    assert far.tolist() == [397021958276261, 547201257243500, 837044565523133]


def test_order_of_an_unknown_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version must be 1 or 2, not 3"):
        DataOrder(8, 2, 0, version=3)


@EXAMPLES
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
def test_shuffled_places_are_a_bijection_for_any_size(size: int, seed: int, epoch: int) -> None:
    found = shuffled(np.arange(size), size, seed=seed, epoch=epoch)
    assert found.dtype == np.int64
    assert sorted(found) == list(range(size))


@EXAMPLES
@given(size=st.integers(1, 2**62), seed=st.integers(0, 99), data=st.data())
def test_shuffled_places_of_any_size_are_computed_alone(size: int, seed: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    found = shuffled(np.array(places), size, seed=seed, epoch=0)
    assert len(set(found.tolist())) == len(places)
    assert ((found >= 0) & (found < size)).all()
    assert [int(shuffled(np.array([place]), size, seed=seed, epoch=0)[0]) for place in places] == found.tolist()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_orders_of_a_few_places_are_equally_likely(size: int) -> None:
    orders = math.factorial(size)
    draws = 20 * orders
    counts = Counter(tuple(shuffled(np.arange(size), size, seed=3, epoch=epoch).tolist()) for epoch in range(draws))
    chi_square = sum((counts[each] - 20) ** 2 / 20 for each in itertools.permutations(range(size)))
    # Four standard deviations above its mean.
    assert chi_square < orders - 1 + 4 * math.sqrt(2 * (orders - 1))


@pytest.mark.parametrize("size", [1000, 4096, 65537])
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_looks_random(size: int, epoch: int) -> None:
    order = shuffled(np.arange(size), size, seed=0, epoch=epoch)
    other = shuffled(np.arange(size), size, seed=1, epoch=epoch)
    bound = 4 / math.sqrt(size)
    # With its place, its neighbour, half the way round, and another seed's.
    for against in (np.arange(size), np.roll(order, 1), np.roll(order, size // 2), other):
        assert abs(np.corrcoef(order, against)[0, 1]) < bound
    # Sixteenths of the epoch take equally much of sixteenths of the data.
    table, *_ = np.histogram2d(np.arange(size), order, bins=16)
    expected = size / 256
    assert ((table - expected) ** 2 / expected).sum() < 225 + 4 * math.sqrt(2 * 225)


def test_an_order_of_any_size_holds_no_more_than_its_batch() -> None:
    order = DataOrder(10**12, 64, seed=0)
    order.indices(1)
    tracemalloc.start()
    order.indices(10**11)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 8 * 20 + 8192


@pytest.mark.parametrize(
    ("values", "name"), [((0, 1, 0), "num_sequences"), ((1, 0, 0), "batch_size"), ((1, 1, -1), "seed")]
)
def test_order_refuses_values_out_of_range(values: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        DataOrder(*values)


def test_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step must be at least 0, not -1"):
        DataOrder(1, 1, 0).indices(-1)


# --- microbatches


def numbered(count: int, seq_len: int = 3) -> StreamRows:
    """Sequences that show their index: sequence i holds seq_len x i onwards."""
    return in_rows(np.arange(count * seq_len, dtype=np.uint32), seq_len)


sizes = st.tuples(st.integers(1, 4), st.integers(1, 4))


@EXAMPLES
@given(sizes=sizes, multiple=st.integers(1, 3), count=st.integers(1, 20), step=st.integers(0, 9))
def test_ranks_share_the_same_global_batch_at_any_size(
    sizes: tuple[int, int], multiple: int, count: int, step: int
) -> None:
    data_size, micro_batch_size = sizes
    sequences = numbered(count)
    order = DataOrder(count, data_size * micro_batch_size * multiple, seed=7)
    shares = [
        Feed([sequences], Place(rank, data_size, micro_batch_size), batch_size=order.batch_size, seed=7).microbatches(
            step
        )
        for rank in range(data_size)
    ]
    assert [len(share) for share in shares] == [multiple] * data_size
    for batch in (batch for share in shares for batch in share):
        assert batch["input_ids"].shape == (micro_batch_size, 3)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["input_ids"], batch["labels"])
    together = torch.cat([batch["input_ids"] for share in shares for batch in share])
    assert torch.equal(together, sequences.take(order.indices(step))["input_ids"])


@pytest.mark.parametrize(
    ("batch_size", "allowed"), [(10, "set it to 8 or 16"), (3, "set it to 8, or"), (0, "set it to 8, or")]
)
def test_batch_that_does_not_divide_is_refused_with_the_allowed_sizes(batch_size: int, allowed: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"batch_size={batch_size} .*2 data ranks x micro_batch_size=4 = 8\..*{allowed}"
    ):
        check_batch_size(batch_size, data_size=2, micro_batch_size=4)


def test_a_batch_that_does_not_divide_is_refused_on_every_rank() -> None:
    for rank in range(2):
        with pytest.raises(ConfigError, match="batch_size=6"):
            Feed([numbered(9)], Place(rank, 2, 2), batch_size=6, seed=0)


@EXAMPLES
@given(sizes=sizes, available=st.integers(1, 20), data=st.data())
def test_evaluation_covers_each_sequence_once_and_pads_with_masked_ones(
    sizes: tuple[int, int], available: int, data: st.DataObject
) -> None:
    data_size, micro_batch_size = sizes
    count = data.draw(st.none() | st.integers(1, available))
    sequences = numbered(available)
    shares = [
        eval_microbatches(sequences, Place(rank, data_size, micro_batch_size), count=count) for rank in range(data_size)
    ]
    expected = available if count is None else count
    assert len({len(share) for share in shares}) == 1
    assert len(shares[0]) == -(-expected // (data_size * micro_batch_size))
    batches = [batch for share in shares for batch in share]
    assert all(batch[name].shape == (micro_batch_size, 3) for batch in batches for name in ("input_ids", "labels"))
    input_ids = torch.cat([batch["input_ids"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    chosen = [index * available // expected for index in range(expected)]
    assert len(set(chosen)) == expected
    assert torch.equal(labels[:expected], sequences.take(chosen)["labels"])
    assert torch.equal(input_ids[:expected], labels[:expected])
    assert (labels[expected:] == -100).all()
    assert (input_ids[expected:] >= 0).all()
    assert (input_ids < available * 3).all()


def test_evaluation_of_more_sequences_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 sequences are to be evaluated, but the split holds 4"):
        eval_microbatches(numbered(4), Place(0, 1, 1), count=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count must be at least 1"),
        ({"data_rank": 2}, r"data_rank must lie in \[0, 2\)"),
        ({"data_rank": -1}, r"data_rank must lie in \[0, 2\)"),
        ({"data_size": 0}, "data_size must be at least 1"),
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ({"sequences": numbered(0)}, "no sequences"),
    ],
)
def test_evaluation_refuses_arguments_out_of_range(changes: dict[str, object], message: str) -> None:
    place: dict[str, Any] = {"data_rank": 0, "data_size": 2, "micro_batch_size": 1}
    given = {"sequences": numbered(4), "count": 2} | {name: changes[name] for name in changes if name not in place}
    with pytest.raises(ValueError, match=message):
        eval_microbatches(
            given["sequences"],
            Place(**place | {name: changes[name] for name in changes if name in place}),
            count=given["count"],
        )
