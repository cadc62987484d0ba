"""The five answers that a run file is made of, checked as far as possible without torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from meshwright.plugin import (
    ConfigError,
    DataError,
    ModelError,
    Registry,
    nearest,
    open_regular,
    parse_json,
    read_json_object,
    usable_cores,
    validated,
)

from ..data.config import STDLIB, SourceConfig
from ..data.files import kind_of
from ..data.sources import find_source

Format = Literal["text", "messages", "prompt_completion"]
FORMATS: tuple[Format, ...] = get_args(Format)
NEW = "new"
"""Instead of a model's path: a small model with new weights."""
NEW_PARAMETERS, NEW_POSITIONS = 1_000_000, 256
STEPS = 300
POSITIONS, _POSITIONS_ON_CPU = 1024, 256
"""Longest sequence in tokens, if the model holds more."""
_BYTES = {"float32": 4, "float64": 8}
"""Of a weight in a file; 2 for other dtypes."""
_STATE_BYTES = 16
"""Of a parameter that AdamW trains in float32: itself, its gradient and two averages."""
_SHARE = 0.6
"""Largest share of a device's memory for training state, so that activations have room."""
RANKS_ON_CPU = 4
"""At most: each is a process with a copy of torch."""


@dataclass(frozen=True)
class Machine:
    """This machine: its accelerators, or on a CPU the ranks that its cores serve well, with their share of memory."""

    device: str
    count: int
    memory_bytes: int


@functools.cache
def find_machine() -> Machine:
    """Look at this machine. Imports torch."""
    import torch

    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
        return Machine(kind.type if kind is not None else "cpu", count, memory)
    ranks = min(RANKS_ON_CPU, usable_cores())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine("cpu", ranks, memory // ranks)


@dataclass(frozen=True)
class Answers:
    """What a first run is to be.

    Attributes:
        model: a Hugging Face directory or a hub id; None: a small model with new weights.
        data: globs of files; or `STDLIB`.
        format: of the files.
        is_adapter: train a LoRA adapter instead of the model.
        steps, epochs: one of them is None.
    """

    model: str | None
    data: tuple[str, ...]
    format: Format
    is_adapter: bool
    ranks: int
    strategy: str
    steps: int | None
    epochs: float | None

    @property
    def places(self) -> str | list[str]:
        """`data`, as a run file has it."""
        return self.data[0] if len(self.data) == 1 else list(self.data)


def check_model(model: str | None, *, is_adapter: bool) -> None:
    """Raise ModelError if there is no such model, or no adapter of it can be trained here."""
    if model is None:
        if is_adapter:
            raise ModelError(
                "--adapter trains an adapter of a model that there is, and none was named. Give --model DIRECTORY, or "
                "leave --adapter out."
            )
        return
    if is_adapter and find_spec("peft") is None:
        raise ModelError("adapters need the package peft, which is not installed. pip install 'meshwright[peft]'")
    directory = Path(model).expanduser()
    if not directory.exists() and not is_hub_id(model):
        raise ModelError(
            f"--model={model!r} is neither a directory here, nor of the form of a hub id (owner/name), nor the word "
            f"{NEW!r}. Give one of these."
        )
    if directory.exists() and not (directory / "config.json").is_file():
        raise ModelError(f"--model={model!r} holds no config.json, so it is no Hugging Face model directory.")


def is_hub_id(model: str) -> bool:
    """Return whether a text has the form owner/name."""
    owner, slash, name = model.partition("/")
    return bool(slash and owner and name) and "/" not in name and owner[0] not in "./~"


def format_named(name: str) -> Format:
    """Return the format of that name; raise ConfigError if there is none."""
    for format in FORMATS:
        if format == name:
            return format
    raise ConfigError(f"--format={name!r} is not one of {', '.join(FORMATS)}.{nearest(name, FORMATS)}")


def check_data(places: Sequence[str], format: Format, model: str | None) -> None:
    """Check the files.

    Raises:
        ConfigError: a new model has no tokenizer for the format.
        DataError: a glob matches nothing, files are of an unknown kind, or there is only one document.
    """
    if model is None and format != "text":
        raise ConfigError(
            f"--format={format} needs a tokenizer that there is, and a new model has none: one is trained on text "
            f"alone. Give --model, the directory of a model with its tokenizer, or --format text."
        )
    found = find_source(validated(SourceConfig, {"files": list(places), "format": format}, where="--data"))
    paths = [file.path for file in found.files]
    if len(paths) == 1 and kind_of(paths[0]) == ".txt":
        raise DataError(
            f"{paths[0]} is one document, of which none could be held out to evaluate on. Give several files, or a "
            f".jsonl file with a document in each line."
        )


def format_of(places: Sequence[str]) -> Format:
    """Guess the format of files from the fields of the first object of a .jsonl file; "text" if nothing is known."""
    if STDLIB in places:
        return "text"
    found = find_source(validated(SourceConfig, {"files": list(places)}, where="--data"))
    if not found.files or found.files[0].path.suffix.lower() != ".jsonl":
        return "text"
    fields = _first_fields(found.files[0].path)
    if "messages" in fields:
        return "messages"
    return "prompt_completion" if {"prompt", "completion"} <= fields else "text"


def _first_fields(path: Path) -> set[str]:
    with open_regular(path) as file:
        line = file.readline(1 << 20).decode("utf-8-sig", "replace")
    try:
        value = parse_json(line)
    except ValueError:
        return set()
    return set(value) if isinstance(value, dict) else set()


@dataclass(frozen=True)
class Known:
    """What the files of a model tell; None: unknown.

    Attributes:
        positions: longest sequence in tokens.
        parameters: their number.
        has_template: whether its tokenizer has a chat template.
    """

    positions: int | None = None
    parameters: int | None = None
    has_template: bool | None = None


def known_of(model: str | None) -> Known:
    """Look at a model without reading its weights; raise ModelError if its config.json cannot be read."""
    if model is None:
        return Known(positions=NEW_POSITIONS, parameters=NEW_PARAMETERS)
    directory = Path(model).expanduser()
    if not directory.is_dir():
        return Known()
    try:
        config = read_json_object(directory / "config.json")
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory / 'config.json'} is no model configuration: {error}.") from None
    inner = config.get("text_config")
    positions = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32")))
    return Known(
        positions=positions if isinstance(positions, int) else None,
        parameters=size // _BYTES.get(dtype, 2) or None,
        has_template=_has_template(directory),
    )


