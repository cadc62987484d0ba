"""Read YAML and JSON that somebody wrote by hand or a crash cut off: bounded in size and depth, and never guessed at.

YAML is read by the core schema of YAML 1.2: yes, on, 1:30 and 2024-01-01 are words, 3e-4 is a number. So is 010 a
word, which was eight in YAML 1.1 and is ten in 1.2: nobody can tell what its writer meant.
Source: YAML 1.2.2, section 10.3.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import yaml

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_JSON_BYTES = 1 << 28
"""Of a JSON file beside a model's weights: an index names each tensor of large models."""
MAX_VALUES = 100_000
"""Of a YAML file, with every alias written out: a few short lines of aliases can stand for billions of values."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_CORE_SCHEMA = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    # Not of the core schema, but common: keys of another mapping.
    "merge": (r"<<", ["<"]),
}


class _Loader(yaml.SafeLoader):
    """The core schema, in which no key is given twice."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 the base's is YAML 1.1's
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(None, None, f"tags such as {event.tag!r} are not allowed", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            # `<<` merges other mappings, whose keys may be given again.
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG}merge":
                if key.value in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.MarkedYAMLError("first", seen[key.value].start_mark, problem, key.start_mark)
                seen[key.value] = key
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes a text that either version of YAML would read as something else."""


for _name, (_pattern, _first) in _CORE_SCHEMA.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _first)


def parse_yaml(text: str) -> Any:
    """The value that one YAML document holds; a mapping, list, text, number, truth value or None.

    Raises:
        ValueError: the text is not valid YAML, gives a key twice, or is nested too deeply or too large.
    """
    try:
        # Making a loader looks for characters that are not allowed.
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, 1, {})
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


class _BlockDumper(_Dumper):
    """Writes a text of several lines as such."""


_BlockDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(f"{_TAG}str", text, style="|" if "\n" in text else None)
)


def as_yaml(value: Any, *, blocks: bool = False) -> str:
    """YAML of plain values, which `parse_yaml` and readers of YAML 1.1 read as the same.

    Args:
        blocks: write texts of several lines as such.
    """
    dumper = _BlockDumper if blocks else _Dumper
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True)


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: the text is not valid JSON, or nested too deeply.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _parts(outer)]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object that a JSON file of somebody else holds.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no UTF-8, no JSON, nested too deeply, too large, or holds something else than an object.
    """
    with open_regular(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {MAX_JSON_BYTES:,} bytes")
    value = parse_json(content.decode("utf-8-sig"))
    if not isinstance(value, dict):
        raise ValueError(f"it holds a JSON {type(value).__name__}, not an object")
    return value


def json_object_or_empty(path: Path) -> dict[str, Any]:
    """The same, or nothing where it cannot be read: who needs the file says what is wrong with it."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a file that somebody else may have made, to be read: a pipe, at which one would wait for ever, is refused.

    Raises:
        OSError: it is no file, or cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return open(file, "rb", buffering=buffering)


def read_regular(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a small file that somebody else may have made.

    Raises:
        OSError: it is no file, is larger, or cannot be read.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes:,} bytes", str(path))
    return content


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The text of a small file, be it a pipe or a device.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, or larger.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes:,} bytes")
    return content.decode("utf-8-sig")


def _parts(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _check_size(node: yaml.Node, depth: int, known: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """How many values a node stands for and how deeply they are nested, aliases written out.

    Args:
        known: the same of nodes seen before; None while a node is looked at, which then holds itself.
    """
    if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
        raise ValueError(f"{node.value!r:.80} holds half of a surrogate pair, which is no text")
    if node in known:
        found = known[node]
        if found is None:
            raise ValueError("an alias (*) stands inside of what it names")
    else:
        known[node] = None
        parts = [_check_size(child, depth + 1, known) for child in _children(node)]
        found = known[node] = (1 + sum(size for size, _ in parts), 1 + max((deep for _, deep in parts), default=0))
    if depth + found[1] - 1 > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if found[0] > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES:,} values")
    return found


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from (key, value)
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def reason(error: BaseException) -> str:
    """What another library's error says of files that a user has given."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own (auto_map), which is never run, and is of no class that transformers has"
    return f"{type(error).__name__}: {error}"
