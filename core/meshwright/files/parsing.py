"""Read untrusted files, with limits on size, depth and time. Imports no torch.

YAML is parsed by the core schema of YAML 1.2: yes, on, 1:30 and 2024-01-01 are strings, 3e-4 is a number. 010 is also a
string, since it is eight in YAML 1.1 and ten in 1.2. Source: YAML 1.2.2, section 10.3.
"""

from __future__ import annotations

import copy
import errno
import itertools
import json
import os
import re
import signal
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import yaml

from ..base.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_JSON_BYTES = 1 << 28
"""Limit for JSON files of models, whose index lists every tensor."""
MAX_VALUES = 100_000
"""Limit for values of a YAML file with aliases expanded: a few short lines can represent billions of values."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG_PREFIX = "tag:yaml.org,2002:"
_CORE_SCHEMA = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    # Not in the core schema, but common.
    "merge": (r"<<", ["<"]),
}


class _Loader(yaml.SafeLoader):
    """Loads the core schema, and rejects duplicate keys and tags."""

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
            # `<<` merges another mapping, whose keys may be repeated.
            if isinstance(key, yaml.ScalarNode) and key.tag != f"{_TAG_PREFIX}merge":
                if key.value in seen:
                    problem = f"the key {key.value!r} is given twice"
                    raise yaml.MarkedYAMLError("first", seen[key.value].start_mark, problem, key.start_mark)
                seen[key.value] = key
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type."""


for _name, (_pattern, _first) in _CORE_SCHEMA.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG_PREFIX + _name, re.compile(f"^(?:{_pattern})$"), _first)


def parse_yaml(text: str) -> Any:
    """Return the value of one YAML document. Raises ValueError."""
    try:
        # Creating a loader raises an error for invalid characters.
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, 1, {})
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace('in "<unicode string>", ', "at ")) from None


def _check_size(node: yaml.Node, depth: int, sizes_by_node: dict[yaml.Node, tuple[int, int] | None]) -> tuple[int, int]:
    """Return the number of values and the depth of a node with aliases expanded.

    `sizes_by_node`: results for earlier nodes; None for nodes in progress, where an alias would contain itself.
    """
    if isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
        raise ValueError(f"{node.value!r:.80} holds half of a surrogate pair, which is no text")
    if node in sizes_by_node:
        size_and_depth = sizes_by_node[node]
        if size_and_depth is None:
            raise ValueError("an alias (*) stands inside of what it names")
    else:
        sizes_by_node[node] = None
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = itertools.chain.from_iterable(children)
        parts = [_check_size(child, depth + 1, sizes_by_node) for child in children]
        size_and_depth = sizes_by_node[node] = (
            1 + sum(size for size, _ in parts),
            1 + max((deep for _, deep in parts), default=0),
        )
    if depth + size_and_depth[1] - 1 > MAX_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if size_and_depth[0] > MAX_VALUES:
        raise ValueError(f"it holds more than {MAX_VALUES:,} values")
    return size_and_depth


class _BlockDumper(_Dumper):
    """Writes multi-line strings as block scalars."""


_BlockDumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(f"{_TAG_PREFIX}str", text, style="|" if "\n" in text else None)
)


def to_yaml(value: Any, *, use_block_style: bool = False) -> str:
    """Return YAML that `parse_yaml` and YAML 1.1 parsers read identically.

    `use_block_style`: write multi-line strings as block scalars.
    """
    dumper = _BlockDumper if use_block_style else _Dumper
    return yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is invalid or nested too deeply."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        holders = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [inner for holder in holders for inner in holder]
        if not level:
            return value
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def open_regular_file(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, also for a pipe, which could block forever."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return open(file, "rb", buffering=buffering)


def _read_bounded(file: BinaryIO, max_bytes: int) -> bytes:
    with file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes:,} bytes")
    return content


def read_regular_file(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file. Raises OSError if it is not a regular file, is too large, or cannot be read."""
    try:
        return _read_bounded(open_regular_file(path), max_bytes)
    except ValueError as error:
        raise OSError(errno.EFBIG, str(error), str(path)) from None


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Return the UTF-8 text of a file, a pipe or a device. Raises OSError or ValueError."""
    return _read_bounded(path.open("rb"), max_bytes).decode("utf-8-sig")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError or ValueError."""
    value = parse_json(_read_bounded(open_regular_file(path), MAX_JSON_BYTES).decode("utf-8-sig"))
    if not isinstance(value, dict):
        raise ValueError(f"it holds a JSON {type(value).__name__}, not an object")
    return value


def read_json_object_or_empty(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or {} if it cannot be read; code that needs the file reports the error."""
    try:
        return read_json_object(path)
    except (OSError, ValueError):
        return {}


@contextmanager
def time_limit(seconds: float, action: str) -> Iterator[None]:
    """Raise TimeoutError in the context after `seconds`, for untrusted patterns and templates.

    Interrupts Python code and `re`; the message says that `action` took too long. There is no limit outside of the main
    thread, where signals are not handled, or if an alarm is already set.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"{action} took longer than {seconds:g} seconds")

    before = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def explain_library_error(error: BaseException) -> str:
    """Describe an error of another library about the user's files."""
    if "trust_remote_code" in str(error):
        return "it brings code of its own (auto_map), which is never run, and is of no class that transformers has"
    return f"{type(error).__name__}: {error}"


def apply_assignments(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of a run file with "key.of.value=yaml" assignments applied; ConfigError if one is invalid."""
    changed = copy.deepcopy(dict(values))
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {assignment!r} is not of the form key=value, such as tp_size=2.")
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise ConfigError(f"--set {assignment!r}: the value is not valid YAML: {error}") from None
        section: Any = changed
        *parents, last = _split_key(key)
        for parent in parents:
            if isinstance(section, dict) and section.get(parent) is None:
                section[parent] = {}
            section = section[_find_key(section, parent, assignment)]
        section[_find_key(section, last, assignment)] = value
    return changed


def _split_key(key: str) -> list[str]:
    """Return the parts of a dotted key; `a[0].b` is `a.0.b`."""
    return re.sub(r"\[(\d+)\]", r".\1", key).split(".")


def _find_key(section: Any, key: str, assignment: str) -> Any:
    """Return the key of a mapping, or the index of a list, that a part of an assignment names."""
    if isinstance(section, dict):
        return key
    if not isinstance(section, list):
        raise ConfigError(f"--set {assignment!r}: {key!r} is a key of {section!r}, which has no keys of its own.")
    if not key.isdecimal() or int(key) >= len(section):
        count = len(section)
        elements = f"it has {count} element{'s' if count > 1 else ''}, 0" + (f" to {count - 1}" if count > 1 else "")
        path, _, example = assignment.partition("=")
        parts = _split_key(path)
        position = parts.index(key)
        for inner in reversed(parts[position + key.isdecimal() :]):
            example = f"{{{inner}: {example}}}"
        raise ConfigError(
            f"--set {assignment!r}: {key!r} selects an element of a list, but "
            f"{elements if section else 'it is empty'}. To replace the list, write --set "
            f"'{'.'.join(parts[:position])}=[{example}]'."
        )
    return int(key)


def parse_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the nested mapping of "key.of.value=yaml" assignments."""
    return apply_assignments({}, assignments)
