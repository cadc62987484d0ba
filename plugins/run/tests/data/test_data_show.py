"""`meshwright data show` tells of the data of a run what a model is given of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml
from support.chat_templates import build_conversation, build_tokenizer
from typer.testing import CliRunner

from meshwright.cli.main import app
from meshwright_run.data.documents import TokenizedDocuments
from meshwright_run.data.order import StreamingSource
from meshwright_run.data.packing import build_row_dataset
from meshwright_run.data.report import (
    decode_first_rows,
    measure_fill,
)
from meshwright_run.data.train_sampler import DataShard, TrainSampler

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
    build_tokenizer("llama3", "llama3").save_pretrained(directory / "tokenizer")
    talks = [build_conversation("Hi there", "Hello! " * (1 + n % 3)) for n in range(30)] + [
        build_conversation("It is four. " * 40, "Hello!")
    ]
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
            "too_long": "truncate",
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
    table = output[output.index("trailing turns") :]
    # 31 records; one has lost its answer, which stood behind a long question.
    assert table.split("\n")[1].split()[1:4] == ["messages", "31", "30"]
    assert table.split("\n")[1].split()[-5:] == ["1", "0", "0", "1", "0"]
    assert "seq_len 64" in output
    assert (workplace / "new" / "lengths.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_what_was_shown_of_a_source_that_is_read_while_training_is_measured_too(workplace, monkeypatch):
    # In blocks of few records, so that the first is left behind.
    monkeypatch.setattr(StreamingSource.__init__, "__kwdefaults__", {"group_size": 1, "records_per_block": 4})
    source = {"files": str(workplace / "chats.jsonl"), "format": "messages", "weight": 1}
    sources = json.dumps([source, {**source, "streaming": True}])
    output = shown(workplace, "--rows", "40", "--set", "data.packing=none", "--set", f"data.sources={sources}")
    assert output.count("── row ") == 40
    assert "is streamed: its documents are not counted before training" in output


def documents(*lengths, supervised=2):
    """Of which the last tokens are supervised; each ends with the eos token."""
    eos = build_tokenizer("base").eos_token_id
    tokens = [np.array([*range(5, 4 + length), eos]) for length in lengths]
    labelled = [np.arange(length) >= length - supervised for length in lengths]
    return TokenizedDocuments(np.concatenate(tokens).astype(np.uint16), np.cumsum(lengths), np.concatenate(labelled))


@pytest.mark.parametrize("kind", ["documents", "stream", "none"])
def test_documents_and_padding_are_reported_apart(kind):
    rows = build_row_dataset(documents(5, 3, 4), kind, 8)
    feed = TrainSampler([rows], DataShard(0, 1, 1), batch_size=1, seed=0)
    found = list(decode_first_rows(feed, len(rows), kind, build_tokenizer("base")))
    sizes = sorted(sum(run.num_tokens for run in each) for row in found for each in row.documents)
    padding = sum(row.num_padding for row in found)
    # The stream has no row for the last one.
    assert sizes == ([3, 5] if kind == "stream" else [3, 4, 5])
    assert kind == "none" or padding == {"documents": 4, "stream": 0}[kind]
    supervised = sum(run.num_tokens for row in found for each in row.documents for run in each if run.is_supervised)
    assert supervised == {"documents": 6, "stream": 4, "none": 6}[kind]
    assert measure_fill(feed, len(rows)) == sum(sizes) / (sum(sizes) + padding)
