"""Settings of run files as text: all, those that differ from the defaults, or from another run. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

UNSET = "(not set)"


def diff_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return key, value in `one` and value in `other` for each key whose values differ; values as text."""
    left, right = (dict(_flatten(each, lists=True)) for each in (one, other))
    pairs = {name: (left.get(name, UNSET), right.get(name, UNSET)) for name in {**left, **right}}
    return [
        (name, _format_value(mine), _format_value(theirs)) for name, (mine, theirs) in pairs.items() if mine != theirs
    ]


def list_settings(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return key, value and default of each setting as text; `defaults` as from `list_defaults`."""
    return [(name, _format_value(value), _format_value(defaults.get(name, UNSET))) for name, value in _flatten(values)]


def list_defaults(config: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return the default by key of a config and of its sections, including the optional ones."""
    found: dict[str, Any] = {}
    for name, field in config.model_fields.items():
        default = UNSET if field.is_required() else field.get_default(call_default_factory=True)
        section = next((each for each in (field.annotation, *get_args(field.annotation)) if _is_config(each)), None)
        if section is not None:
            found |= list_defaults(section, f"{prefix}{name}.")
        if not isinstance(default, BaseModel):
            found[f"{prefix}{name}"] = default
    return found


def _is_config(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


_MAX_LISTED = 5


def join_changes(texts: Sequence[str]) -> str:
    """Return the first of some changes as a list, and the number of the others."""
    more = f" and {len(texts) - _MAX_LISTED} more" if len(texts) > _MAX_LISTED else ""
    return ", ".join(texts[:_MAX_LISTED]) + more


def _flatten(values: Mapping[str, Any], prefix: str = "", *, lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting; with `lists`, those of mappings in lists too."""
    for key, value in values.items():
        if lists and isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            value = {str(index): each for index, each in enumerate(value)}
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.", lists=lists)
        else:
            yield f"{prefix}{key}", value


def _format_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
