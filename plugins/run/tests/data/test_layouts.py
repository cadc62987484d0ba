"""Layouts of data that newcomers bring: `init` detects them, `data show` shows them, and a run trains on them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from support.chat_templates import build_record
from support.commands import invoke_in_process as invoke
from support.commands import leave_launcher

from meshwright.base.errors import ConfigError, DataError
from meshwright_run.data import DataConfig, SourceConfig, prepare_data, read_records
from meshwright_run.data.encoder import Encoder
from meshwright_run.data.layouts import DataLayout, detect_layout
from meshwright_run.data.parallel_tokenization import build_tokenization
from meshwright_run.data.record_errors import RecordErrors
from meshwright_run.data.tokenizer import train_tokenizer
from meshwright_run.run_file import load_run
from meshwright_testing.models import build_tiny_model

NUM_EXAMPLES = 40
QUESTION, ANSWER = "What is {}?", "It is {}."
LAYOUTS = {
    "openai": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
            {"role": "assistant", "content": ANSWER},
        ]
    },
    "renamed_messages": {
        "conversations": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    },
    "sharegpt": {
        "system": "Be brief.",
        "conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}],
    },
    "alpaca": {"instruction": QUESTION, "input": "a number", "output": ANSWER},
    "dolly": {"instruction": QUESTION, "context": None, "response": ANSWER, "category": "none"},
    "trl": {"prompt": f"{QUESTION} ", "completion": ANSWER},
    "question_answer": {"question": QUESTION, "answer": ANSWER},
    "preference": {"prompt": f"{QUESTION} ", "chosen": ANSWER, "rejected": "No {}."},
    "preference_messages": {
        "chosen": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}],
        "rejected": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "No {}."}],
    },
    "text": {"body": f"{QUESTION} {ANSWER} " * 8},
    "tokens": {"input_ids": [5, 6, 7, 8] * 8, "labels": [-100, 6, -100, 8] * 8},
}
FORMATS = {
    "openai": ("messages", {}),
    "renamed_messages": ("messages", {"messages": "conversations"}),
    "sharegpt": ("sharegpt", {}),
    "alpaca": ("alpaca", {}),
    "dolly": ("alpaca", {"input": "context", "output": "response"}),
    "trl": ("prompt_completion", {}),
    "question_answer": ("prompt_completion", {"prompt": "question", "completion": "answer"}),
    "preference": ("preference", {}),
    "preference_messages": ("preference", {}),
    "text": ("text", {"text": "body"}),
    "tokens": ("tokens", {}),
}


def fill(value, number):
    return json.loads(json.dumps(value).replace("{}", str(number)))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer, and a file of each layout."""
    directory = tmp_path_factory.mktemp("layouts")
    for name, record in LAYOUTS.items():
        lines = [json.dumps(fill(record, number)) for number in range(NUM_EXAMPLES)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    # Short tokens for the words of the templates, so that examples fit into the model's few positions.
    words = ["Below is an instruction that describes a task, paired with an input that provides further context. "]
    words += ["Write a response that appropriately completes the request.\n\n"]
    words += ["### Instruction:\n### Input:\n### Response:\n"]
    tokenizer = train_tokenizer([*words * 4, "What is 2? It is 2. No 3. Question: Answer:"], 600)
    tokenizer.save_pretrained(directory / "model")
    model = build_tiny_model()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.config.max_position_embeddings = 128
    model.save_pretrained(directory / "model")
    return directory


@pytest.fixture(autouse=True)
def _alone(monkeypatch, made) -> None:
    leave_launcher(monkeypatch)
    monkeypatch.chdir(made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(made / "cache"))


def init(name: str) -> str:
    line = ("init", f"{name}.yaml", "--yes", "--overwrite", "--model", "model", "--devices", "1")
    code, output = invoke(*line, "--data", f"{name}.jsonl")
    assert code == 0, output
    return output


@pytest.mark.parametrize("name", LAYOUTS)
def test_init_writes_the_format_and_shows_the_first_example_with_the_supervised_part_marked(name):
    output = init(name)
    config = load_run(f"{name}.yaml")
    (source,) = config.data.get_training_sources()
    assert (source.format, source.fields) == FORMATS[name]
    assert (config.steps, config.epochs) == (None, 3.0)
    assert "cannot be used" not in output, output
    marked = "".join(re.findall(r"⟦(.*?)⟧", output, re.DOTALL))
    if name != "tokens":
        assert "It is 0." in marked
    if name not in ("text", "tokens"):
        assert "What is 0?" in output
        assert "What is" not in marked
    assert ("objective" in Path(f"{name}.yaml").read_text(encoding="utf-8")) == name.startswith("preference")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_trains_on_what_init_wrote_and_data_show_shows_it(name):
    init(name)
    code, output = invoke("data", "show", f"{name}.yaml")
    assert code == 0, output
    assert "⟦" in output
    epochs = 11 if name == "openai" else 1
    options = [f"epochs={epochs}", "batch_size=4", "device=cpu", "sample=null"]
    code, output = invoke("train", f"{name}.yaml", *(part for each in options for part in ("--set", each)))
    assert code == 0, output
    assert f"epoch {epochs}." in output
    assert ("warning: epochs=11 trains 11 epochs: the model sees each of" in output) == (epochs == 11)
    lines = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines
    assert all(line["num_tokens"] <= line["num_input_tokens"] or name.startswith("preference") for line in lines)


def write(directory: Path, name: str, *records) -> str:
    (directory / name).write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return str(directory / name)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"foo": "a", "bar": "b"}], r"1: the columns are foo, bar, which is no known layout\. Known are: messages"),
        ([{"messages": [{"speaker": "a", "says": "b"}]}], r"the columns are messages"),
        ([LAYOUTS["openai"], LAYOUTS["alpaca"]], r"1 has the format messages, but .*2 has the format alpaca"),
        ([LAYOUTS["openai"], LAYOUTS["renamed_messages"]], "the examples differ"),
        ([], "is empty"),
    ],
)
def test_an_unknown_layout_is_an_error_that_names_the_columns(records, message, tmp_path):
    with pytest.raises(DataError, match=message):
        detect_layout([write(tmp_path, "a.jsonl", *records)])


