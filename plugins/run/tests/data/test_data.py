"""The data pipeline: corpus, tokenizer, split, packing, cache and order."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
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
from support.corpus import build_prose
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from meshwright.base.errors import ConfigError, DataError
from meshwright_run.data.config import DEFAULT_VOCAB_SIZE, DataConfig, SourceConfig
from meshwright_run.data.conversations import FieldReader
from meshwright_run.data.documents import TokenizedDocuments, get_cache_root, iter_training_documents
from meshwright_run.data.encoder import Encoder
from meshwright_run.data.order import DataOrder, check_batch_size, shuffle_indices
from meshwright_run.data.packing import ConcatChunkedDataset
from meshwright_run.data.prepare import PreparedData, prepare_data
from meshwright_run.data.sources import Record, read_records, resolve_source
from meshwright_run.data.tokenizer import EOS, has_tokenizer, load_tokenizer, train_tokenizer
from meshwright_run.data.train_sampler import DataShard, TrainSampler, read_eval_microbatches

EXAMPLES = settings(deadline=None, max_examples=60)
ENTRY_MODULE = importlib.import_module("meshwright_run.data.prepare")
SOURCES_MODULE = importlib.import_module("meshwright_run.data.sources")


def held_out_mask(texts: list[str], fraction: float) -> np.ndarray:
    """Which of different texts are held out."""
    trained_on = set(iter_training_documents(texts, fraction))
    return np.array([text not in trained_on for text in texts])


def stream_of(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> np.ndarray:
    found, _ = Encoder(tokenizer).encode([Record({"text": text}, "here") for text in texts])
    return np.concatenate([example.tokens for examples in found for example in examples])


def texts_in(files: str | list[str], text_field: str = "text") -> list[str]:
    """The documents of a source, read in full."""
    source = SourceConfig(files=files, fields={} if text_field == "text" else {"text": text_field})
    return [FieldReader(source.fields).read_text(record, "text") for record in read_records(source)]


def in_sequences(data: PreparedData, seq_len: int) -> ConcatChunkedDataset:
    """What a run trains on."""
    (source,) = data.sources
    assert source.train_documents is not None
    return ConcatChunkedDataset(source.train_documents, seq_len)


def write_corpus(directory: Path, documents: int = 12) -> str:
    """Write documents as .txt files and return a glob of them."""
    directory.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        (directory / f"{index:03}.txt").write_text(build_prose(index), encoding="utf-8")
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
    real = ENTRY_MODULE._build_entry

    def recorded(directory: Path, *args: object) -> None:
        built.append(directory)
        real(directory, *args)

    monkeypatch.setattr(ENTRY_MODULE, "_build_entry", recorded)
    return built


@pytest.fixture(scope="module")
def trained() -> PreTrainedTokenizerFast:
    return train_tokenizer([build_prose(seed) for seed in range(20)], 320)


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


def test_each_json_line_is_a_document_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    lines = [{"body": "one\u2028still one"}, {"body": ""}, {"body": "two", "other": 3}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    source = resolve_source(SourceConfig(files=str(tmp_path / "a.jsonl"), fields={"text": "body"}))
    for _ in range(2):
        assert [record.fields["body"] for record in read_records(source)] == ["one\u2028still one", "two"]
        assert [record.location for record in read_records(source)] == [f"{tmp_path}/a.jsonl:{line}" for line in (1, 5)]


def test_stdlib_holds_sources_without_tests_and_installed_packages() -> None:
    names = [file.path.as_posix() for file in resolve_source(SourceConfig(files="stdlib")).files]
    assert names == sorted(names, key=Path)
    assert any(name.endswith("/json/decoder.py") for name in names)
    for part in ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"):
        assert not any(f"/{part}/" in name.split("/lib/")[-1] for name in names), part


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": ', r"a\.jsonl:2: not valid JSON \(.* at column \d+\)"),
        ('{"text": ' + "1" * 5000 + "}", r"a\.jsonl:2: not valid JSON"),
        ('["text"]', r"a\.jsonl:2: holds a JSON list"),
        ('{"texts": "x", "id": 1}', r"a\.jsonl:2: no field 'text'\. Fields of this line: id, texts\..*'texts'\?"),
        ('{"text": null}', r"a\.jsonl:2: field 'text' holds None, a NoneType, but must hold a string"),
        (r'{"text": "a\ud800"}', r"a\.jsonl:2: .*surrogate"),
        (b"caf\xe9", r"a\.jsonl:2: not UTF-8: byte 0xe9 at offset 3"),
    ],
)
def test_bad_json_line_is_named_with_file_and_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    line = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        texts_in(str(tmp_path / "a.jsonl"))


def test_what_a_glob_matches_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\u2028é".encode())
    assert texts_in("~/*.txt") == ["one\r\ntwo\u2028é"]
    (tmp_path / "b.md").write_text("text")
    (tmp_path / "c.txt").symlink_to(tmp_path / "gone.txt")
    for glob, message in (
        (["~/a.txt", "~/nowhere/*.txt"], r"glob '.*nowhere/\*\.txt' matches no file"),
        (str(tmp_path), r"is a directory: add '/\*\*/\*\.txt'"),
        ("~/*.md", r"b\.md, whose suffix is '\.md'\. Allowed: \.txt, \.jsonl, \.json, "),
        ("~/c.txt", r"c\.txt cannot be read"),
    ):
        with pytest.raises(DataError, match=message):
            texts_in(glob)
    with pytest.raises(DataError, match="no fields such as 'body'"):
        texts_in("~/a.txt", "body")


# --- tokenizer


@EXAMPLES
@given(texts=st.lists(st.text(min_size=1), min_size=1, max_size=5))
def test_stream_holds_each_document_and_an_eos(trained: PreTrainedTokenizerFast, texts: list[str]) -> None:
    stream = stream_of(trained, texts)
    expected = [token for text in texts for token in [*trained.encode(text), trained.eos_token_id]]
    assert stream.dtype == np.uint16
    assert stream.tolist() == expected


def test_saved_maximum_length_does_not_cut_documents(tmp_path: Path, trained_dir: Path) -> None:
    shutil.copytree(trained_dir, tmp_path / "cut")
    backend = Tokenizer.from_file(str(trained_dir / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=100)
    backend.save(str(tmp_path / "cut" / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "cut")
    assert texts_of(stream_of(tokenizer, [build_prose(1), build_prose(2)]), tokenizer) == [
        build_prose(1),
        build_prose(2),
    ]


def test_large_vocabulary_is_stored_in_32_bits() -> None:
    vocabulary = {EOS: 0, "a": 1, "b": 70_000}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=EOS))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    stream = stream_of(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS), ["a b"])
    assert stream.dtype == np.uint32
    assert stream.tolist() == [1, 70_000, 0]


PANICS = {
    "type": "BPE",
    "vocab": {"a": 0, "b": 1, "ab": 2},
    "merges": [["a", "b"]],
    "continuing_subword_prefix": "xxx",
}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", {"model_type": "gpt2"}, "holds no tokenizer"),
        ("tokenizer.json", {}, "cannot be loaded"),
        # Rust's code panics.
        ("tokenizer.json", {"version": "1.0", "added_tokens": [], "model": PANICS}, "cannot be loaded"),
    ],
)
def test_what_is_no_usable_tokenizer_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_text(json.dumps(content))
    assert has_tokenizer(tmp_path) == (name == "tokenizer.json")
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"gone' does not exist .* nothing is downloaded"):
        load_tokenizer(tmp_path / "gone")


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
def test_split_has_both_sides_and_does_not_depend_on_order(texts, fraction, order):
    mask = held_out_mask(texts, fraction)
    assert 0 < mask.sum() < len(texts)
    shuffled = order.sample(texts, len(texts))
    assert dict(zip(shuffled, held_out_mask(shuffled, fraction), strict=True)) == dict(zip(texts, mask, strict=True))


def test_split_of_a_document_does_not_depend_on_the_other_documents() -> None:
    texts = [build_prose(seed) for seed in range(100)]
    whole, half = held_out_mask(texts, 0.3), held_out_mask(texts[::2], 0.3)
    assert half.any()
    np.testing.assert_array_equal(whole[::2], half)


def test_split_holds_out_about_the_fraction() -> None:
    assert 0.2 < held_out_mask([build_prose(seed, words=5) for seed in range(1000)], 0.25).mean() < 0.3


# --- a stream


def in_rows(tokens: np.ndarray, seq_len: int) -> ConcatChunkedDataset:
    return ConcatChunkedDataset(TokenizedDocuments(tokens, np.array([len(tokens)])), seq_len)


@EXAMPLES
@given(tokens=st.lists(st.integers(0, 60_000), max_size=60), seq_len=st.integers(1, 9), data=st.data())
def test_sequences_are_the_stream_cut_without_its_tail(tokens: list[int], seq_len: int, data: st.DataObject) -> None:
    sequences = in_rows(np.array(tokens, np.uint16), seq_len)
    assert len(sequences) == len(tokens) // seq_len
    if len(sequences):
        chosen = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=5))
        taken = sequences.read_batch(chosen)["input_ids"]
        assert taken.dtype == torch.int64
        assert taken.shape == (len(chosen), seq_len)
        assert taken.tolist() == [tokens[index * seq_len : (index + 1) * seq_len] for index in chosen]
    for index in (-1, len(sequences)):
        with pytest.raises(IndexError, match=f"row {index} does not exist; there are {len(sequences)}"):
            sequences.read_batch([index])


# --- prepare


def test_tokenizer_is_trained_on_training_documents_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "corpus")
    seen: list[str] = []

    def spy(documents: object, vocab_size: int) -> object:
        seen.extend(documents)  # type: ignore[arg-type]
        return train_tokenizer(seen, vocab_size)

    monkeypatch.setattr(ENTRY_MODULE, "train_tokenizer", spy)
    data = prepare_data(config_for(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    assert sorted(seen) == sorted(texts_of(np.load(data.directory / "train.npy"), tokenizer))
    assert 0 < len(seen) < 12


@pytest.mark.parametrize("fraction", [1e-6, 0.5, 1 - 1e-6])
def test_streams_and_tokenizer_have_the_same_sides_in_the_order_of_the_corpus(tmp_path: Path, fraction: float) -> None:
    write_corpus(tmp_path / "corpus", documents=5)
    data = prepare_data(config_for(tmp_path, eval_fraction=fraction))
    tokenizer = AutoTokenizer.from_pretrained(data.tokenizer_dir)
    texts = [build_prose(index) for index in range(5)]
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
def test_fingerprint_stays_what_it_was_in_earlier_releases(tmp_path, documents, fraction, fingerprint):
    write_corpus(tmp_path / "corpus", documents)
    assert prepare_data(config_for(tmp_path, eval_fraction=fraction)).fingerprint == fingerprint


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(tmp_path, trained_dir, monkeypatch):
    monkeypatch.setattr("meshwright_run.data.parallel_tokenization._CHARACTERS_PER_BATCH", 1 << 12)
    monkeypatch.setattr("meshwright_run.data.parallel_tokenization.count_usable_cores", lambda: 2)
    peaks = []
    for number, documents in enumerate((10, 200, 1600)):
        text = "\n".join(json.dumps({"text": build_prose(index, words=120)}) for index in range(documents))
        (tmp_path / f"{number}.jsonl").write_text(text)
        del text
        config = config_for(
            tmp_path,
            corpus=str(tmp_path / f"{number}.jsonl"),
            tokenizer=str(trained_dir),
            vocab_size=DEFAULT_VOCAB_SIZE,
        )
        tracemalloc.start()
        prepare_data(config)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # The first one imports what is needed.
    assert peaks[2] < 1.1 * peaks[1]


def test_second_call_finds_the_entry_and_other_lengths_share_it(tmp_path, corpus, builds):
    first = prepare_data(config_for(tmp_path))
    again = prepare_data(config_for(tmp_path))
    longer = prepare_data(config_for(tmp_path, seq_len=32))
    assert len(builds) == 1
    assert first.directory == again.directory == longer.directory
    assert first.fingerprint == again.fingerprint == longer.fingerprint
    rows = in_sequences(first, 16).read_batch([0, 1])["input_ids"]
    assert in_sequences(longer, 32).read_batch([0])["input_ids"][0].tolist() == rows.flatten().tolist()
    tokens = in_sequences(again, 16).documents.tokens
    while isinstance(tokens.base, np.ndarray):
        tokens = tokens.base
    assert isinstance(tokens, np.memmap)


def test_what_changes_the_tokens_makes_a_new_entry(tmp_path: Path, corpus: Path, builds: list[Path]) -> None:
    path = corpus / "003.txt"
    before = path.stat()

    def edit() -> None:
        path.write_text(path.read_text().swapcase())
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))

    def grow() -> None:
        (corpus / "new.txt").write_text(build_prose(99))

    found = [prepare_data(config_for(tmp_path))]
    for change in (edit, path.unlink, grow):
        change()
        found.append(prepare_data(config_for(tmp_path)))
    found += [prepare_data(config_for(tmp_path, **values)) for values in ({"vocab_size": 290}, {"eval_fraction": 0.6})]
    assert len(builds) == len({each.directory for each in found}) == len({each.fingerprint for each in found}) == 6


def test_new_format_or_library_version_makes_a_new_entry(tmp_path, corpus, builds, monkeypatch):
    prepare_data(config_for(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(ENTRY_MODULE, "CACHE_FORMAT", 0)
        prepare_data(config_for(tmp_path))
    monkeypatch.setattr(ENTRY_MODULE, "version", lambda name: "0.0")
    prepare_data(config_for(tmp_path))
    assert len(builds) == 3


def test_given_tokenizer_is_used_and_its_change_makes_a_new_entry(tmp_path, corpus, trained_dir, builds):
    own = tmp_path / "own"
    shutil.copytree(trained_dir, own)
    config = config_for(tmp_path, tokenizer=str(own), vocab_size=1024)
    first = prepare_data(config)
    assert (first.tokenizer_dir, first.vocab_size) == (own, 320)
    assert not (first.directory / "tokenizer").exists()
    tokens = np.load(first.directory / "train.npy")
    assert set(texts_of(tokens, AutoTokenizer.from_pretrained(own))) < {build_prose(index) for index in range(12)}

    train_tokenizer([build_prose(1), "other words"], 270).save_pretrained(own)
    with pytest.raises(ConfigError, match="vocab_size=300"):
        prepare_data(config_for(tmp_path), tokenizer_dir=trained_dir)
    second = prepare_data(config, tokenizer_dir=trained_dir)
    assert second.vocab_size == 270
    assert second.fingerprint != first.fingerprint
    assert len(builds) == 2


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
    first = prepare_data(config_for(tmp_path))
    want = in_sequences(first, 16).read_batch([0, 1])["input_ids"]
    damage(first.directory)  # type: ignore[operator]
    again = prepare_data(config_for(tmp_path))
    assert len(builds) == 2
    assert again.fingerprint == first.fingerprint
    assert torch.equal(in_sequences(again, 16).read_batch([0, 1])["input_ids"], want)
    AutoTokenizer.from_pretrained(again.tokenizer_dir)


def test_unwritable_cache_is_explained(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="Set cache_dir"):
        prepare_data(config_for(tmp_path, cache_dir=str(tmp_path / "file")))


def test_cache_root_follows_config_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert get_cache_root("~/mine") == tmp_path / "mine"
    assert get_cache_root(None) == Path("/elsewhere/meshwright")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert get_cache_root(None) == tmp_path / ".cache" / "meshwright"


# --- several processes

_SCRIPT = """
import os, sys
from meshwright_run.data import DataConfig, prepare_data
module = sys.modules["meshwright_run.data.prepare"]
real = module._build_entry
def build(directory, *args):
    print("built", flush=True)
    real(directory, *args)
    if mode == "die":
        os._exit(9)
