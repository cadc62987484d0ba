"""Files beside the weights of a pretrained model: licence, chat template, processors, tokenizer, code.

`open_pretrained` reads them once, a checkpoint holds them, and an export writes them again. Training replaces some: the
configuration, the generation configuration and, where a run gives one, the tokenizer. Files that describe the weights
are not copied: a model card, results of evaluations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from ..base.errors import ModelError
from ..files.parsing import read_json_object, read_regular, reason

GENERATION_CONFIG = "generation_config.json"
MAX_FILE_BYTES = 1 << 28

_COPIED = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.vocab", "*.bpe", "*.py"),
    *("license*", "licence*", "copying*", "copyright*", "notice*", "use_policy*", "additional_chat_templates/*.jinja"),
)
_LEFT_OUT = (
    *("config.json", GENERATION_CONFIG, "adapter_config.json", "meshwright_base.json", "*.index.json"),
    *("*_results.json", "trainer_state.json", "requirements*.txt"),
)
_VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "*.vocab",
    "*.bpe",
)
_FURTHER = (*_VOCABULARIES, "merges.txt")
_OF_TOKENIZER = (
    *(*_FURTHER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "additional_chat_templates/*"),
)


def note_files(model: nn.Module, directory: Path) -> tuple[str, ...]:
    """Read the files beside the weights of a directory, and keep them with the model that is made of it.

    Returns:
        Remarks for the user: which files are left out, and why.

    Raises:
        ModelError: the generation configuration cannot be read.
    """
    _read_generation_config(model, directory)
    remarks: list[str] = []
    model.meshwright_files = dict(_read(directory, remarks))
    return tuple(remarks)


def kept_files(model: nn.Module) -> dict[str, bytes]:
    """The files that `note_files` has read, by their names; none of a model that was made of no directory."""
    found: dict[str, bytes] = getattr(model, "meshwright_files", {})
    return found


def without_replaced(files: Mapping[str, bytes], new: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a base that remain true beside new ones.

    A new tokenizer takes the place of the base's, of which only further files of the same vocabulary remain, such as
    that of sentencepiece.
    """
    kept = {name: content for name, content in files.items() if name not in new}
    if not any(_matches(name, _VOCABULARIES) for name in new):
        return kept
    further = _FURTHER if _same_vocabulary(files, new) else ()
    return {name: each for name, each in kept.items() if _matches(name, further) or not _matches(name, _OF_TOKENIZER)}


def _files_beside_weights(directory: Path) -> list[tuple[Path, str]]:
    """List the files of a model's directory and their names in it, those of further chat templates included."""
    paths = sorted([*directory.iterdir(), *directory.glob("additional_chat_templates/*")])
    return [(path, path.relative_to(directory).as_posix()) for path in paths if path.is_file()]


def tokenizer_files(directory: Path) -> list[tuple[Path, str]]:
    """List those files that tokenizers of transformers write, or have written in earlier versions."""
    return [(path, name) for path, name in _files_beside_weights(directory) if _matches(name, _OF_TOKENIZER)]


def generation_json(config: Any) -> bytes:
    """The file of a generation configuration. `save_pretrained` refuses some that it has itself read, and warned of."""
    return (config.to_json_string() + "\n").encode()


def _read(directory: Path, remarks: list[str]) -> Iterator[tuple[str, bytes]]:
    # Where the configuration is a link, the others may be, to the same directory: the hub's cache, mounted volumes.
    allowed = {directory.resolve(), (directory / "config.json").resolve().parent}
    for path, name in _files_beside_weights(directory):
        if not _matches(name, _COPIED) or _matches(name, _LEFT_OUT):
            continue
        if not any(path.resolve().is_relative_to(each) for each in allowed):
            remarks.append(f"{path} is a link to another directory, and is left out of checkpoints and exports.")
            continue
        try:
            yield name, read_regular(path, max_bytes=MAX_FILE_BYTES)
        except OSError as error:
            remarks.append(f"{path} is left out of checkpoints and exports, since it cannot be read: {error.strerror}")


def _read_generation_config(model: nn.Module, directory: Path) -> None:
    from transformers import GenerationConfig

    path = directory / GENERATION_CONFIG
    if path.is_file() and hasattr(model, "generation_config"):
        try:
            read_json_object(path)
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
        except Exception as error:
            # transformers raises whatever its values meet.
            raise ModelError(
                f"{path} is no generation configuration: {reason(error)}. Mend it, or remove it: it is not needed."
            ) from error


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name is of a pattern, without regard to case; `*` stands for no folder."""
    folded = name.casefold()
    return any(fnmatchcase(folded, pattern) and folded.count("/") == pattern.count("/") for pattern in patterns)


def _same_vocabulary(files: Mapping[str, bytes], new: Mapping[str, bytes]) -> bool:
    """Whether the first file of a vocabulary that both have gives the same tokens."""
    for name in sorted(files.keys() & new.keys(), key=lambda each: (each != "tokenizer.json", each)):
        if _matches(name, _VOCABULARIES):
            return _tokens(files[name]) == _tokens(new[name])
    return False


def _tokens(content: bytes) -> object:
    try:
        return json.loads(content)["model"]["vocab"]
    except (ValueError, KeyError, TypeError):
        return content