def test_every_file_is_looked_at_and_null_values_are_passed_over(tmp_path):
    write(tmp_path, "a.jsonl", {"messages": None}, LAYOUTS["openai"])
    assert detect_layout([str(tmp_path / "a.jsonl")]) == DataLayout("messages")
    (tmp_path / "b.json").write_text(json.dumps([LAYOUTS["sharegpt"]]), encoding="utf-8")
    assert detect_layout([str(tmp_path / "b.json")]) == DataLayout("sharegpt")
    (tmp_path / "c.csv").write_text("instruction,input,output\na,,b\n", encoding="utf-8")
    assert detect_layout([str(tmp_path / "c.csv")]).format == "alpaca"
    with pytest.raises(DataError, match="the examples differ"):
        detect_layout([str(tmp_path / "[ab].json*")])


# -- templates of prompts


def encode(record: dict, config: dict, tokenizer=None) -> str:
    """The text of an example, with the supervised part in brackets."""
    made_tokenizer = tokenizer or train_tokenizer(["a b c"], 257)
    data = DataConfig(sources=[{"files": "unused", **config.pop("source")}], **config)  # type: ignore[list-item]
    (source,) = data.get_training_sources()
    options = {**build_tokenization(source, data, 0.0).options, "seq_len": None}
    [[example]], _ = Encoder(made_tokenizer, source.base_format, **options).encode([build_record(record)])
    mask = np.ones(len(example), bool) if example.loss_mask is None else example.loss_mask
    (supervised,) = np.nonzero(mask)
    first = int(supervised[0])
    return f"{made_tokenizer.decode(example.tokens[:first])}[{made_tokenizer.decode(example.tokens[first:])}]"


ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
HEAD = "Below is an instruction that describes a task"
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}assistant: {% endif %}"
RENAMED = {"instruction": "q", "output": "a"}


@pytest.mark.parametrize(
    ("record", "config", "text"),
    [
        (
            ALPACA,
            {"source": {"format": "alpaca"}},
            f"{HEAD}, paired with an input that provides further context. Write a response that appropriately "
            "completes the request.\n\n"
            "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n[3<|endoftext|>]",
        ),
        (
            {**ALPACA, "input": ""},
            {"source": {"format": "alpaca"}},
            f"{HEAD}. Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n"
            "### Response:\n[3<|endoftext|>]",
        ),
        (
            {"q": "Add.", "input": None, "a": "3"},
            {"source": {"format": "alpaca", "fields": RENAMED}, "template": "{prompt} ->"},
            "Add. ->[3<|endoftext|>]",
        ),
        (
            ALPACA,
            {"source": {"format": "alpaca"}, "template": "chat", "chat_template": CHAT},
            "user: Add.\n\n1 and 2\nassistant: [3\n<|endoftext|>]",
        ),
        (ALPACA, {"source": {"format": "alpaca"}, "template": "none"}, "Add.\n\n1 and 2[3<|endoftext|>]"),
        (
            {"question": "Why?", "facts": "It is.", "completion": "So."},
            {"source": {"format": "prompt_completion"}, "template": "{{{facts}}} {question} "},
            "{It is.} Why? [So.<|endoftext|>]",
        ),
        (
            {"prompt": "Why?", "completion": "So.", "input": "not used"},
            {"source": {"format": "prompt_completion"}},
            "Why?[So.<|endoftext|>]",
        ),
    ],
)
def test_a_prompt_is_written_with_its_template_and_only_the_answer_is_supervised(record, config, text):
    assert encode(record, dict(config)) == text


