"""`meshwright init` writes run files that run, asks what flags do not answer, and replaces nothing unasked."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import invoke_in_process as invoke
from support.commands import leave_launcher

from meshwright.base.errors import ConfigError
from meshwright_run.data.layouts import DataLayout
from meshwright_run.data.prepare import prepare_data
from meshwright_run.data.tokenizer import train_tokenizer
from meshwright_run.init_wizard import answers
from meshwright_run.init_wizard.answers import InitAnswers, Machine, inspect_model
from meshwright_run.init_wizard.run_file_text import CHAT_TEMPLATE, write_run_file
from meshwright_run.run_file import RunConfig, load_run
from meshwright_testing.models import build_tiny_model

ROOT = Path(__file__).parents[4]
CHAT = [{"role": "user", "content": "What is 2?"}, {"role": "assistant", "content": "Two, or so it is said."}]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer, and files of text and of conversations."""
    directory = tmp_path_factory.mktemp("init")
    texts = [" ".join(f"{(row + 3) * place % 17} is what it is" for place in range(60)) for row in range(12)]
    for row, text in enumerate(texts):
        (directory / f"{row}.txt").write_text(text, encoding="utf-8")
    (directory / "chats.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 60, encoding="utf-8")
    pairs = json.dumps({"prompt": "What is 2?", "completion": "Two."}) + "\n"
    (directory / "pairs.jsonl").write_text(pairs * 60, encoding="utf-8")
    tokenizer = train_tokenizer(texts, 257)
    tokenizer.save_pretrained(directory / "model")
    model = build_tiny_model()
    model.resize_token_embeddings(257)
    model.save_pretrained(directory / "model")
    model.save_pretrained(directory / "run" / "model")
    return directory


@pytest.fixture(autouse=True)
def _alone(monkeypatch, made) -> None:
    leave_launcher(monkeypatch)
    monkeypatch.chdir(made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(made / "cache"))


def written(file: Path, *flags: str) -> RunConfig:
    code, output = invoke("init", str(file), "--yes", *flags)
    assert code == 0, output
    return load_run(file)


STEPS, EPOCHS, MODEL = ("--steps", "7"), ("--epochs", "1.5"), ("--model", "model")


@pytest.mark.parametrize(
    ("model", "data", "adapter", "length", "strategy"),
    [
        ((), (), (), STEPS, "ddp"),
        ((), ("--data", "*.txt"), (), EPOCHS, "fsdp2"),
        (MODEL, (), ("--adapter",), STEPS, "fsdp2"),
        (MODEL, ("--data", "*.txt", "--data", "?.txt"), ("--full",), STEPS, "megatron_fsdp"),
        (MODEL, ("--data", "chats.jsonl"), ("--adapter",), EPOCHS, "ddp"),
        (MODEL, ("--data", "pairs.jsonl"), (), EPOCHS, "megatron_fsdp"),
        (("--model", "someone/else"), ("--format", "messages"), (), STEPS, "fsdp2"),
    ],
)
def test_a_run_file_of_each_combination_is_valid_and_as_asked(model, data, adapter, length, strategy, tmp_path):
    flags = (*model, *data, *adapter, *length, "--strategy", strategy, "--devices", "3")
    config = written(tmp_path / "some.yaml", *flags)
    assert (config.strategy, config.nproc) == (strategy, 3)
    assert (config.steps, config.epochs) == ((7, None) if length[0] == "--steps" else (None, 1.5))
    assert config.model.get("path") == (model[1] if model else None)
    assert ("peft" in config.model) == (adapter == ("--adapter",))
    (source,) = config.data.get_training_sources()
    assert source.files == (["*.txt", "?.txt"] if len(data) == 4 else [data[1]][0] if "--data" in data else "stdlib")
    kinds = {"chats.jsonl": "messages", "pairs.jsonl": "prompt_completion", "messages": "messages"}
    assert source.format == (kinds.get(data[1], "text") if data else "text")
    assert config.batch_size % (3 * (config.micro_batch_size or 0)) == 0
    # A template is written where the model's tokenizer is known to have none.
    assert bool(config.data.chat_template) == (source.format != "text" and model[1] == "model")
    assert config.output_dir == "runs/some"


@pytest.mark.parametrize(
    ("devices", "memory", "strategy"), [("1", 2**40, "single"), ("2", 2**40, "ddp"), ("2", 2**20, "fsdp2")]
)
def test_the_strategy_is_recommended_by_the_number_of_devices_and_what_fits_them(
    devices, memory, strategy, tmp_path, monkeypatch
):
    monkeypatch.setattr(answers, "detect_machine", lambda: Machine("cuda", 8, memory))
    assert written(tmp_path / "run.yaml", "--devices", devices).strategy == strategy
    assert written(tmp_path / "all.yaml").nproc == 8


def test_little_text_gets_short_sequences_which_its_held_out_part_fills(tmp_path, made):
    (tmp_path / "few").mkdir()
    for row in range(4):
        shutil.copy(made / f"{row}.txt", tmp_path / "few")
    few = written(tmp_path / "few.yaml", "--data", f"{tmp_path}/few/*.txt").data
    lengths = (few.seq_len, written(tmp_path / "more.yaml", "--data", "*.txt").data.seq_len)
    assert lengths == (32, 128)
    assert written(tmp_path / "stdlib.yaml").data.seq_len == 256
    prepared = prepare_data(few, tokenizer_dir=made / "model")
    assert len(prepared.eval_sets["held_out"][0].tokens) >= few.seq_len


def test_nothing_is_replaced_unless_asked(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("mine", encoding="utf-8")
    code, output = invoke("init", str(file), "--yes")
    assert code == 2
    assert "--overwrite" in output
    assert file.read_text(encoding="utf-8") == "mine"
    assert written(file, "--overwrite", "--steps", "3").steps == 3


def test_what_has_appeared_meanwhile_is_left_as_it_is(tmp_path):
    file = tmp_path / "run.yaml"
    asked = InitAnswers(None, ("stdlib",), DataLayout(), False, 1, "single", 3, None)
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_run_file(file, asked, inspect_model(None), Machine("cpu", 1, 2**30), overwrite=False)
    assert file.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (("--adapter",), ["--model DIRECTORY"]),
        (("--model", "nowhere"), ["neither an existing directory", "'new'"]),
        (("--model", "cache_of_nothing/"), ["neither an existing directory"]),
        (("--model", "model/0"), ["does not exist in the directory 'model'"]),
        (("--model", "run"), ["holds no config.json", "Did you mean 'run/model'?"]),
        (("--data", "nothing*.txt"), ["nothing*.txt"]),
        (("--data", "0.txt"), ["a single document", "Give several files"]),
        (("--data", "chats.jsonl"), ["needs an existing tokenizer", "--model"]),
        (("--model", "model", "--format", "mesages"), ["Did you mean 'messages'?"]),
        (("--strategy", "fsdp3"), ["Did you mean 'fsdp2'?"]),
        (("--strategy", "pipeline", "--devices", "2"), ["pipeline"]),
        (("--strategy", "single", "--devices", "2"), ["single"]),
        (("--steps", "3", "--epochs", "1"), ["--steps=3", "Leave one out"]),
    ],
)
def test_what_cannot_run_is_refused_and_not_written(flags, texts, tmp_path):
    code, output = invoke("init", str(tmp_path / "run.yaml"), *flags)
    assert code == 2, output
    assert all(text in output for text in texts), output
    assert not (tmp_path / "run.yaml").exists()


