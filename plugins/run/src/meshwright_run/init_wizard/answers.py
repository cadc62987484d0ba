"""The five answers for a first run file, from flags or questions, checked as far as possible without torch."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, get_args

from rich.console import Console
from rich.prompt import Confirm, IntPrompt, Prompt

from meshwright.plugin import (
    ConfigError,
    DataError,
    MeshwrightError,
    ModelError,
    Registry,
    count_usable_cores,
    read_json_object,
    read_json_object_or_empty,
    suggest_match,
    validate_config,
)

from ..data.config import STDLIB, DataConfig, Format, SourceConfig
from ..data.files import get_file_kind
from ..data.layouts import DataLayout, detect_layout
from ..data.sources import resolve_source

FORMATS: tuple[Format, ...] = get_args(Format)
NEW_MODEL = "new"
"""Used instead of a model's path for a small model with new weights."""
NEW_NUM_PARAMETERS, NEW_MAX_POSITIONS = 1_000_000, 256
DEFAULT_STEPS, DEFAULT_EPOCHS = 300, 3.0
"""Length of a run that trains a new model or on the standard library, and of one that fine-tunes on files."""
MAX_SEQ_LEN, _MAX_SEQ_LEN_ON_CPU = 1024, 256
"""Maximum sequence length in tokens, if the model supports more."""
_MIN_SEQ_LEN = 16
_BYTES_PER_TOKEN = 4
"""Of text, roughly."""
_DTYPE_BYTES = {"float32": 4, "float64": 8}
"""Bytes per weight in a file; 2 for other dtypes."""
_STATE_BYTES_PER_PARAMETER = 16
"""Bytes per parameter that AdamW trains in float32: weight, gradient and two moments."""
_MAX_STATE_FRACTION = 0.6
"""Maximum fraction of device memory for training state; the rest is for activations."""
MAX_RANKS_ON_CPU = 4
"""Limit, since each rank is a process with its own copy of torch."""


@dataclass(frozen=True)
class Machine:
    """This machine: number of accelerators, or of ranks that suit the CPU cores, and memory per rank."""

    device: str
    num_ranks: int
    memory_bytes_per_rank: int


@functools.cache
def detect_machine() -> Machine:
    """Return the devices and memory of this machine. Imports torch."""
    import torch

    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        count = torch.accelerator.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
        return Machine(kind.type if kind is not None else "cpu", count, memory)
    ranks = min(MAX_RANKS_ON_CPU, count_usable_cores())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine("cpu", ranks, memory // ranks)


@dataclass(frozen=True)
class InitAnswers:
    """Choices for a first run. `model`: None for a small one with new weights. `data`: globs, or `STDLIB`."""

    model: str | None
    data: tuple[str, ...]
    layout: DataLayout
    is_adapter: bool
    num_ranks: int
    strategy: str
    steps: int | None
    epochs: float | None

    @property
    def format(self) -> Format:
        return self.layout.format

    @property
    def files(self) -> str | list[str]:
        """`data` in the form of a run file."""
        return self.data[0] if len(self.data) == 1 else list(self.data)


def check_model(model: str | None, *, is_adapter: bool) -> None:
    """Raise ModelError if the model does not exist, or adapters cannot be trained in this environment."""
    if model is None:
        if is_adapter:
            raise ModelError(
                "--adapter needs an existing model, but none was given. Give --model DIRECTORY, or leave --adapter out."
            )
        return
    if is_adapter and find_spec("peft") is None:
        raise ModelError("adapters need the package peft, which is not installed. pip install 'meshwright[peft]'")
    directory = Path(model).expanduser()
    if not directory.exists() and not is_hub_id(model):
        raise ModelError(
            f"--model={model!r} is neither an existing directory, nor a hub id (owner/name), nor {NEW_MODEL!r}. Give "
            "one of these."
        )
    parent = directory.parent
    if not directory.exists() and is_hub_id(model) and parent.is_dir():
        raise ModelError(
            f"--model={model!r} does not exist in the directory {str(parent)!r}."
            f"{suggest_match(directory.name, [each.name for each in parent.iterdir()])}"
        )
    if directory.exists() and not (directory / "config.json").is_file():
        trained = directory / "model"
        hint = f" Did you mean {str(trained)!r}?" if (trained / "config.json").is_file() else ""
        raise ModelError(f"--model={model!r} holds no config.json, so it is not a Hugging Face model directory.{hint}")


def is_hub_id(model: str) -> bool:
    """Return whether a text has the form owner/name."""
    owner, slash, name = model.partition("/")
    return bool(slash and owner and name) and "/" not in name and owner[0] not in "./~"


def parse_format(name: str) -> Format:
    """Return the format with this name. Raises ConfigError if there is none."""
    if name in FORMATS:
        return name
    raise ConfigError(f"--format={name!r} is not one of {', '.join(FORMATS)}.{suggest_match(name, FORMATS)}")


def check_data_files(globs: Sequence[str], format: Format, model: str | None) -> None:
    """Raise ConfigError if a new model would have no tokenizer for the format, or DataError for invalid files."""
    if model is None and format != "text":
        raise ConfigError(
            f"{', '.join(globs)}: the format {format} needs an existing tokenizer, but a new model has none: one "
            "can be trained only on text. Give --model, the directory of a model with its tokenizer."
        )
    source = resolve_source(validate_config(SourceConfig, {"files": list(globs), "format": format}, where="--data"))
    paths = [file.path for file in source.files]
    if len(paths) == 1 and get_file_kind(paths[0]) == ".txt":
        raise DataError(
            f"{paths[0]} is a single document, so none can be held out for evaluation. Give several files, or a "
            f".jsonl file with one document per line."
        )


@dataclass(frozen=True)
class ModelFacts:
    """Facts from the files of a model; None: unknown. `max_positions`: maximum sequence length in tokens."""

    max_positions: int | None = None
    num_parameters: int | None = None
    has_chat_template: bool | None = None


def inspect_model(model: str | None) -> ModelFacts:
    """Inspect a model without reading its weights. Raises ModelError if its config.json cannot be read."""
    if model is None:
        return ModelFacts(max_positions=NEW_MAX_POSITIONS, num_parameters=NEW_NUM_PARAMETERS)
    directory = Path(model).expanduser()
    if not directory.is_dir():
        return ModelFacts()
    try:
        config = read_json_object(directory / "config.json")
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory / 'config.json'} is not a valid model configuration: {error}.") from None
    inner = config.get("text_config")
    positions = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    dtype = str(config.get("dtype", config.get("torch_dtype", "float32")))
    return ModelFacts(
        max_positions=positions if isinstance(positions, int) else None,
        num_parameters=size // _DTYPE_BYTES.get(dtype, 2) or None,
        has_chat_template=_has_template(directory),
    )


