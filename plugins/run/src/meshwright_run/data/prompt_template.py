"""Write prompts of plain text, which come before an answer: by name, or with a template of the run file."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

from meshwright.plugin import suggest_match

NONE, ALPACA, CHAT = "none", "alpaca", "chat"
TEMPLATES = (NONE, ALPACA, CHAT)
_ALPACA_TEXT = """\
Below is an instruction that describes a task. Write a response that appropriately completes the request.

### Instruction:
{prompt}

### Response:
"""
_ALPACA_TEXT_WITH_INPUT = """\
Below is an instruction that describes a task, paired with an input that provides further context. Write a response \
that appropriately completes the request.

### Instruction:
{prompt}

### Input:
{input}

### Response:
"""
"""Source: Taori et al. 2023, Stanford Alpaca, train.py."""


def find_template_error(template: str) -> str:
    """Return why a text is not a template; empty if it is one. A placeholder is only a field's name."""
    if template in TEMPLATES:
        return ""
    allowed = f"Write one of {', '.join(TEMPLATES)}, or a text with fields of the records in braces, such as "
    allowed += "'Question: {prompt}\\nAnswer: '; literal braces are doubled"
    try:
        parts = [each for each in string.Formatter().parse(template) if each[1] is not None]
    except ValueError as error:
        return f"{template!r:.80} is not valid ({error}). {allowed}"
    if not parts:
        return f"{template!r:.80} has no placeholder.{suggest_match(template, TEMPLATES)} {allowed}"
    for _, name, form, conversion in parts:
        if not name or form or conversion:
            shown = f"{{{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}}}"
            return f"the placeholder {shown!r:.80} is not a plain field name. {allowed}"
    return ""


def get_placeholders(template: str) -> tuple[str, ...]:
    """Return the names of the fields that a template contains."""
    if template in TEMPLATES:
        return ("prompt",)
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    return tuple(dict.fromkeys(names))


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Return a template with its placeholders replaced. With `none` and `chat`, the prompt and the input after it."""
    if template == ALPACA:
        template = _ALPACA_TEXT_WITH_INPUT if values.get("input") else _ALPACA_TEXT
    elif template in TEMPLATES:
        return "\n\n".join(each for each in (values["prompt"], values.get("input", "")) if each)
    parts: list[Any] = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts += [literal, "" if name is None else values[name]]
    return "".join(parts)