def test_the_template_that_is_written_reads_as_the_one_of_the_examples(made):
    tokenizer = train_tokenizer(["a b c"], 257)
    turns = [{"role": "system", "content": "Be kind."}, *CHAT, *CHAT]
    for ends in ({}, {"add_generation_prompt": True}):
        mine, theirs = (
            tokenizer.apply_chat_template(turns, chat_template=text, tokenize=False, **ends)
            for text in (CHAT_TEMPLATE, (ROOT / "examples" / "chat.jinja").read_text(encoding="utf-8"))
        )
        assert mine == theirs


@pytest.mark.slow
def test_an_adapter_of_a_model_trains_on_conversations_as_the_file_says(made):
    config = written(made / "adapter.yaml", "--model", "model", "--data", "chats.jsonl", "--adapter", "--devices", "1")
    assert config.strategy == "single"
    assert invoke("train", "adapter.yaml", "--set", "steps=2", "--set", "device=cpu")[0] == 0
    assert (made / "runs/adapter/model/adapter_config.json").is_file()
    assert len((made / "runs/adapter/metrics.jsonl").read_text(encoding="utf-8").splitlines()) >= 2


# -- at a terminal


def at_terminal(directory: Path, line: list[str], answers: list[tuple[str, str]]) -> str:
    """What a command shows at a terminal, where each answer is given once its question has come."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(directory)
        os.execve(sys.executable, [sys.executable, "-m", "meshwright", *line], {**os.environ, "COLUMNS": "200"})
    shown = ""
    try:
        for part in _read(terminal):
            shown += part
            if answers and answers[0][0] in shown.rpartition("\x00")[2]:
                os.write(terminal, f"{answers.pop(0)[1]}\n".encode())
                shown += "\x00"
    finally:
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 0, shown
    assert not answers, shown
    return shown


def _read(terminal: int) -> Iterator[str]:
    until = time.monotonic() + 120
    while time.monotonic() < until and select.select([terminal], [], [], 60)[0]:
        try:
            found = os.read(terminal, 4096)
        except OSError:
            return
        if not found:
            return
        yield found.decode(errors="replace")


def test_at_a_terminal_five_questions_are_asked_and_a_bad_answer_is_reported(made):
    replies = [
        ("1. Which model?", "nowhere"),
        ("1. Which model?", "model"),
        ("2. Which data?", "chats.jsonl"),
        ("In which format?", ""),
        ("3. Train an adapter", "y"),
        ("4. On how many ranks?", "2"),
        ("With which strategy?", "fsdp2"),
        ("5. How long?", "2 epochs"),
    ]
    shown = at_terminal(made, ["init", "asked.yaml"], replies)
    assert "neither an existing directory" in shown
    config = load_run(made / "asked.yaml")
    assert (config.strategy, config.nproc, config.epochs, config.steps) == ("fsdp2", 2, 2.0, None)
    assert config.model["path"] == "model"
    assert config.model["peft"]["type"] == "lora"
    assert config.data.get_training_sources()[0].format == "messages"