module._build_entry = build
mode, config = sys.argv[1], DataConfig.model_validate_json(sys.argv[2])
print("ready", flush=True)
threads = lambda: len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
before = threads() if mode == "look" else 0
data = prepare_data(config)
print(data.fingerprint, flush=True)
if mode == "look":
    print("torch" in sys.modules, threads() - before, flush=True)
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
    command = [sys.executable, "-c", _SCRIPT, mode, config.model_dump_json()]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_preparing_imports_no_torch_and_leaves_no_threads_that_a_fork_would_lose(tmp_path: Path, corpus: Path) -> None:
    process = start("look", config_for(tmp_path))
    output, errors = process.communicate(timeout=60)
    assert output.split()[-3:] == ["False", "0", "2"], errors
    assert "fork" not in errors
    assert process.returncode == 0


@pytest.mark.slow
def test_of_two_processes_one_builds_and_both_get_the_result(tmp_path: Path, corpus: Path) -> None:
    config = config_for(tmp_path)
    expected = prepare_data(config)
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


@pytest.mark.slow
def test_killed_builder_leaves_nothing_that_counts(tmp_path: Path, corpus: Path, builds: list[Path]) -> None:
    config = config_for(tmp_path)
    process = start("die", config)
    process.communicate(timeout=60)
    assert process.returncode == 9
    left = sorted(path.suffix for path in (tmp_path / "cache" / "data").iterdir())
    assert left == [".building", ".lock"]
    data = prepare_data(config)
    assert len(builds) == 1
    assert data.num_documents == 12
    left = sorted(path.suffix for path in (tmp_path / "cache" / "data").iterdir())
    assert left == ["", ".lock"]


