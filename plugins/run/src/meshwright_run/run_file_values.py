"""Read the values of a run file, before validation: assignments, and paths relative to the file."""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.plugin import ConfigError, apply_assignments, echo, parse_yaml, read_text

from .data.config import STDLIB

CREATED_NAMES = ".written.json"
"""File with the names that runs have created in the directory: only these may be replaced."""
_MODEL_KEYS = (("model", "path"), ("model", "checkpoint"), ("model", "peft", "adapter"))
_DATA_KEYS = frozenset({"files", "dataset", "tokenizer", "chat_template", "corpus"})


def read_values(path: str | Path, assignments: Sequence[str] = ()) -> dict[str, Any]:
    """Read a run file and apply assignments, without validation; see `run_file.load_run`."""
    file = Path(path)
    try:
        values = parse_yaml(read_text(file))
    except OSError as error:
        hint = " `meshwright init` writes a run file." if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read the run file {file}: {error.strerror}.{hint}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must hold a mapping of keys to values, not {type(values).__name__}.")
    values = _resolve_input_paths(values, file.absolute().parent)
    return apply_assignments(_drop_replaced(values, assignments), assignments)


_ALTERNATIVES = (("steps", "epochs"), ("schedule.warmup_steps", "schedule.warmup_ratio"), ("seq_len", "data.seq_len"))
"""Pairs of keys, of which a run file has one. An assignment of one replaces the other."""


def _drop_replaced(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values without those that an assignment of the alternative key replaces."""
    kept, given = copy.deepcopy(dict(values)), {each.partition("=")[0] for each in assignments}
    for pair in _ALTERNATIVES:
        for key, other in (pair, pair[::-1]):
            *parents, last = other.split(".")
            section = kept.get(parents[0]) if parents else kept
            if key in given and other not in given and isinstance(section, dict):
                section.pop(last, None)
    return kept


def _resolve_input_paths(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the values of a run file in `directory`, with the paths of inputs that exist there made absolute.

    Other relative paths stay: those that exist only in the current directory, names of the Hub, and outputs. If a path
    exists in both, a notice names the one that is used. The copy of a run file in a run's directory is not changed,
    since its paths were resolved when the run started.
    """
    result = dict(values)
    if directory == Path.cwd() or (directory / CREATED_NAMES).exists():
        return result
    for keys in _MODEL_KEYS:
        result = _replace(result, keys, lambda path, keys=keys: _resolve(path, ".".join(keys), directory))
    if isinstance(data := result.get("data"), Mapping):
        result["data"] = _resolve_data(data, "data", directory)
    return result


def _replace(values: Any, keys: tuple[str, ...], change: Any) -> Any:
    if not isinstance(values, Mapping) or keys[0] not in values:
        return values
    value, rest = values[keys[0]], keys[1:]
    return {**values, keys[0]: _replace(value, rest, change) if rest else change(value)}


def _resolve_data(value: Any, where: str, directory: Path) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _resolve(each, f"{where}.{key}", directory)
            if key in _DATA_KEYS
            else _resolve_data(each, f"{where}.{key}", directory)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_resolve_data(each, f"{where}.{number}", directory) for number, each in enumerate(value)]
    return value


def _resolve(value: Any, where: str, directory: Path) -> Any:
    if isinstance(value, list):
        return [_resolve(each, where, directory) for each in value]
    if not isinstance(value, str) or value in ("", STDLIB) or value.startswith("~") or os.path.isabs(value):
        return value
    if "://" in value or "\n" in value:
        # A URL, or the text of a template.
        return value
    own = directory / value
    if not any(_find(own)):
        return value
    if any(_find(Path(value))) and os.environ.get("LOCAL_RANK", "0") == "0":
        echo(
            f"note: {where}={value!r} is {own}, beside the run file. {Path(value).absolute()} exists too; write the "
            "full path to use it.\n",
            stderr=True,
        )
    return str(own)


def _find(path: Path) -> Iterator[str]:
    text = str(path)
    if os.path.exists(text):
        yield text
    else:
        yield from glob.iglob(text, recursive=True)
