"""Options in the reference: an attribute says what the description of its pydantic field says, and has its default."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import griffe


class DescribedFields(griffe.Extension):
    """Of `Field(default=1, description="...")` the text is the docstring of an attribute without, and 1 its value."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        named = {name: each for name, each in attr.module.members.items() if not each.is_alias}
        constants = {name: str(each.value) for name, each in named.items() if isinstance(each, griffe.Attribute)}
        if attr.docstring is None and (text := parse_description(str(attr.value or ""), constants)):
            attr.docstring = griffe.Docstring(text, parent=attr, parser=griffe.Parser.google)
            attr.value = parse_default(str(attr.value))


def parse_description(value: str, constants: Mapping[str, str]) -> str | None:
    """What `Field` is given as its description.

    Args:
        value: what an attribute is set to, as source.
        constants: the source of each text that the description may name.

    Returns:
        None if that is no call of `Field`, or describes nothing.
    """
    if not value.startswith("Field("):
        return None
    call = ast.parse(value, mode="eval").body
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return next((_evaluate_text(each.value, constants) for each in keywords if each.arg == "description"), None)


def parse_default(value: str) -> str | None:
    """The default of a `Field(...)`, as source; None where there is none, or a function makes it."""
    call = ast.parse(value, mode="eval").body
    keywords = call.keywords if isinstance(call, ast.Call) else []
    return next((ast.unparse(each.value) for each in keywords if each.arg == "default"), None)


def _evaluate_text(node: ast.expr, constants: Mapping[str, str]) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_evaluate_text(each, constants) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return _evaluate_text(node.value, constants)
    if isinstance(node, ast.Name):
        node = ast.parse(constants[node.id], mode="eval").body
    return str(ast.literal_eval(node))