@pytest.mark.parametrize(
    ("template", "format", "message"),
    [
        ("alpacca", "alpaca", "has no placeholder. Did you mean 'alpaca'?"),
        ("{prompt.__class__!r}", "alpaca", "is not a plain field name"),
        ("{prompt:>10}", "alpaca", "is not a plain field name"),
        ("{}", "alpaca", "is not a plain field name"),
        ("{prompt", "prompt_completion", "is not valid"),
        ("chat", "sharegpt", "has no effect"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, format, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        DataConfig(sources=[SourceConfig(files="a.jsonl", format=format)], template=template)


def test_a_placeholder_never_looks_up_an_attribute():
    with pytest.raises(DataError, match=r"no field 'prompt\.__class__'"):
        encode(ALPACA, {"source": {"format": "alpaca"}, "template": "{prompt.__class__}"})


# -- examples that cannot be used


def prepare(path: str, model: Path, **source) -> None:
    values = {"files": path, **source}
    data = DataConfig(sources=[SourceConfig(**values)], seq_len=64, cache_dir=str(model.parent))
    prepare_data(data, tokenizer_dir=model)


def test_all_examples_that_cannot_be_used_are_counted_and_five_are_listed(made, tmp_path):
    good, bad = {"prompt": "a ", "completion": "b"}, {"prompt": "a ", "completion": None}
    path = write(tmp_path, "a.jsonl", *[good, bad] * 10)
    with open(path, "a", encoding="utf-8") as file:
        file.write("{not json\n")
    with pytest.raises(DataError) as caught:
        prepare(path, made / "model", format="prompt_completion")
    text = str(caught.value)
    assert f"11 of 21 examples of '{path}' cannot be used. The first 5:\n" in text
    assert re.findall(r"a\.jsonl:(\d+):", text) == ["2", "4", "6", "8", "10"]
    path = write(tmp_path, "b.jsonl", good, bad, good)
    with pytest.raises(DataError, match=r"b\.jsonl:2: field 'completion' .*\. The other 2 examples are valid\."):
        prepare(path, made / "model", format="prompt_completion")
    path = write(tmp_path, "c.jsonl", {"text": "a"}, {"body": "b"}, {"text": 3})
    with pytest.raises(DataError, match=r"2 of 3 examples .*\n.*c\.jsonl:2: no field 'text'.*\n.*c\.jsonl:3"):
        prepare_data(DataConfig(sources=[SourceConfig(files=path)], cache_dir=str(tmp_path)))
    with pytest.raises(DataError, match=r"c\.jsonl:2"):
        list(map(_require_text, read_records(SourceConfig(files=path))))


def _require_text(record) -> str:
    if "text" not in record.fields:
        raise DataError(record.location)
    return record.fields["text"]


def test_counting_stops_after_many_errors_or_some_time(monkeypatch):
    errors = RecordErrors("a")
    with pytest.raises(DataError, match="1,000 of the first 5,000 examples"):
        errors.add([DataError("no")] * 1000, num_records=5000)
    late = RecordErrors("a")
    late.add([DataError("b.jsonl:1: no")], num_records=10)
    monkeypatch.setattr("meshwright_run.data.record_errors.time.monotonic", lambda: 1e12)
    with pytest.raises(DataError, match=r"b\.jsonl:1: no$"):
        late.add([], num_records=20)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "é"}\n'.encode("utf-16"), "iconv -f utf-16 -t utf-8 a.jsonl > utf8-a.jsonl"),
        ("a.jsonl", '{"text": "é"}\n'.encode("utf-16-le"), "iconv -f utf-16le"),
        ("a.csv", "text\né\n".encode("utf-16"), "iconv -f utf-16 "),
        ("a.txt", "é".encode("utf-32"), "iconv -f utf-32"),
        ("a.json", '[{"text": "é"}]'.encode("utf-16-be"), "iconv -f utf-16be"),
        ("a.jsonl", b"PAR1\x15\x04", r"a Parquet file: give it the suffix \.parquet"),
        ("a.jsonl", b"\x1f\x8b\x08\x00", r"add the suffix \.gz"),
        ("a.csv", b"PK\x03\x04\x14\x00", r"a zip archive, such as an \.xlsx file"),
        ("a.csv", b"text\tanswer\na\tb\n", r"has no comma but '\\t'"),
        ("a.jsonl", b'[\n{"text": "a"}\n]\n', r"one array is a \.json file"),
        ("a.jsonl", b'[{"text": "a"}]\n', r"name it \.json"),
        ("a.jsonl", b"prompt,completion\na,b\n", "not valid JSON"),
        ("a.jsonl", b"", "is empty: it holds no example"),
    ],
)
def test_a_file_of_another_format_is_recognized(name, content, message, made, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(str(tmp_path / name), made / "model")


# -- advice


def test_dpo_on_chats_names_the_columns_that_it_needs():
    init("openai")
    code, output = invoke("train", "openai.yaml", "--set", "objective.name=dpo", "--set", "device=cpu")
    assert code == 2
    assert "the fields prompt, chosen and rejected" in " ".join(output.split())


def test_a_model_without_a_tokenizer_says_how_to_name_one(made):
    with pytest.raises(ConfigError, match=r"set data\.tokenizer to the directory of one \(with tokenizer\.json\)"):
        prepare_data(DataConfig(sources=[SourceConfig(files=str(made / "openai.jsonl"), format="messages")]))