# --- order


def test_the_order_is_one_stream_that_stays_what_it_was_in_earlier_releases() -> None:
    assert DataOrder(8, 12, seed=5).get_indices(0).tolist() == [4, 3, 1, 7, 5, 6, 0, 2, 0, 1, 4, 5]
    far = DataOrder(10**15, 3, seed=5).get_indices(10**17)
    assert far.tolist() == [397021958276261, 547201257243500, 837044565523133]
    small, large = DataOrder(10, 3, 0), DataOrder(10, 12, 0)
    np.testing.assert_array_equal(np.concatenate([small.get_indices(step) for step in range(4)]), large.get_indices(0))
    np.testing.assert_array_equal(small.get_indices(2), DataOrder(10, 3, 0).get_indices(2))
    assert not np.array_equal(DataOrder(50, 50, seed=4).get_indices(0), DataOrder(50, 50, seed=3).get_indices(0))
    for values, name in (((0, 1, 0), "num_sequences"), ((1, 0, 0), "batch_size"), ((1, 1, -1), "seed")):
        with pytest.raises(ValueError, match=f"{name} must be at least"):
            DataOrder(*values)
    with pytest.raises(ValueError, match="step must be at least 0, not -1"):
        DataOrder(1, 1, 0).get_indices(-1)


orders = st.builds(DataOrder, st.integers(1, 30), st.integers(1, 40), st.integers(0, 2**70))