def _has_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file() or (directory / "chat_template.json").is_file():
        return True
    try:
        options: dict[str, Any] = read_json_object(directory / "tokenizer_config.json")
    except (OSError, ValueError):
        # Whether it is a tokenizer at all is checked when it is loaded.
        return False
    return bool(options.get("chat_template"))


def seq_len_of(known: Known, device: str) -> int:
    """Return the length of a sequence in tokens."""
    most = _POSITIONS_ON_CPU if device == "cpu" else POSITIONS
    return min(most, known.positions or most)


def recommended(known: Known, machine: Machine, ranks: int, registry: Registry, *, is_adapter: bool) -> str:
    """Return the strategy for so many ranks; see "Which strategy" in README.md.

    One device: `single`. Several: `ddp` if a device holds the whole training state, else `fsdp2`; if that is not
    installed, the other.
    """
    if ranks == 1:
        return "single"
    size = (known.parameters or 0) * (4 if is_adapter else _STATE_BYTES)
    fits = known.parameters is not None and size <= _SHARE * machine.memory_bytes
    wanted = ("ddp", "fsdp2") if fits else ("fsdp2", "megatron_fsdp", "ddp")
    found = [name for name in wanted if name in registry.strategies]
    if not found:
        raise ConfigError(
            f"{ranks} ranks need a strategy that shares the data, and none is installed. "
            f"{registry.installable.get('fsdp2', '')} Or give --devices 1."
        )
    return found[0]
