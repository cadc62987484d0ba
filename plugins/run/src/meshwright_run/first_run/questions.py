"""The five questions, asked at a terminal; those that flags have answered are not asked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rich.console import Console
from rich.prompt import Confirm, IntPrompt, Prompt

from meshwright.plugin import ConfigError, MeshwrightError, Registry

from ..data.config import STDLIB
from .answers import (
    FORMATS,
    NEW,
    STEPS,
    Answers,
    Format,
    Known,
    Machine,
    check_data,
    check_model,
    format_named,
    format_of,
    known_of,
    recommended,
)

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
    """Return the answers: from flags, else from questions on the console `ask`, if given, else defaults.

    Raises:
        MeshwrightError: an answer cannot be used.
    """
    if wishes.steps is not None and wishes.epochs is not None:
        raise ConfigError(f"--steps={wishes.steps} and --epochs={wishes.epochs:g} are two lengths. Leave one out.")
    if ask is not None:
        wishes = _asked_before(wishes, ask)
    model = _path(wishes)
    is_adapter = bool(wishes.is_adapter)
    check_model(model, is_adapter=is_adapter)
    data = wishes.data or (STDLIB,)
    format = _format(wishes, data)
    check_data(data, format, model)
    known = known_of(model)
    ranks, strategy = _layout(wishes, find_machine(), known, registry, ask)
    if ask is not None and wishes.steps is None and wishes.epochs is None:
        wishes = _ask_length(wishes, ask)
    steps = STEPS if wishes.epochs is None and wishes.steps is None else wishes.steps
    return Answers(model, data, format, is_adapter, ranks, strategy, steps, wishes.epochs)


def _path(wishes: Wishes) -> str | None:
    return None if wishes.model in (None, NEW) else wishes.model


def _format(wishes: Wishes, data: Sequence[str]) -> Format:
    return format_of(data) if wishes.format is None else format_named(wishes.format)


def _asked_before(wishes: Wishes, ask: Console) -> Wishes:
    """Add answers to the questions that do not depend on the machine."""
    if wishes.model is None:
        model = _until(
            lambda: Prompt.ask(
                f"1. Which model? [dim]a directory, a hub id, or {NEW}: a small one with new weights[/]",
                default=NEW,
                console=ask,
            ),
            lambda model: check_model(None if model == NEW else model, is_adapter=False),
            ask,
        )
        wishes = replace(wishes, model=model)
    model_path = _path(wishes)
    if wishes.data is None:
        place = _until(
            lambda: Prompt.ask(
                f"2. Which data? [dim]a glob of files, or {STDLIB}: the sources of Python's standard library[/]",
                default=STDLIB,
                console=ask,
            ),
            lambda place: check_data([place], _format(wishes, [place]), model_path),
            ask,
        )
        wishes = replace(wishes, data=(place,))
    if wishes.format is None and model_path is not None:
        guessed = format_of(wishes.data or (STDLIB,))
        told = "   What do they hold? [dim]text, or conversations (messages), or prompts with their completions[/]"
        named = Prompt.ask(told, choices=list(FORMATS), default=str(guessed), console=ask)
        wishes = replace(wishes, format=named)
    if wishes.is_adapter is None and model_path is not None:
        told = "3. Train an adapter (LoRA) instead of the whole model?"
        wishes = replace(wishes, is_adapter=Confirm.ask(told, default=True, console=ask))
    return wishes


def _layout(wishes: Wishes, machine: Machine, known: Known, registry: Registry, ask: Console | None) -> tuple[int, str]:
    ranks = wishes.ranks
    if ranks is None and ask is not None:
        told = f"4. On how many ranks? [dim]found: {machine.count} of kind {machine.device}[/]"
        ranks = _until(lambda: IntPrompt.ask(told, default=machine.count, console=ask), _check_ranks, ask)
    ranks = ranks or machine.count
    best = wishes.strategy or recommended(known, machine, ranks, registry, is_adapter=bool(wishes.is_adapter))
    if wishes.strategy is None and ask is not None:
        told = f"   Under which strategy? [dim]{', '.join(registry.strategies)}; recommended: {best}[/]"
        best = _until(lambda: Prompt.ask(told, default=best, console=ask), lambda name: registry.get(name), ask)
    return ranks, registry.get(best).name


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks can train nothing. Give at least 1.")


def _ask_length(wishes: Wishes, ask: Console) -> Wishes:
    told = "5. How long? [dim]such as 300 steps, or 2 epochs[/]"
    text = _until(lambda: Prompt.ask(told, default=f"{STEPS} steps", console=ask), length_of, ask)
    steps, epochs = length_of(text)
    return replace(wishes, steps=steps, epochs=epochs)


def length_of(text: str) -> tuple[int | None, float | None]:
    """Parse a number of steps, which may have no unit, or of epochs; raise ConfigError if it is neither."""
    found = _LENGTH.fullmatch(text.strip().lower())
    number = float(found["number"]) if found else 0.0
    is_epochs = bool(found and (found["unit"] or "").startswith("epoch"))
    if not number or (not is_epochs and not number.is_integer()):
        raise ConfigError(f"{text!r} is no length of a run. Write a number of steps, such as 300, or 2 epochs.")
    return (None, number) if is_epochs else (int(number), None)


def _until(ask: Callable[[], T], check: Callable[[T], object], console: Console) -> T:
    """Ask until the answer passes the check; show what is wrong with others."""
    while True:
        answer = ask()
        try:
            check(answer)
        except MeshwrightError as error:
            console.print(f"   {error}", markup=False, highlight=False, soft_wrap=True)
        else:
            return answer
