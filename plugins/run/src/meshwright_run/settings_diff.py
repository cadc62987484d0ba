"""Difference between two run files. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def diff_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return key, value in `one` and value in `other` for each key whose values differ; values as text."""
    left, right = dict(_flatten(one)), dict(_flatten(other))
    pairs = {name: (left.get(name, "(not set)"), right.get(name, "(not set)")) for name in {**left, **right}}
    return [
        (name, _format_value(mine), _format_value(theirs)) for name, (mine, theirs) in pairs.items() if mine != theirs
    ]


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _format_value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
