"""`meshwright data show` tells of the data of a run what a model is given of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from support.chat_templates import tokenizer, turns
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright_run.data.documents import Documents
from meshwright_run.data.encoder import Counts
from meshwright_run.data.feed import Feed, Place
from meshwright_run.data.order import Stream
from meshwright_run.data.report import (
    Run,
    ShownRow,
    SourceSummary,
    as_histogram,
    as_text,
    bins_of,
    first_rows,
    measured_fill,
    shown_row,
)
from meshwright_run.data.rows import make_rows

MODEL = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    directory = tmp_path_factory.mktemp("show")
    tokenizer("llama3", "llama3").save_pretrained(directory / "tokenizer")
    talks = [turns("Hi there", "Hello! " * (1 + n % 3)) for n in range(30)] + [turns("It is four. " * 40, "Hello!")]
    lines = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    (directory / "chats.jsonl").write_text(lines, encoding="utf-8")
    run = {
        "strategy": "single",
        "device": "cpu",
        "steps": 1,
        "batch_size": 4,
        "output_dir": str(directory / "out"),
        "model": MODEL,
        "data": {
            "tokenizer": str(directory / "tokenizer"),
            "sources": [{"files": str(directory / "chats.jsonl"), "format": "messages"}],
            "seq_len": 64,
            "too_long": "cut",
            "cache_dir": str(directory / "cache"),
        },
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return directory


def shown(workplace, *arguments):
    result = CliRunner().invoke(app, ["data", "show", str(workplace / "run.yaml"), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_rows_are_shown_as_the_model_sees_them_and_what_became_of_the_source(workplace):
    output = shown(workplace, "--rows", "2", "--png", str(workplace / "new" / "lengths.png"))
    assert output.count("── row ") == 2
    assert "┄┄ document 2 ┄┄" in output
    assert "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello!" in output
    assert "<|eot_id|>⟧" in output
    assert "⟦<|start" not in output
    table = output[output.index("nothing learnt") :]
    # 31 records; one has lost its answer, which stood behind a long question.
    assert table.split("\n")[1].split()[1:4] == ["messages", "31", "30"]
    assert table.split("\n")[1].split()[-5:] == ["1", "0", "0", "1", "0"]
    assert "seq_len is 64" in output
    assert (workplace / "new" / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_their_own_are_as_full_as_those_beside_them_allow(workplace):
    output = shown(workplace, "--rows", "1", "--set", "data.packing=none")
    assert "1 token in" not in output
    assert "in 1 document," in output
    fill = float(output[output.index("nothing learnt") :].split("\n")[1].split()[-6].rstrip("%"))
    assert 70 < fill <= 100


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_what_was_shown_of_a_source_that_is_read_while_training_is_measured_too(workplace, monkeypatch):
    # In blocks of few records, so that the first is left behind.
    monkeypatch.setattr(Stream.__init__, "__kwdefaults__", {"group": 1, "records": 4})
    source = {"files": str(workplace / "chats.jsonl"), "format": "messages", "weight": 1}
    sources = json.dumps([source, {**source, "streaming": True}])
    output = shown(workplace, "--rows", "40", "--set", "data.packing=none", "--set", f"data.sources={sources}")
    assert output.count("── row ") == 40
    assert "is read while training: nothing of it is counted before" in output


def test_wrong_data_are_one_error(workplace):
    result = CliRunner().invoke(app, ["data", "show", str(workplace / "run.yaml"), "--set", "data.too_long=error"])
    assert result.exit_code == 2
    assert "chats.jsonl:31: " in result.output
    assert "seq_len=64" in result.output


def documents(*lengths, learnt=2):
    """Of which the last tokens are learnt; each ends with the eos token."""
    eos = tokenizer("base").eos_token_id
    tokens = [np.array([*range(5, 4 + length), eos]) for length in lengths]
    labelled = [np.arange(length) >= length - learnt for length in lengths]
    return Documents(np.concatenate(tokens).astype(np.uint16), np.cumsum(lengths), np.concatenate(labelled))


@pytest.mark.parametrize("kind", ["documents", "stream", "none"])
def test_documents_and_padding_are_told_apart(kind):
    rows = make_rows(documents(5, 3, 4), kind, 8)
    feed = Feed([rows], Place(0, 1, 1), batch_size=1, seed=0)
    found = list(first_rows(feed, len(rows), kind, tokenizer("base")))
    sizes = sorted(sum(run.tokens for run in each) for row in found for each in row.documents)
    padding = sum(row.padding for row in found)
    # The stream has no row for the last one.
    assert sizes == ([3, 5] if kind == "stream" else [3, 4, 5])
    assert kind == "none" or padding == {"documents": 4, "stream": 0}[kind]
    learnt = sum(run.tokens for row in found for each in row.documents for run in each if run.learnt)
    assert learnt == {"documents": 6, "stream": 4, "none": 6}[kind]
    assert measured_fill(feed, len(rows)) == sum(sizes) / (sum(sizes) + padding)


def test_padding_is_no_text():
    row = {
        "input_ids": np.array([7, 8, 9, 0, 0]),
        "labels": np.array([-100, 8, -100, -100, -100]),
        "reward": np.array(2.0),
    }
    found = shown_row(row, "none", tokenizer("base"))
    assert found.padding == 2
    assert found.columns == {"reward": 2.0}
    assert [(run.learnt, run.tokens) for run in found.documents[0]] == [(False, 1), (True, 1), (False, 1)]


def test_colours_stand_for_marks_where_there_are_any():
    row = ShownRow(((Run("ask ", False, 1), Run("say", True, 2)), (Run("more", False, 1),)), 3, {"reward": 0.5})
    assert "ask ⟦say⟧" in as_text(row, 1, marks=True).plain
    text = as_text(row, 1, marks=False)
    assert "ask say" in text.plain
    assert [str(span.style) for span in text.spans if text.plain[span.start : span.end] == "say"] == ["bold green"]
    assert "row 1: 4 tokens in 2 documents, 2 learnt, reward=0.5" in text.plain
    assert "3 tokens of padding" in text.plain


@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [1, 2, 300], [5, 4096], list(range(1, 1000))])
def test_every_length_is_in_one_bar(lengths):
    for count in (12, 40):
        edges = bins_of(np.array(lengths), count)
        assert edges[0] == 0
        assert edges[-1] > max(lengths)
        assert len(set(np.diff(edges))) == 1
        assert len(edges) <= count + 2
    summary = SourceSummary("x", "messages", np.array(lengths), 0.5, 1, None, Counts())
    text = as_histogram([summary], 64).plain
    bars = [int(line.split()[-1].replace(",", "")) for line in text.split("\n")[1:] if " to " in line]
    assert sum(bars) == len(lengths)