@EXAMPLES
@given(order=orders)
def test_every_epoch_covers_every_sequence_once(order: DataOrder) -> None:
    epochs = 3
    steps = -(-epochs * order.num_sequences // order.batch_size)
    stream = np.concatenate([order.get_indices(step) for step in range(steps)])
    assert stream.dtype == np.int64
    assert len(stream) == steps * order.batch_size
    for epoch in range(epochs):
        part = stream[epoch * order.num_sequences : (epoch + 1) * order.num_sequences]
        assert sorted(part) == list(range(order.num_sequences))


@EXAMPLES
@given(size=st.integers(1, 2**62), seed=st.integers(0, 99), data=st.data())
def test_shuffled_places_of_any_size_are_computed_alone(size: int, seed: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    found = shuffle_indices(np.array(places), size, seed=seed, epoch=0)
    assert len(set(found.tolist())) == len(places)
    assert ((found >= 0) & (found < size)).all()
    assert [int(shuffle_indices(np.array([place]), size, seed=seed, epoch=0)[0]) for place in places] == found.tolist()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_orders_of_a_few_places_are_equally_likely(size: int) -> None:
    orders = math.factorial(size)
    draws = 20 * orders
    counts = Counter(
        tuple(shuffle_indices(np.arange(size), size, seed=3, epoch=epoch).tolist()) for epoch in range(draws)
    )
    chi_square = sum((counts[each] - 20) ** 2 / 20 for each in itertools.permutations(range(size)))
    # Four standard deviations above its mean.
    assert chi_square < orders - 1 + 4 * math.sqrt(2 * (orders - 1))


# --- microbatches


def numbered(count: int, seq_len: int = 3) -> ConcatChunkedDataset:
    """Sequences that show their index: sequence i holds seq_len x i onwards."""
    return in_rows(np.arange(count * seq_len, dtype=np.uint32), seq_len)


sizes = st.tuples(st.integers(1, 4), st.integers(1, 4))


@EXAMPLES
@given(sizes=sizes, multiple=st.integers(1, 3), count=st.integers(1, 20), step=st.integers(0, 9))
def test_ranks_share_the_same_global_batch_at_any_size(sizes, multiple, count, step):
    data_size, micro_batch_size = sizes
    sequences = numbered(count)
    order = DataOrder(count, data_size * micro_batch_size * multiple, seed=7)
    shares = [
        TrainSampler(
            [sequences], DataShard(rank, data_size, micro_batch_size), batch_size=order.batch_size, seed=7
        ).read_microbatches(step)
        for rank in range(data_size)
    ]
    assert [len(share) for share in shares] == [multiple] * data_size
    for batch in (batch for share in shares for batch in share):
        assert batch["input_ids"].shape == (micro_batch_size, 3)
        assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
        assert torch.equal(batch["input_ids"], batch["labels"])
    together = torch.cat([batch["input_ids"] for share in shares for batch in share])
    assert torch.equal(together, sequences.read_batch(order.get_indices(step))["input_ids"])


@pytest.mark.parametrize(
    ("batch_size", "allowed"), [(10, "set it to 8 or 16"), (3, "set it to 8, or"), (0, "set it to 8, or")]
)
def test_batch_that_does_not_divide_is_refused_with_the_allowed_sizes(batch_size: int, allowed: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"batch_size={batch_size} .*2 data ranks x micro_batch_size=4 = 8\..*{allowed}"
    ):
        check_batch_size(batch_size, data_size=2, micro_batch_size=4)
    for rank in range(2):
        with pytest.raises(ConfigError, match="batch_size=6"):
            TrainSampler([numbered(9)], DataShard(rank, 2, 2), batch_size=6, seed=0)


@EXAMPLES
@given(sizes=sizes, available=st.integers(1, 20), data=st.data())
def test_evaluation_covers_each_sequence_once_and_pads_with_masked_ones(sizes, available, data):
    data_size, micro_batch_size = sizes
    count = data.draw(st.none() | st.integers(1, available))
    sequences = numbered(available)
    shares = [
        read_eval_microbatches(sequences, DataShard(rank, data_size, micro_batch_size), num_rows=count)
        for rank in range(data_size)
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
    assert torch.equal(labels[:expected], sequences.read_batch(chosen)["labels"])
    assert torch.equal(input_ids[:expected], labels[:expected])
    assert (labels[expected:] == -100).all()
    assert (input_ids[expected:] >= 0).all()
    assert (input_ids < available * 3).all()


def test_evaluation_refuses_arguments_out_of_range() -> None:
    place = DataShard(0, 1, 1)
    with pytest.raises(ConfigError, match="cannot evaluate on 5 sequences: the split holds 4"):
        read_eval_microbatches(numbered(4), place, num_rows=5)
    with pytest.raises(ValueError, match="num_rows must be at least 1"):
        read_eval_microbatches(numbered(4), place, num_rows=0)
    with pytest.raises(ValueError, match="no sequences"):
        read_eval_microbatches(numbered(0), place, num_rows=None)
    with pytest.raises(ValueError, match=r"data_rank must be in \[0, 2\)"):
        DataShard(-1, 2, 1)
