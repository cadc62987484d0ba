"""Completion of arguments in shells: settings of the run file, strategies, checkpoints. Imports no torch."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from meshwright.plugin import get_registry


def complete_setting(incomplete: str) -> list[str]:
    """Return what `--set` may begin with: keys of the run file; after `=`, values where few are allowed."""
    from .run_file import RunConfig

    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={each}" for each in _find_values(RunConfig, key) if each.startswith(value)]
    return [each for each in _iter_keys(RunConfig) if each.startswith(key)]


def _iter_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        yield f"{key}="
        for each in _find_models(field.annotation):
            yield from _iter_keys(each, f"{key}.")
    if not prefix:
        options = {name: None for spec in get_registry().strategies.values() for name in spec.config_cls.model_fields}
        yield from (f"strategy_config.{name}=" for name in options)


def _find_values(model: type[BaseModel], key: str) -> list[str]:
    if key == "strategy":
        return complete_strategy("")
    first, _, rest = key.partition(".")
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    if first not in fields:
        return []
    annotation = fields[first].annotation
    if rest:
        return [value for each in _find_models(annotation) for value in _find_values(each, rest)]
    return [str(value) for value in _iter_values(annotation)]


def _iter_values(annotation: Any) -> Iterator[Any]:
    if annotation is bool:
        yield from ("true", "false")
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for each in get_args(annotation):
            yield from _iter_values(each)


def _find_models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (list, dict):
        return []
    return [model for each in get_args(annotation) for model in _find_models(each)]


def complete_strategy(incomplete: str) -> list[str]:
    """Return the names of installed strategies."""
    return [name for name in get_registry().strategies if name.startswith(incomplete)]


def complete_checkpoint(incomplete: str) -> list[str]:
    """Return directories of checkpoints, newest first, and the directories that the text may continue to."""
    found = sorted(glob.glob(f"{glob.escape(incomplete)}*"), reverse=True)
    directories = [each for each in found if Path(each).is_dir()]
    below = sorted(glob.glob(f"{glob.escape(incomplete)}*/checkpoints/step-*"), reverse=True)
    return [*below, *(each if Path(each).name.startswith("step-") else f"{each}/" for each in directories)]