def _has_template(directory: Path) -> bool:
    # The tokenizer itself is checked when it is loaded.
    is_file = any((directory / f"chat_template.{suffix}").is_file() for suffix in ("jinja", "json"))
    return is_file or bool(read_json_object_or_empty(directory / "tokenizer_config.json").get("chat_template"))


def choose_seq_len(answers: InitAnswers, facts: ModelFacts, device: str) -> int:
    """Return the sequence length in tokens; little text gets a small one, which its held-out part fills."""
    most = _MAX_SEQ_LEN_ON_CPU if device == "cpu" else MAX_SEQ_LEN
    most = min(most, facts.max_positions or most)
    if answers.format != "text" or answers.data == (STDLIB,):
        return most
    size = sum(file.size for file in resolve_source(SourceConfig(files=list(answers.data))).files)
    held_out = int(size * DataConfig.model_fields["eval_fraction"].default / _BYTES_PER_TOKEN)
    return min(most, 1 << max(held_out.bit_length() - 1, _MIN_SEQ_LEN.bit_length() - 1))


def recommend_strategy(
    facts: ModelFacts, machine: Machine, num_ranks: int, registry: Registry, *, is_adapter: bool
) -> str:
    """Return `single` for one rank, `ddp` if a device can hold the full training state, else `fsdp2`, if installed."""
    if num_ranks == 1:
        return "single"
    size = (facts.num_parameters or 0) * (4 if is_adapter else _STATE_BYTES_PER_PARAMETER)
    fits = facts.num_parameters is not None and size <= _MAX_STATE_FRACTION * machine.memory_bytes_per_rank
    preferred = ("ddp", "fsdp2") if fits else ("fsdp2", "megatron_fsdp", "ddp")
    installed = [name for name in preferred if name in registry.strategies]
    if not installed:
        raise ConfigError(
            f"{num_ranks} ranks need a data-parallel strategy, but none is installed. "
            f"{registry.install_commands.get('fsdp2', '')} Or give --devices 1."
        )
    return installed[0]


# -- questions

T = TypeVar("T")

_LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>steps?|epochs?)?")


@dataclass(frozen=True)
class InitFlags:
    """Answers given by flags; None: not given. `model` may also be `NEW_MODEL`."""

    model: str | None = None
    data: tuple[str, ...] | None = None
    format: str | None = None
    is_adapter: bool | None = None
    num_ranks: int | None = None
    strategy: str | None = None
    steps: int | None = None
    epochs: float | None = None


