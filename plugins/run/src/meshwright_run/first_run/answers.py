"""The five answers that a run file is made of: from questions or flags, checked as far as possible without torch."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from rich.console import Console
from rich.prompt import Confirm, IntPrompt, Prompt

from meshwright.plugin import (
    ConfigError,
    DataError,
    MeshwrightError,
    ModelError,
    Registry,
    json_object_or_empty,
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
    """What a first run is to be; model None: a small one with new weights; data: globs, or `STDLIB`."""

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
    if name in FORMATS:
        return name
    raise ConfigError(f"--format={name!r} is not one of {', '.join(FORMATS)}.{nearest(name, FORMATS)}")


def check_data(places: Sequence[str], format: Format, model: str | None) -> None:
    """Check the files; raise ConfigError for a new model without a tokenizer for the format, DataError for files."""
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
    """What the files of a model tell; None: unknown. `positions`: longest sequence in tokens."""

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
    # Whether it is a tokenizer at all is checked when it is loaded.
    is_file = any((directory / f"chat_template.{suffix}").is_file() for suffix in ("jinja", "json"))
    return is_file or bool(json_object_or_empty(directory / "tokenizer_config.json").get("chat_template"))


def seq_len_of(known: Known, device: str) -> int:
    """Return the length of a sequence in tokens."""
    most = _POSITIONS_ON_CPU if device == "cpu" else POSITIONS
    return min(most, known.positions or most)


def recommended(known: Known, machine: Machine, ranks: int, registry: Registry, *, is_adapter: bool) -> str:
    """Return `single` for one rank, `ddp` if a device holds the whole training state, else `fsdp2`."""
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


# -- questions

T = TypeVar("T")

_LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>steps?|epochs?)?")


@dataclass(frozen=True)
class Wishes:
    """Answers that flags have given; None: not given. The model may also be `NEW`."""

    model: str | None = None
    data: tuple[str, ...] | None = None
    format: str | None = None
    is_adapter: bool | None = None
    ranks: int | None = None
    strategy: str | None = None
    steps: int | None = None
    epochs: float | None = None


def answered(wishes: Wishes, find_machine: Callable[[], Machine], registry: Registry, ask: Console | None) -> Answers:
    """Return the answers: from flags, else from questions on the console `ask`, if given, else defaults."""
    if wishes.steps is not None and wishes.epochs is not None:
        raise ConfigError(f"--steps={wishes.steps} and --epochs={wishes.epochs:g} are two lengths. Leave one out.")
    if ask is not None:
        wishes = _asked_before(wishes, ask)
    model, is_adapter, data = _path(wishes.model), bool(wishes.is_adapter), wishes.data or (STDLIB,)
    check_model(model, is_adapter=is_adapter)
    format = _format(wishes, data)
    check_data(data, format, model)
    ranks, strategy = _layout(wishes, find_machine(), known_of(model), registry, ask)
    steps, epochs = wishes.steps, wishes.epochs
    if steps is None and epochs is None:
        told = "5. How long? [dim]such as 300 steps, or 2 epochs[/]"
        steps, epochs = (STEPS, None) if ask is None else length_of(_until(ask, told, f"{STEPS} steps", length_of))
    return Answers(model, data, format, is_adapter, ranks, strategy, steps, epochs)


def _path(model: str | None) -> str | None:
    return None if model == NEW else model


def _format(wishes: Wishes, data: Sequence[str]) -> Format:
    return format_of(data) if wishes.format is None else format_named(wishes.format)


def _asked_before(wishes: Wishes, ask: Console) -> Wishes:
    """Add answers to the questions that do not depend on the machine."""
    if wishes.model is None:
        told = f"1. Which model? [dim]a directory, a hub id, or {NEW}: a small one with new weights[/]"
        named = _until(ask, told, NEW, lambda named: check_model(_path(named), is_adapter=False))
        wishes = replace(wishes, model=named)
    model = _path(wishes.model)
    if wishes.data is None:
        told = f"2. Which data? [dim]a glob of files, or {STDLIB}: the sources of Python's standard library[/]"
        place = _until(ask, told, STDLIB, lambda place: check_data([place], _format(wishes, [place]), model))
        wishes = replace(wishes, data=(place,))
    if wishes.format is None and model is not None:
        guessed = format_of(wishes.data or (STDLIB,))
        told = "   What do they hold? [dim]text, or conversations (messages), or prompts with their completions[/]"
        wishes = replace(wishes, format=Prompt.ask(told, choices=list(FORMATS), default=str(guessed), console=ask))
    if wishes.is_adapter is None and model is not None:
        told = "3. Train an adapter (LoRA) instead of the whole model?"
        wishes = replace(wishes, is_adapter=Confirm.ask(told, default=True, console=ask))
    return wishes


def _layout(wishes: Wishes, machine: Machine, known: Known, registry: Registry, ask: Console | None) -> tuple[int, str]:
    ranks = wishes.ranks
    if ranks is None and ask is not None:
        told = f"4. On how many ranks? [dim]found: {machine.count} of kind {machine.device}[/]"
        ranks = _until(ask, told, machine.count, _check_ranks, IntPrompt)
    ranks = ranks or machine.count
    best = wishes.strategy or recommended(known, machine, ranks, registry, is_adapter=bool(wishes.is_adapter))
    if wishes.strategy is None and ask is not None:
        told = f"   Under which strategy? [dim]{', '.join(registry.strategies)}; recommended: {best}[/]"
        best = _until(ask, told, best, registry.get)
    return ranks, registry.get(best).name


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks can train nothing. Give at least 1.")


def length_of(text: str) -> tuple[int | None, float | None]:
    """Parse a number of steps, which may have no unit, or of epochs; raise ConfigError if it is neither."""
    found = _LENGTH.fullmatch(text.strip().lower())
    number = float(found["number"]) if found else 0.0
    is_epochs = bool(found and (found["unit"] or "").startswith("epoch"))
    if not number or (not is_epochs and not number.is_integer()):
        raise ConfigError(f"{text!r} is no length of a run. Write a number of steps, such as 300, or 2 epochs.")
    return (None, number) if is_epochs else (int(number), None)


def _until(ask: Console, told: str, default: T, check: Callable[[T], object], kind: Any = Prompt) -> T:
    """Ask until the answer passes the check; show what is wrong with others."""
    while True:
        answer: T = kind.ask(told, default=default, console=ask)
        try:
            check(answer)
        except MeshwrightError as error:
            ask.print(f"   {error}", markup=False, highlight=False, soft_wrap=True)
        else:
            return answer
