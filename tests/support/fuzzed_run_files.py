"""Run files of all kinds, good and bad, each made from a seed and its number.

What may stand where comes from the schema of the run file, so options that are added are tried on their own.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.files.parsing import to_yaml
from meshwright.strategy.registry import get_registry
from meshwright_run.run_schema import run_schema

KeySchema = tuple[tuple[str, ...], dict[str, Any]]  # A key, with those above it, and the schema of what it holds

NUMBERS: list[Any] = [0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, 10**30, 0.5, 1.5, 2.0, -0.0, 1e15, 1e300, 1e-320]
WORDS: list[Any] = ["", " ", "0", "3", "1.5", "true", "none", "auto", "never", "x", "a.b", "a" * 5000, "{}", "%s", "-x"]
PATHS: list[Any] = ["/dev/null/x", "/proc/x", "~nobody_here/x", "a/" * 3000, "..", "*", "[", "**/*.txt", "$HOME"]
UNUSUAL_TEXTS = (
    "é😀",
    "\u202eabc",
    "e\u0301" * 3,
    "\u0661",
    "\u00b2",
    "\ud800",
    "a\0b",
    "\ufeffx",
    "\u2028",
    "\x1b[2J",
)
NESTED: list[Any] = [[], {}, [1, 2, 3], ["a"], {"a": 1}, {"": None}, {1: 2}, [[[[[]]]]], {"x": {"y": [1, {"w": 2}]}}]
UNUSUAL_VALUES = [
    *NUMBERS,
    float("inf"),
    float("nan"),
    True,
    False,
    None,
    *WORDS,
    *PATHS,
    *UNUSUAL_TEXTS,
    *NESTED,
    [None] * 9,
]
"""Values that are of the wrong type almost everywhere, or at the end of some range."""

SPELLINGS = (
    *("1e400", "-1e400", ".inf", "-.INF", ".NaN", "0x1F", "0o17", "010", "1_000", "+1", "1:30", "1.", ".5"),
    *("2001-01-01", "yes", "on", "~", "!!int '3'", "!!python/name:os.system", "!!set {a}", "*nowhere", "&a [*a]"),
    *("&a 3", "*", "&", "|", ">-", "? x", "- 1", "'", '"', "{", "[1,", "%x", "@x", "`x`", "a: b: c", "#", ""),
    *('"\\uD800"', '"\\0"', '"\\x"', "{<<: {a: 1}, <<: [{b: 2}]}", "{<<: 3}", "{<<: *a}", "{a: 1, a: 2}"),
    *("[" * 60 + "]" * 60, "{a: " * 3000, "[" * 20_000),
)  # What a file may hold instead of a value, as it is written

BREAKS = "[{}\t\0:-'\ufffe\u2028\ufeff\n\\\x85&*!|>%@`#"
"""Characters that may be put between two of a file."""


@dataclass(frozen=True)
class FuzzedRunFile:
    """The bytes of a run file, and what is set on the command line besides."""

    content: bytes
    assignments: tuple[str, ...] = ()


class RunFileFuzzer:
    """Changes values of a good run file, also at `more` places; those of one seed and number are the same."""

    def __init__(self, good: Mapping[str, Any], seed: int, more: Mapping[tuple[str, ...], Any] | None = None):
        self._good, self._seed, self._schema = good, seed, run_schema()
        self._places = [*iter_keys(self._schema, self._schema), *(more or {}).items()]
        self._strategies = {
            name: (spec, [*iter_keys(self._schema, self._schema["$defs"][spec.name])])
            for spec in get_registry().strategies.values()
            for name in (spec.name, *spec.aliases)
        }

    def __getitem__(self, number: int) -> FuzzedRunFile:
        """The run file of a number."""
        chance = random.Random(f"{self._seed}/{number}")
        values = copy.deepcopy(dict(self._good))
        if chance.random() < 0.5:
            self._choose_strategy(values, chance)
        changes = chance.choice((0, 1, 1, 1, 2, 3))
        assignments = []
        for _ in range(changes):
            path, schema = chance.choice(self._places)
            if chance.random() < 0.1:
                assignments.append(f"{'.'.join(path)}={_write_yaml(self._draw_value(schema, chance), chance)}")
            else:
                self._mutate(values, path, schema, chance)
        text = _write_yaml(values, chance)
        if chance.random() < 0.1:
            text = _corrupt(text, chance)
        encoding = chance.choices(("utf-8", "utf-8-sig", "utf-16", "latin-1"), (50, 2, 1, 1))[0]
        return FuzzedRunFile(text.encode(encoding, "replace"), tuple(assignments))

    def _choose_strategy(self, values: dict[str, Any], chance: random.Random) -> None:
        """Another strategy, with some of its options, mostly such as its schema allows; and sizes of the mesh."""
        name = chance.choice([*self._strategies])
        spec, places = self._strategies[name]
        values["strategy"], values["strategy_config"] = name, {}
        for path, schema in chance.choices(places, k=min(len(places), chance.choice((0, 1, 1, 2, 3)))):
            fits = chance.random() < 0.7
            set_at(
                values["strategy_config"],
                path,
                self._draw_valid_value(schema, chance) if fits else self._draw_value(schema, chance),
            )
        if spec.is_wrapper or chance.random() < 0.3:
            values["pp_size"] = chance.choice((1, 2, 2, 4))
            if chance.random() < 0.7:
                wrapping = [each for each, (other, _) in self._strategies.items() if other.is_wrapper]
                _, places = self._strategies[chance.choice(wrapping)]
                path, schema = chance.choice(places)
                set_at(
                    values, ("wrapper_config", chance.choice(wrapping), *path), self._draw_valid_value(schema, chance)
                )
        if chance.random() < 0.3:
            size = chance.choice(("dp_size", "dp_replicate_size", "tp_size", "cp_size", "ep_size"))
            values[size] = chance.choice((1, 2, 2, 3, 4, None))

    def _mutate(self, values: dict[str, Any], path: tuple[str, ...], schema: Any, chance: random.Random) -> None:
        holder, last = _find_parent(values, path), path[-1]
        how = chance.randrange(12)
        if how == 0:
            holder.pop(last, None)
        elif how == 1:
            holder[last[::-1]] = self._draw_value(schema, chance)
        else:
            there = holder.get(last)
            holder[last] = str(there) if how == 2 else [there] if how == 3 else self._draw_value(schema, chance)

    def _draw_value(self, schema: dict[str, Any], chance: random.Random) -> Any:
        return (
            copy.deepcopy(chance.choice(UNUSUAL_VALUES))
            if chance.random() < 0.6
            else self._draw_valid_value(schema, chance)
        )

    def _draw_valid_value(self, schema: dict[str, Any], chance: random.Random) -> Any:
        """What a schema allows, or what lies just beyond its ends."""
        schema = _resolve_reference(self._schema, schema)
        if "anyOf" in schema:
            return self._draw_valid_value(chance.choice(schema["anyOf"]), chance)
        if "enum" in schema or "const" in schema or "examples" in schema:
            return chance.choice(schema.get("enum") or schema.get("examples") or [schema["const"]])
        kind = schema.get("type")
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 100))
        match chance.choice(kind) if isinstance(kind, list) else kind:
            case "boolean":
                return chance.random() < 0.5
            case "integer":
                inside = chance.randint(int(low), int(high))
                return chance.choice((low, low + 1, low + 2, inside, low - 1, high, high + 1))
            case "number":
                return chance.choice((low, chance.uniform(low, min(high, 1e6)), low + 1, high, low - 1e-9))
            case "array":
                return [self._draw_valid_value(schema.get("items", {}), chance) for _ in range(chance.randrange(3))]
            case "object":
                known = schema.get("properties", {})
                return {key: self._draw_valid_value(known[key], chance) for key in known if chance.random() < 0.5}
            case "null":
                return None
        return chance.choice(("x", "lm_head", "colwise", "torch.float32", "meshwright.plans.mine", "a.b", "*.bias"))


def iter_keys(root: dict[str, Any], schema: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[KeySchema]:
    """Every key that a schema knows, at any depth."""
    for each in (schema, *schema.get("anyOf", [])):
        for key, below in _resolve_reference(root, each).get("properties", {}).items():
            yield (*above, key), below
            yield from iter_keys(root, below, (*above, key))


def _resolve_reference(root: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        found: Any = root
        for key in schema["$ref"].split("/")[1:]:
            found = found[key]
        schema = found
    return schema


def set_at(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    _find_parent(values, path)[path[-1]] = value


def _find_parent(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return the mapping that holds the last key of a path, made where it is missing."""
    for key in path[:-1]:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    return values


def _write_yaml(value: Any, chance: random.Random) -> str:
    """YAML of a value, in which something may be spelt in another way."""
    text = to_yaml(value)
    if chance.random() < 0.15:
        lines = text.splitlines()
        place = chance.randrange(len(lines))
        lines[place] = "".join((*lines[place].partition(": ")[:2], chance.choice(SPELLINGS)))
        text = "\n".join(lines)
    return text


def _corrupt(text: str, chance: random.Random) -> str:
    """A file that has something too much, too little or twice."""
    place = chance.randrange(len(text) + 1)
    match chance.randrange(4):
        case 0:
            return text[:place]
        case 1:
            return text + text[place:]
        case _:
            return text[:place] + chance.choice(BREAKS) + text[place:]