def collect_answers(
    flags: InitFlags, find_machine: Callable[[], Machine], registry: Registry, console: Console | None
) -> InitAnswers:
    """Return the answers: from flags, else from questions on `console`, if given, else defaults."""
    if flags.steps is not None and flags.epochs is not None:
        raise ConfigError(f"--steps={flags.steps} and --epochs={flags.epochs:g} both set the length. Leave one out.")
    if console is not None:
        flags = _ask_model_and_data(flags, console)
    model, is_adapter, data = _to_model_path(flags.model), bool(flags.is_adapter), flags.data or (STDLIB,)
    check_model(model, is_adapter=is_adapter)
    layout = _resolve_data_layout(flags, data)
    check_data_files(data, layout.format, model)
    ranks, strategy = _resolve_layout(flags, find_machine(), inspect_model(model), registry, console)
    steps, epochs = flags.steps, flags.epochs
    if steps is None and epochs is None:
        length = f"{DEFAULT_STEPS} steps" if model is None or STDLIB in data else f"{DEFAULT_EPOCHS:g} epochs"
        if console is not None:
            question = "5. How long? [dim]such as 300 steps, or 2 epochs[/]"
            length = _ask_until_valid(console, question, length, parse_length)
        steps, epochs = parse_length(length)
    return InitAnswers(model, data, layout, is_adapter, ranks, strategy, steps, epochs)


def _to_model_path(model: str | None) -> str | None:
    return None if model == NEW_MODEL else model


def _resolve_data_layout(flags: InitFlags, data: Sequence[str]) -> DataLayout:
    return detect_layout(data, format=None if flags.format is None else parse_format(flags.format))


def _ask_model_and_data(flags: InitFlags, console: Console) -> InitFlags:
    """Return the flags with answers to the questions that do not depend on the machine."""
    if flags.model is None:
        question = f"1. Which model? [dim]a directory, a hub id, or {NEW_MODEL}: a small one with new weights[/]"
        name = _ask_until_valid(
            console, question, NEW_MODEL, lambda name: check_model(_to_model_path(name), is_adapter=False)
        )
        flags = replace(flags, model=name)
    model = _to_model_path(flags.model)
    if flags.data is None:
        question = f"2. Which data? [dim]a glob of files, or {STDLIB}: the source code of Python's standard library[/]"
        pattern = _ask_until_valid(
            console,
            question,
            STDLIB,
            lambda pattern: check_data_files([pattern], _resolve_data_layout(flags, [pattern]).format, model),
        )
        flags = replace(flags, data=(pattern,))
    if flags.format is None and model is not None:
        detected = str(detect_layout(flags.data or (STDLIB,)).format)
        question = "   In which format? [dim]detected from the columns[/]"
        flags = replace(flags, format=Prompt.ask(question, choices=list(FORMATS), default=detected, console=console))
    if flags.is_adapter is None and model is not None:
        question = "3. Train an adapter (LoRA) instead of the full model?"
        flags = replace(flags, is_adapter=Confirm.ask(question, default=True, console=console))
    return flags


def _resolve_layout(
    flags: InitFlags, machine: Machine, facts: ModelFacts, registry: Registry, console: Console | None
) -> tuple[int, str]:
    ranks = flags.num_ranks
    if ranks is None and console is not None:
        question = f"4. On how many ranks? [dim]available: {machine.num_ranks} of type {machine.device}[/]"
        ranks = _ask_until_valid(console, question, machine.num_ranks, _check_ranks, IntPrompt)
    ranks = ranks or machine.num_ranks
    best = flags.strategy or recommend_strategy(facts, machine, ranks, registry, is_adapter=bool(flags.is_adapter))
    if flags.strategy is None and console is not None:
        question = f"   With which strategy? [dim]{', '.join(registry.strategies)}; recommended: {best}[/]"
        best = _ask_until_valid(console, question, best, registry.get)
    return ranks, registry.get(best).name


def _check_ranks(num_ranks: int) -> None:
    if num_ranks < 1:
        raise ConfigError(f"{num_ranks} is not a valid number of ranks. Give at least 1.")


def parse_length(text: str) -> tuple[int | None, float | None]:
    """Parse a number of steps (the default unit) or of epochs. Raises ConfigError if it is neither."""
    match = _LENGTH.fullmatch(text.strip().lower())
    number = float(match["number"]) if match else 0.0
    is_epochs = bool(match and (match["unit"] or "").startswith("epoch"))
    if not number or (not is_epochs and not number.is_integer()):
        raise ConfigError(f"{text!r} is not a valid run length. Write a number of steps, such as 300, or 2 epochs.")
    return (None, number) if is_epochs else (int(number), None)


def _ask_until_valid(
    console: Console, question: str, default: T, check: Callable[[T], object], prompt_cls: Any = Prompt
) -> T:
    """Ask until the answer passes the check, and print the errors of invalid answers."""
    while True:
        answer: T = prompt_cls.ask(question, default=default, console=console)
        try:
            check(answer)
        except MeshwrightError as error:
            console.print(f"   {error}", markup=False, highlight=False, soft_wrap=True)
        else:
            return answer
