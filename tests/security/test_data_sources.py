"""Datasets and tokenizers of others: only their own files are opened, and only tokenizers are made."""

from __future__ import annotations

import importlib
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PreTrainedTokenizerBase

from meshwright.base.errors import DataError
from meshwright_run.data.config import SourceConfig
from meshwright_run.data.sources import open_dataset
from meshwright_run.data.tokenizer import load_tokenizer, train_tokenizer

# -- datasets


def _dataset(directory: Path, **config: Any) -> SourceConfig:
    directory.mkdir()
    (directory / "own.txt").write_text("own\n")
    configs = {"configs": [{"config_name": "default", **config}]}
    (directory / "README.md").write_text(f"---\n{json.dumps(configs)}\n---\n")
    return SourceConfig(dataset=str(directory))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    "files",
    [
        "reference://*.txt::file://OUTSIDE/references.json",
        "http://127.0.0.1:PORT/x.csv",
        "file://OUTSIDE/secret.txt",
        "zip://*.txt::OUTSIDE/archive.zip",
        "OUTSIDE/secret.txt",
        "../outside/secret.txt",
        ["own.txt", "../outside/*.txt"],
        [{"split": "train", "path": "own.txt"}, {"split": "test", "path": "OUTSIDE/secret.txt"}],
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_readme_of_a_dataset_names_no_files_of_others(files: Any, streaming: bool, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret\n")
    with pytest.raises(DataError, match="which is outside the dataset"):
        open_dataset(_dataset(tmp_path / "other", data_dir="../outside"), streaming=streaming)
    with socket.create_server(("127.0.0.1", 0)) as server:
        text = json.dumps(files).replace("OUTSIDE", str(outside)).replace("PORT", str(server.getsockname()[1]))
        with pytest.raises(DataError, match="which is outside the dataset"):
            open_dataset(_dataset(tmp_path / "dataset", data_files=json.loads(text)), streaming=streaming)
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_readme_names_files_of_its_own(tmp_path: Path) -> None:
    for number, files in enumerate(("own.txt", [{"split": "train", "path": "o*"}])):
        assert open_dataset(_dataset(tmp_path / str(number), data_files=files))[:] == {"text": ["own"]}


def test_a_reader_of_the_library_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.csv").write_text("a\n1\n")
    monkeypatch.chdir(tmp_path)
    for name in ("pandas", "text", "csv", "webdataset"):
        with pytest.raises(DataError, match="is a built-in reader of the library `datasets`"):
            open_dataset(SourceConfig(dataset=name))


# -- tokenizers


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "whole"
    train_tokenizer(["some words"], 300).save_pretrained(path)
    return path


def _change(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**content, **values}))


OTHERS = [
    *("AutoModelForMaskedLM", "AutoProcessor", "AutoTokenizer", "AutoModel", "GPT2LMHeadModel", "GPT2LMHeadModelFast"),
    *("GPT2LMHeadModelFastFast", "RagRetriever", "RagTokenizer", "GenerationConfig", "TrainingArguments", "pipeline"),
    *("PreTrainedModel", "CLIPProcessor", "LlamaConfig", "AutoFeatureExtractor", "Trainer", "GPT2", "models"),
]


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("named", OTHERS)
def test_a_tokenizer_is_of_a_tokenizers_class(
    named: str, where: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, mark = tmp_path / "tokenizer", tmp_path / "mark"
    shutil.copytree(tokenizer, place)
    (place / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Evil: pass\n")
    code = {"auto_map": dict.fromkeys((named, "AutoConfig", "AutoTokenizer"), "evil.Evil")}
    _change(place / "tokenizer_config.json", **({"tokenizer_class": None} if where == "config.json" else {}), **code)
    _change(place / "config.json", model_type="gpt2", n_layer=1, n_head=2, n_embd=16, vocab_size=300, **code)
    _change(place / where, tokenizer_class=named)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    found, reported = None, ""
    try:
        found = load_tokenizer(place)
    except DataError as error:
        reported = str(error)
    assert found is None or isinstance(found, PreTrainedTokenizerBase)
    assert not mark.exists()
    if isinstance(getattr(transformers, named, None), type):
        # Before it is made.
        assert "is not a tokenizer class" in reported


def test_a_tokenizer_of_a_known_class_is_loaded_without_a_question_and_wrong_numbers_are_refused(
    tokenizer: Path, tmp_path: Path
) -> None:
    place = tmp_path / "tokenizer"
    shutil.copytree(tokenizer, place)
    _change(place / "config.json", model_type="gpt2", vocab_size=300)
    for name in ("GPT2Tokenizer", "GPT2TokenizerFast", "NotKnown", "PreTrainedTokenizerFast"):
        _change(place / "tokenizer_config.json", tokenizer_class=name)
        assert load_tokenizer(place).eos_token_id == 0, name
    assert importlib.import_module("transformers.dynamic_module_utils").TIME_OUT_REMOTE_CODE == 0
    for value in ("x", [1], {}):
        _change(place / "tokenizer_config.json", model_max_length=value)
        with pytest.raises(DataError, match=r"has model_max_length=.*, which is not a number"):
            load_tokenizer(place)
    _change(place / "tokenizer_config.json", model_max_length=None)
    load_tokenizer(place)
    content = json.loads((place / "tokenizer.json").read_text())
    content["model"]["vocab"]["a"] = 5_000_000
    (place / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"tokens, but ids up to 5,000,000"):
        load_tokenizer(place)
