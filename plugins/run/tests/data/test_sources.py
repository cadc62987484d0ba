"""Where examples come from: files of every kind, datasets of Hugging Face, and what is kept of them in the cache."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import write_run
from support.corpus import build_prose

from meshwright.base.errors import ConfigError, DataError
from meshwright.base.validation import validate_config
from meshwright_run.changed_settings import find_differences
from meshwright_run.data.config import DataConfig, SourceConfig
from meshwright_run.data.documents import TokenizedDocuments
from meshwright_run.data.files import iter_elements
from meshwright_run.data.parallel_tokenization import TokenizerWorker, build_tokenization, tokenize_records
from meshwright_run.data.prepare import PreparedData, prepare_data
from meshwright_run.data.sources import Record, read_records
from meshwright_run.data.tokenizer import train_tokenizer
from meshwright_run.preflight import preflight
from meshwright_run.run_file import load_run

PREPARE_MODULE = importlib.import_module("meshwright_run.data.prepare")
ROWS = [{"text": build_prose(number), "score": number, "note": 'a,\n"b" é'} for number in range(7)]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([build_prose(seed) for seed in range(20)], 320).save_pretrained(directory)
    return directory


def content_of(kind: str, rows: list[dict[str, Any]]) -> bytes:
    """Objects as a file of some kind holds them."""
    if kind == "jsonl":
        return "\n".join(json.dumps(row) for row in rows).encode()
    if kind == "json":
        return json.dumps(rows, indent=1, ensure_ascii=False).encode()
    if kind == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, row_group_size=3)
    return buffer.getvalue()


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    # Frames follow each other, as `cat` leaves them.
    half = len(content) // 2
    frames = [zstandard.compress(content[:half]), zstandard.compress(content[half:])]
    return b"".join(frames) if suffix == ".zst" else content


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> SourceConfig:
    """Write a file of the kind that its name says; a source of it, with a column."""
    suffix = path.suffix if path.suffix in (".gz", ".zst") else ""
    kind = path.name.removesuffix(suffix).rpartition(".")[2]
    path.write_bytes(compressed(content_of(kind, rows), suffix))
    return SourceConfig(files=str(path), columns=["score"])


def config_for(tmp_path: Path, tokenizer_dir: Path, *sources: SourceConfig, **changes: Any) -> DataConfig:
    values = {"seq_len": 16, "eval_fraction": 0.3, "cache_dir": str(tmp_path / "cache"), **changes}
    return DataConfig(sources=list(sources), tokenizer=str(tokenizer_dir), **values)


def documents_of(data: PreparedData, source: int = 0) -> TokenizedDocuments:
    found = data.sources[source].train_documents
    assert found is not None
    return found


# --- kinds of files


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_file_of_any_kind_holds_the_same_records(kind: str, suffix: str, tmp_path: Path) -> None:
    source = write(tmp_path / f"a.{kind}{suffix}")
    records = list(read_records(source))
    assert [record.fields for record in records] == ROWS
    assert [record.fields["score"] + 1 for record in records] == list(range(1, 8))
    assert records[2].location.startswith(f"{tmp_path}/a.{kind}{suffix}:")
    assert list(read_records(source, 5)) == records[5:]


def test_text_files_and_tables_of_text_hold_what_the_sources_other_files_do(tmp_path: Path) -> None:
    text = "one\r\ntwo" * 1000
    (tmp_path / "a.txt.gz").write_bytes(compressed(text.encode(), ".gz"))
    (tmp_path / "b.jsonl").write_text('{"body": "of a field"}\n', encoding="utf-8")
    source = SourceConfig(files=[str(tmp_path / "a.txt.gz"), str(tmp_path / "b.jsonl")], fields={"text": "body"})
    assert [record.fields for record in read_records(source)] == [{"body": text}, {"body": "of a field"}]
    for config, message in (
        ({"format": "messages"}, "format=messages needs objects with fields"),
        ({"columns": ["score"]}, ".txt files have no fields such as 'score'"),
    ):
        with pytest.raises(DataError, match=message):
            list(read_records(SourceConfig(files=str(tmp_path / "a.txt.gz"), **config)))  # type: ignore[arg-type]
    (tmp_path / "a.csv").write_text("text,score\n1,2\n3,-1e3\n5,two\n")
    cells = read_records(SourceConfig(files=str(tmp_path / "a.csv"), columns=["score"]))
    assert [next(cells).fields for _ in range(2)] == [{"text": "1", "score": 2}, {"text": "3", "score": -1000.0}]
    with pytest.raises(DataError, match=r"a\.csv:4: column 'score' holds 'two', a str"):
        next(cells)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=150)
@given(
    rows=st.lists(st.dictionaries(st.text(), json_values, max_size=3), max_size=5),
    indent=st.none() | st.integers(0, 3),
    ascii_only=st.booleans(),
    chunk=st.integers(1, 40),
)
def test_an_array_is_read_in_pieces_of_any_size(rows, indent, ascii_only, chunk):
    try:
        content = json.dumps(rows, indent=indent, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright_run.data.files._ARRAY_CHUNK", chunk)
        found = list(iter_elements(io.BytesIO(content), Path("a.json"), max_bytes=1 << 20))
    assert [value for value, _ in found] == rows
    lines = content.decode().splitlines() if indent is not None and ascii_only else None
    if lines is not None:
        assert all(lines[line - 1].lstrip().startswith("{") for _, line in found)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"text": "a"}', r"a\.json:1: a \.json file must hold an array .*rename it"),
        ("a.json", b'[{"text": "a"},\n{"text" "b"}]', r"a\.json:2: not valid JSON \(Expecting ':' delimiter"),
        ("a.json", b'[{"text": "a"}\n{"text": "b"}]', r"a\.json:2: not valid JSON \(expected ',' or '\]'"),
        ("a.json", b'[{"text": "a"},\n]', r"a\.json:2: .*a ',' before the '\]'"),
        ("a.json", b'[{"text": "a"}', r"a\.json:1: .*the end of the file"),
        ("a.json", b'[{"text": "a"},\n{"text": "b', r"a\.json:2: .*Unterminated string"),
        ("a.json", b'[{"text": "a"},\n{"text": "\xff"}]', r"a\.json:\d: not valid JSON \(not UTF-8: byte 0xff"),
        ("a.csv", b"text,x\na,1\nb\n", r"a\.csv:3: 1 fields, but the header names 2: text, x"),
        ("a.csv", b'text\n"a\n', r"a\.csv:2: not a valid \.csv row"),
        ("a.csv", b"text\n\xff\n", r"a\.csv:2: not UTF-8: byte 0xff"),
        ("a.parquet", b"PAR1 no", r"a\.parquet: not a valid \.parquet file, from row 0 on"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99)[:-9], r"a\.jsonl\.gz: the compressed content is corrupt"),
        (
            "a.jsonl.zst",
            zstandard.compress(b'{"text": "a"}\n' * 99)[:-3],
            r"a\.jsonl\.zst: .*truncated \(a .* frame is incomplete",
        ),
    ],
)
def test_a_broken_file_is_named_with_the_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_records(SourceConfig(files=str(tmp_path / name))))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_an_example_without_an_end_is_refused_before_memory_is_full(name, tmp_path, monkeypatch):
    monkeypatch.setattr("meshwright_run.data.files.MAX_BYTES", 1 << 17)
    begin = {"a.jsonl": b'{"text": "', "a.json": b'[{"text": "', "a.csv": b'text\n"'}[name]
    (tmp_path / name).write_bytes(begin + b"x" * (1 << 20))
    with pytest.raises(DataError, match=r":\d: .*131[,_]?072"):
        list(read_records(SourceConfig(files=str(tmp_path / name))))


# --- fields and columns


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "a"},
            r"a\.jsonl:1: no field 'points', which is listed under columns\. Fields of this record: text\.",
        ),
        ({"text": "a", "points": "1"}, r"a\.jsonl:1: column 'points' holds '1', a str, but must hold a finite number"),
        ({"text": "a", "points": 2**63}, r"column 'points' holds 9223372036854775808"),
    ],
)
def test_a_column_that_is_no_number_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    source = SourceConfig(files=str(tmp_path / "a.jsonl"), columns=["score"], fields={"score": "points"})
    with pytest.raises(DataError, match=message):
        list(read_records(source))


def test_columns_go_with_their_documents_and_have_one_type_in_all_sources(tmp_path: Path, tokenizer_dir: Path) -> None:
    rows = [{"text": build_prose(number), "score": 1 if number < 20 else 0.5} for number in range(30)]
    whole, real = write(tmp_path / "a.jsonl", rows[:20]), write(tmp_path / "b.jsonl", rows)
    data = prepare_data(config_for(tmp_path, tokenizer_dir, whole, real))
    assert dict(data.column_dtypes) == {"score": np.float64}
    assert documents_of(data).columns["score"].dtype == np.int64
    found = documents_of(data, 1)
    held_out = data.eval_sets["held_out"][1]
    tokenizer = train_tokenizer([build_prose(seed) for seed in range(20)], 320)
    expected = {(*tokenizer.encode(row["text"]), tokenizer.eos_token_id): row["score"] for row in rows}
    for documents in (found, held_out):
        texts = np.split(documents.tokens, documents.ends[:-1])
        assert [expected.pop(tuple(text.tolist())) for text in texts] == documents.columns["score"].tolist()
    assert not expected


def test_tokens_have_columns_of_their_own(tmp_path: Path, tokenizer_dir: Path) -> None:
    rows = [
        {"input_ids": list(range(2, 4 + number)), "labels": [-100, 3, *range(4, 4 + number)], "w": [0.5] * (2 + number)}
        for number in range(6)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = SourceConfig(files=str(tmp_path / "a.jsonl"), format="tokens", columns=["w"])
    data = prepare_data(config_for(tmp_path, tokenizer_dir, source))
    documents = documents_of(data)
    assert len(documents.columns["w"]) == len(documents.tokens)
    assert documents.loss_mask is not None
    assert not documents.loss_mask[np.r_[0, documents.ends[:-1]]].any()
    assert documents.loss_mask.sum() == len(documents.tokens) - len(documents)
    # An entry that has lost one of its files is made again.
    (data.directory / "train.loss_mask.npy").unlink()
    assert documents_of(prepare_data(config_for(tmp_path, tokenizer_dir, source))).loss_mask is not None
    rows[3]["w"] = 1.0  # type: ignore[assignment]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="column 'w' has one number per example in some examples, and one per token"):
        prepare_data(config_for(tmp_path, tokenizer_dir, source))


# --- datasets of Hugging Face


def saved(directory: Path, rows: list[dict[str, Any]] = ROWS, *, splits: bool = False) -> Path:
    dataset = datasets.Dataset.from_list(rows)
    kept = datasets.DatasetDict({"train": dataset, "test": dataset.select(range(2))}) if splits else dataset
    kept.save_to_disk(str(directory))
    return directory


def test_a_dataset_has_the_tokens_of_the_same_rows_in_a_file(tmp_path, tokenizer_dir, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    from_file = prepare_data(config_for(tmp_path, tokenizer_dir, write(tmp_path / "a.jsonl")))
    one = SourceConfig(dataset=str(saved(tmp_path / "one[1]")), columns=["score"])
    many = SourceConfig(dataset=str(saved(tmp_path / "many", splits=True)), columns=["score"])
    for source in (one, many):
        data = prepare_data(config_for(tmp_path, tokenizer_dir, source))
        assert data.fingerprint == from_file.fingerprint
        assert data.directory != from_file.directory
    (tmp_path / "files[1]").mkdir()
    write(tmp_path / "files[1]" / "train.parquet")
    assert [record.fields for record in read_records(SourceConfig(dataset=str(tmp_path / "files[1]")))] == ROWS
    test = SourceConfig(dataset=str(tmp_path / "many"), split="test")
    assert [record.location for record in read_records(test)] == [f"{tmp_path}/many[test]:{row}" for row in range(2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "trian"}, r"split='trian': .*many has no such split\. Did you mean 'train'.* It has train, test"),
        ({"name": "en"}, r"name='en' is a dataset configuration, but .*many was saved without any"),
        ({"revision": "main"}, r"revision='main' applies only to a hub dataset, but .*many is a directory"),
        ({"dataset": "/nowhere/at/all"}, r"dataset '/nowhere/at/all' is neither a directory"),
    ],
)
def test_what_a_saved_dataset_has_not_is_named(changes: dict[str, str], message: str, tmp_path: Path) -> None:
    saved(tmp_path / "many", splits=True)
    with pytest.raises(DataError, match=message):
        list(read_records(SourceConfig(**{"dataset": str(tmp_path / "many"), **changes})))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_dataset_of_the_hub_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "from meshwright_run.data import SourceConfig, read_records\n"
        "list(read_records(SourceConfig(dataset='nobody/nothing', revision='v1')))"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "DataError: the dataset 'nobody/nothing' at revision 'v1' cannot be loaded from the hub" in done.stderr
    assert "save it with `save_to_disk`" in done.stderr


def test_a_library_that_is_not_installed_is_named_with_what_installs_it(tmp_path, monkeypatch):
    for module, source in (
        ("zstandard", write(tmp_path / "a.jsonl.zst")),
        ("pyarrow.parquet", write(tmp_path / "a.parquet")),
        ("datasets", SourceConfig(dataset=str(saved(tmp_path / "one")))),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(DataError, match=r"needs the package \w+, .*pip install -e '\.\[data\]'"):
                list(read_records(source))


# --- the cache


def left_in(cache: Path) -> list[str]:
    return sorted({path.suffix for path in cache.glob("*/*")})


@pytest.mark.parametrize("rows", [9, 1])
def test_a_file_that_changes_while_it_is_tokenized_leaves_nothing_in_the_cache(
    rows: int, tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "a.jsonl")

    def meddle(*args: Any) -> Any:
        # One record alone would be an error of its own.
        (tmp_path / "a.jsonl").write_text('{"text": "other", "score": 1}\n' * rows)
        return tokenize_records(*args)

    monkeypatch.setattr(PREPARE_MODULE, "tokenize_records", meddle)
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read"):
        prepare_data(config_for(tmp_path, tokenizer_dir, source))
    assert left_in(tmp_path / "cache") == [".lock"]


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": ["score"]},
        {"seq_len": 8},
        {"too_long": "truncate"},
        {"fields": {"text": "note"}},
        {"eval_fraction": 0.8},
    ],
)
def test_what_is_made_of_records_is_part_of_the_entry(changes, tmp_path, tokenizer_dir):
    write(tmp_path / "a.jsonl")
    entries = []
    for values in ({}, changes):
        of_source = {name: value for name, value in values.items() if name in SourceConfig.model_fields}
        source = SourceConfig(files=str(tmp_path / "a.jsonl"), **of_source)
        rest = {name: value for name, value in values.items() if name not in of_source}
        entries.append(prepare_data(config_for(tmp_path, tokenizer_dir, source, packing="documents", **rest)))
    assert entries[0].directory != entries[1].directory
    assert documents_of(entries[0]).to_arrays().keys() <= documents_of(entries[1]).to_arrays().keys()
    assert entries[0].fingerprint != entries[1].fingerprint


def test_each_source_has_an_entry_and_one_that_changes_is_tokenized_alone(tmp_path, tokenizer_dir, monkeypatch):
    built: list[Path] = []
    real = PREPARE_MODULE._build_entry
    monkeypatch.setattr(
        PREPARE_MODULE, "_build_entry", lambda *args: (built.append(args[1].config.location), real(*args))
    )
    sources = [write(tmp_path / f"{name}.jsonl", ROWS[number:]) for number, name in enumerate("abc")]
    config = config_for(tmp_path, tokenizer_dir, *sources)
    before = prepare_data(config)
    assert built == [source.location for source in sources]
    write(tmp_path / "b.jsonl", ROWS[2:])
    after = prepare_data(config)
    assert built[3:] == [sources[1].location]
    changed = [a.fingerprint != b.fingerprint for a, b in zip(before.sources, after.sources, strict=True)]
    assert changed == [False, True, False]
    assert before.fingerprint != after.fingerprint
    assert after.num_documents == 7 + 5 + 5


def test_the_order_of_sources_is_in_the_fingerprint_and_one_source_has_its_own(tmp_path, tokenizer_dir):
    first, second = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", ROWS[1:])
    found = [
        prepare_data(config_for(tmp_path, tokenizer_dir, *sources)).fingerprint
        for sources in ((first, second), (second, first), (first,))
    ]
    assert len(set(found)) == 3
    plain = config_for(tmp_path, tokenizer_dir, SourceConfig(files=first.files))
    short = plain.model_copy(update={"sources": None, "corpus": first.files})
    assert prepare_data(short).fingerprint == prepare_data(plain).fingerprint
    assert prepare_data(short).directory == prepare_data(plain).directory


def test_a_run_that_continues_is_reported_which_of_its_sources_has_changed(tmp_path: Path, tokenizer_dir: Path) -> None:
    sources = [write(tmp_path / f"{name}.jsonl", ROWS[number:]) for number, name in enumerate("ab")]
    config = load_run(write_run(tmp_path))
    plans = []
    for trained_on in (sources, sources, sources[:1], None):
        changed = {"data": config_for(tmp_path, tokenizer_dir, *trained_on)} if trained_on else {}
        plans.append(preflight(config.model_copy(update=changed), 1).identity)
        if len(plans) == 1:
            write(tmp_path / "b.jsonl", ROWS[2:])
    assert find_differences(plans[0], plans[1]) == ["data.fingerprint", "data.sources.1"]
    # Of one source it is as before there were several.
    assert list(plans[2]["data"]) == list(plans[3]["data"]) == ["fingerprint", "seq_len"]


def test_evaluation_sets_are_whole_and_may_take_the_place_of_what_is_held_out(tmp_path, tokenizer_dir):
    source, other = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", ROWS[:3])
    for fraction in (0, 0.3):
        sets = {"small": other, "both": [other, source]}
        data = prepare_data(config_for(tmp_path, tokenizer_dir, source, eval_fraction=fraction, eval_sets=sets))
        lengths = {name: [len(each) for each in found] for name, found in data.eval_sets.items()}
        (held_out,) = lengths.pop("held_out", [0])
        assert lengths == {"small": [3], "both": [3, 7]}
        assert len(documents_of(data)) + held_out == 7
        assert (held_out > 0) == (fraction > 0)


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_the_two_of_a_pair_stay_together(fraction, tmp_path, tokenizer_dir, monkeypatch):
    rows = [{"prompt": f"q{n}", "chosen": f" yes {n}", "rejected": f" no {n}", "m": n} for n in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr("meshwright_run.data.parallel_tokenization._CHARACTERS_PER_BATCH", 40)
    source = SourceConfig(files=str(tmp_path / "a.jsonl"), format="preference", columns=["m"])
    data = prepare_data(config_for(tmp_path, tokenizer_dir, source, eval_fraction=fraction, seq_len=64))
    sides = [documents_of(data), *data.eval_sets["held_out"]]
    assert data.group_size == sides[0].group_size == sides[1].group_size == 2
    assert sum(map(len, sides)) == 16
    assert all(len(side) and len(side) % 2 == 0 for side in sides)
    for side in sides:
        pairs = side.columns["m"].reshape(-1, 2)
        assert (pairs[:, 0] == pairs[:, 1]).all()
    # Equal examples are on one side, whatever else is said of them.
    other = [{**row, "m": 9 - row["m"], "id": "x"} for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, other)))
    again = prepare_data(config_for(tmp_path, tokenizer_dir, source, eval_fraction=fraction, seq_len=64))
    assert documents_of(again).tokens.tolist() == sides[0].tokens.tolist()


# --- processes


def test_processes_make_the_same_documents_as_this_one(tmp_path, tokenizer_dir, monkeypatch):
    source = write(tmp_path / "a.jsonl", [{"text": build_prose(number), "score": number} for number in range(300)])
    monkeypatch.setattr("meshwright_run.data.parallel_tokenization._CHARACTERS_PER_BATCH", 2000)
    here = prepare_data(config_for(tmp_path, tokenizer_dir, source, cache_dir=str(tmp_path / "here")))
    monkeypatch.setattr("meshwright_run.data.parallel_tokenization._MAX_THREADED_CHARACTERS", 6000)
    monkeypatch.setattr("meshwright_run.data.parallel_tokenization.count_usable_cores", lambda: 2)
    there = prepare_data(config_for(tmp_path, tokenizer_dir, source))
    assert there.sources[0].counts == here.sources[0].counts
    for name, array in documents_of(here).to_arrays().items():
        np.testing.assert_array_equal(array, documents_of(there).to_arrays()[name])
    assert there.fingerprint == here.fingerprint
    assert not subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "meshwright_run.data.parallel_tokenization"], capture_output=True
    ).stdout


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([5], r"here:3: field 'text' holds 5"),
        (["kill"], r"a tokenizer process ended unexpectedly \(exit code -9\)"),
    ],
)
def test_what_goes_wrong_in_a_process_is_reported_here(texts, message, tokenizer_dir, monkeypatch):
    monkeypatch.setattr("meshwright_run.data.parallel_tokenization._CHARACTERS_PER_BATCH", 1)
    monkeypatch.setattr("meshwright_run.data.parallel_tokenization._MAX_THREADED_CHARACTERS", 1)
    monkeypatch.setattr("meshwright_run.data.parallel_tokenization.count_usable_cores", lambda: 1)
    tokenizer = train_tokenizer(["a b"], 257)
    source = SourceConfig(files="unused")
    records = [Record({"text": text}, f"here:{place}") for place, text in enumerate(["a", "b", "c", *texts])]
    if texts == ["kill"]:
        monkeypatch.setattr(TokenizerWorker, "call", killed)
    tokenization = build_tokenization(source, DataConfig(sources=[source]), 0.0)
    with pytest.raises(DataError, match=message):
        raise next(each for chunk in tokenize_records(records, tokenization, tokenizer) for each in chunk.errors)


def killed(worker: TokenizerWorker, argument: Any) -> Any:
    """As the system ends a process when memory runs out."""
    worker._process.kill()
    return worker._request(argument)


# --- progress


# --- what a run file may say

TEXT = {"files": "a.jsonl"}
CHAT = {"files": "a.jsonl", "format": "messages"}
PAIRS = {"files": "a.jsonl", "format": "preference"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sources": [TEXT], "corpus": "b.txt"}, "corpus='b.txt' is the short form of a single text source"),
        ({"vocab_size": 256}, "vocab_size"),
        ({"eval_fraction": 1.0}, "eval_fraction"),
        ({"tokenizer": "somewhere", "vocab_size": 300}, "vocab_size=300"),
        ({"sources": []}, "at least 1 item"),
        ({"sources": [{"files": " "}]}, "names no files"),
        ({"sources": [{**TEXT, "split": "test"}]}, "split applies only to a dataset, not to files"),
        ({"sources": [{"files": "stdlib", "format": "tokens"}]}, "'stdlib' can be text, messages or"),
        ({"sources": [{**TEXT, "fields": {"txt": "b"}}]}, "fields: 'txt' is not a field of format=text.*'text'"),
        (
            {"sources": [{**TEXT, "columns": ["labels"]}]},
            "columns: 'labels' is empty, given twice, or already the name",
        ),
        ({"sources": [{**TEXT, "weight": 2.0}]}, "weight has no effect: there is only one source"),
        ({"sources": [{**TEXT, "weight": 2.0}, TEXT]}, "weight is given for some sources"),
        ({"sources": [TEXT, {**TEXT, "columns": ["a"]}]}, "sources.1 .* has columns .*'a'.*, but sources.0 has"),
        ({"sources": [TEXT, PAIRS]}, "cannot mix preference pairs and single examples"),
        (
            {"sources": [{**TEXT, "streaming": True}]},
            "eval_fraction=0.05 cannot hold out examples of sources that are read during",
        ),
        ({"sources": [TEXT], "eval_fraction": 0}, "leaves nothing to evaluate on"),
        ({"sources": [TEXT], "eval_sets": {"held_out": TEXT}}, "the reserved name of the held-out set"),
        ({"sources": [TEXT], "eval_sets": {"a": {**TEXT, "weight": 1.0}}}, "weight has no effect in an evaluation set"),
        ({"sources": [TEXT], "eval_sets": {"a": PAIRS}}, r"eval_sets\.a .* cannot mix preference pairs"),
        ({"sources": [CHAT], "packing": "stream"}, "packing=stream cuts examples at any token.*messages"),
        ({"sources": [PAIRS], "packing": "documents"}, "packing=documents: each answer of a preference pair"),
        ({"sources": [TEXT], "too_long": "truncate"}, "too_long=truncate has no effect with packing=stream"),
        ({"sources": [CHAT], "too_long": "split"}, "too_long=split would separate answers from their prompts"),
        ({"sources": [TEXT], "loss_on": "all"}, "loss_on has no effect: all sources are text"),
        ({"chat_template": "x"}, "chat_template has no effect: all sources are text"),
        (
            {"sources": [{**TEXT, "streaming": True}, TEXT]},
            "streaming: true has no known number of rows, so each of several sources needs a weight",
        ),
    ],
)
def test_what_sources_do_not_go_together_with_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_config(DataConfig, values, where="data")


def test_what_null_stands_for_follows_from_the_formats() -> None:
    def kinds(*sources: dict[str, Any], **values: Any) -> tuple[str, Any]:
        config = validate_config(DataConfig, {"sources": list(sources), **values}, where="data")
        return config.resolve_packing(), config.resolve_too_long(sources[0].get("format", "text"))

    assert kinds(TEXT) == ("stream", None)
    assert kinds(TEXT, packing="documents") == ("documents", "split")
    assert kinds(CHAT) == kinds(CHAT, TEXT) == ("documents", "error")
    assert kinds(TEXT, CHAT) == ("documents", "split")
    assert kinds(PAIRS) == ("none", "error")
    assert kinds(TEXT, eval_sets={"a": CHAT}) == ("documents", "split")
    assert DataConfig().get_training_sources() == [SourceConfig(files="stdlib")]


def test_a_source_that_is_too_small_is_named(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = tmp_path / "a.jsonl"
    config = config_for(tmp_path, tokenizer_dir, SourceConfig(files=str(path)))
    for content, message in (
        ("", "is empty: it holds no example"),
        ('{"text": ""}\n', "is empty"),
        ('{"text": "a"}', "holds 1 document, but needs at least 2"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=f"a.jsonl' {message}"):
            prepare_data(config)
    source = SourceConfig(files=str(path), format="tokens")
    with pytest.raises(ConfigError, match=r"\(format=tokens\) needs a tokenizer: the model's own, or data\.tokenizer"):
        prepare_data(DataConfig(sources=[source], cache_dir=str(tmp_path)))


def test_a_source_whose_answers_are_all_cut_off_is_not_reported_as_empty(tmp_path, tokenizer_dir):
    record = {"prompt": "x" * 400, "chosen": "y", "rejected": "z"}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(record)}\n" * 3)
    source = SourceConfig(files=str(tmp_path / "a.jsonl"), format="preference")
    with pytest.raises(DataError) as caught:
        prepare_data(config_for(tmp_path, tokenizer_dir, source, too_long="truncate"))
    assert "is empty" not in str(caught.value)
    assert "a.jsonl' holds 3 records, but none has a supervised token within seq_len=16" in str(caught.value)
    assert "Set data.seq_len to more than 16" in str(caught.value)
