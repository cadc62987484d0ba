"""Detect the format of data files from their columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from meshwright.plugin import DataError, validate_config

from .config import STDLIB, Format, SourceConfig
from .files import read_file
from .progress import ReadProgress
from .sources import resolve_source

_CONVERSATIONS = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue")
_MESSAGE_FORMATS: Mapping[Format, tuple[str, str, str]] = {
    "messages": ("messages", "role", "content"),
    "sharegpt": ("conversations", "from", "value"),
}
"""Names of the conversation and of a message's role and content, by format."""
_ANSWERS = ("output", "response", "completion", "answer")
_PROMPTS = ("prompt", "question", "query")
_INPUTS = ("input", "context")
_KNOWN = (
    "messages, a list of {role, content} (OpenAI); conversations, a list of {from, value} (ShareGPT); instruction and "
    "output, with or without input (Alpaca); prompt and completion, or question and answer; chosen and rejected, with "
    "or without prompt; input_ids; text, or a single column of text"
)
_MAX_FILES, _MAX_RECORDS = 20, 20
"""Maximum number of files to look at, and of examples of each."""


@dataclass(frozen=True)
class DataLayout:
    """Format of examples, and the `fields` that it needs. `needs_template`: prompts are bare text, such as a question,
    so that the model needs to see where the answer begins."""

    format: Format = "text"
    fields: Mapping[str, str] = field(default_factory=dict)
    needs_template: bool = False


def detect_layout(globs: Sequence[str], *, format: Format | None = None) -> DataLayout:
    """Return the layout of the examples in files; if `format` is given, with the fields that this format needs.

    Raises DataError if the columns are not known, or differ between examples.
    """
    if STDLIB in globs:
        return DataLayout(format or "text")
    found: tuple[DataLayout, str] | None = None
    for value, location in _iter_first_values(globs):
        if isinstance(value, DataError):
            raise value
        if not isinstance(value, Mapping):
            raise DataError(
                f"{location}: holds a JSON {type(value).__name__}. Each example must be one object, such as "
                '{"text": ...}.'
            )
        if not value:
            continue
        layout = find_layout(value)
        if format is not None:
            if layout is not None and layout.format == format:
                return layout
            continue
        if layout is None:
            if any(each is None for each in value.values()):
                continue
            raise DataError(
                f"{location}: the columns are {', '.join(map(str, value))}, which is no known layout. Known are: "
                f"{_KNOWN}. Rename the columns; or give --format, and name the columns in the run file under `fields`."
            )
        if found is not None and layout != found[0]:
            raise DataError(
                f"the examples differ: {found[1]} has the format {found[0].format}, but {location} has the format "
                f"{layout.format}, or other columns. Name only files of one layout; in the run file, each layout can "
                "be a source of its own."
            )
        found = found or (layout, location)
    if found is None and format is None:
        raise DataError(f"{', '.join(map(repr, globs))} is empty: there is no example to detect the format from.")
    return DataLayout(format or "text") if found is None else found[0]


def _iter_first_values(globs: Sequence[str]) -> Iterator[tuple[Any, str]]:
    source = resolve_source(validate_config(SourceConfig, {"files": list(globs)}, where="--data"))
    for file in source.files[:_MAX_FILES]:
        yield from islice(read_file(file.path, ReadProgress()), _MAX_RECORDS)


def find_layout(record: Mapping[str, Any]) -> DataLayout | None:
    """Return the layout of an example; None if it is not known."""
    for name in _CONVERSATIONS:
        if name in record:
            return _find_conversation_layout(name, record[name])
    if {"chosen", "rejected"} <= record.keys():
        return DataLayout("preference")
    if {"prompt", "completion"} <= record.keys():
        return DataLayout("prompt_completion")
    answer = next((each for each in _ANSWERS if each in record), None)
    if answer is not None and "instruction" in record:
        context = next((each for each in _INPUTS if each in record), "input")
        names = {"output": answer, "input": context}
        return DataLayout("alpaca", {key: name for key, name in names.items() if key != name}, needs_template=True)
    prompt = next((each for each in _PROMPTS if each in record), None)
    if answer is not None and prompt is not None:
        names = {"prompt": prompt, "completion": answer}
        fields = {key: name for key, name in names.items() if key != name}
        return DataLayout("prompt_completion", fields, needs_template=True)
    if "input_ids" in record:
        return DataLayout("tokens")
    if "text" in record:
        return DataLayout("text")
    if len(record) == 1 and isinstance(next(iter(record.values())), str):
        return DataLayout("text", {"text": str(next(iter(record)))})
    return None


def _find_conversation_layout(name: str, value: Any) -> DataLayout | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    first = value[0] if isinstance(value, list) and value else None
    for format, (standard, role, content) in _MESSAGE_FORMATS.items():
        # A message with tool calls may have no content.
        if isinstance(first, Mapping) and role in first and (content in first or "tool_calls" in first):
            return DataLayout(format, {} if name == standard else {standard: name})
    return None
