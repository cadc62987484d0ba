"""The reference of the run file, docs/reference/run-file.md, from the JSON schema that `meshwright schema` prints."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from links import ROOT

from meshwright.strategy.registry import ENTRY_POINT_GROUP, Registry
from meshwright_run.observers import list_trackers
from meshwright_run.run_schema import run_schema

PAGE = "reference/run-file.md"
EXAMPLES = Path(__file__).with_name("run_file_examples.yaml")
CHOSEN_BY_NAME = ("strategy_config", "wrapper_config", "objective", "trackers")
"""Keys whose options depend on the name of what is chosen."""
HEADER = """# Run file

Every key of a run file, with its type, default and meaning. Write a first file with `meshwright init`; change single
values on the command line with `--set optimizer.lr=1e-4`. Unknown keys are errors.
`meshwright schema > run.schema.json` writes the same as a JSON schema, with which an editor completes and checks keys.

Generated from the config classes by `tools/generated_pages.py`, with the options of all plugins of this project.
"""
TABLE = ["| key | type | default | |", "|---|---|---|---|"]
_REFERENCE = re.compile(r"\bdocs/(?P<page>[a-z/_-]+\.md)")
_BRACES = re.compile(r"\{[^{}]*\}|\[(?:[^\[\]()]|\[[^\[\]()]*\])*\](?!\()")
MAX_CHOICES = 6
"""Names that a type lists; of more, it says that it is a name."""
_WORDS = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "null", "object": "mapping"}


def render() -> str:
    """Return the page."""
    own = {f"meshwright-{path.parent.name.replace('_', '-')}" for path in ROOT.glob("plugins/*/pyproject.toml")}
    installed = entry_points(group=ENTRY_POINT_GROUP)
    # No strategy of other packages, nor one that a test has registered in this process.
    schema = run_schema(Registry(each for each in installed if each.dist is not None and each.dist.name in own))
    examples = yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))
    sections = {key: each for key, each in schema["properties"].items() if _find_models(each, schema)}
    chosen = {key: each for key, each in schema["properties"].items() if key in CHOSEN_BY_NAME or key == "model"}
    lines = [HEADER, "## Top level", "", *_render_example(examples, "_top"), *TABLE]
    for key, value in schema["properties"].items():
        required = key in schema.get("required", ())
        link = f"[`{key}`](#{key})" if key in {**sections, **chosen} else f"`{key}`"
        lines.append(_render_row(link, value, schema, required=required))
    lines += ["", "## model", "", *_render_example(examples, "model")]
    lines += [link_references(_mark_code(chosen["model"]["description"]), PAGE), ""]
    for key, value in sections.items():
        if key not in chosen:
            lines += [f"## {key}", "", *_render_example(examples, key)]
            (model,) = _find_models(value, schema)
            lines += _render_model(key, model, schema, [])
    for key in CHOSEN_BY_NAME:
        lines += [f"## {key}", "", *_render_example(examples, key)]
        lines += [link_references(_mark_code(chosen[key]["description"]), PAGE), ""]
        seen: list[Any] = []
        for name, prefix, each in _find_choices(key, schema):
            lines += [f"### {key}: {name}", "", *_render_model(prefix, each, each, seen)]
    return "\n".join(lines).rstrip() + "\n"


def _find_choices(key: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield the name, the dotted path and the schema of each strategy, objective or tracker."""
    if key == "trackers":
        for name, spec in list_trackers().items():
            yield name, "trackers[]", spec.config_cls.model_json_schema()
    elif key == "objective":
        for name, each in schema["$defs"].items():
            if name.startswith("objective_"):
                yield name.removeprefix("objective_"), key, each
    else:
        wrappers = schema["properties"]["wrapper_config"].get("properties", {})
        for branch in schema["allOf"]:
            name = branch["if"]["properties"]["strategy"]["enum"][0]
            if (name in wrappers) == (key == "wrapper_config"):
                yield name, key if key == "strategy_config" else f"{key}.{name}", schema["$defs"][name]


def _render_example(examples: Mapping[str, str], key: str) -> list[str]:
    if key not in examples:
        raise KeyError(f"{EXAMPLES.relative_to(ROOT)} has no example of {key!r}, a section of the run file. Add one.")
    return ["```yaml", examples[key].rstrip(), "```", ""]


def _render_model(path: str, model: Mapping[str, Any], schema: Mapping[str, Any], seen: list[Any]) -> Iterator[str]:
    """Yield the description and the table of a section, and those of the sections within it that are not in `seen`."""
    if description := model.get("description"):
        yield link_references(_mark_code(" ".join(description.partition("\n\n")[0].split())), PAGE)
        yield ""
    properties = {key: each for key, each in model.get("properties", {}).items() if "const" not in each}
    if not properties:
        yield from ("No options.", "")
        return
    yield from TABLE
    inner = []
    for key, value in properties.items():
        yield _render_row(f"`{path}.{key}`", value, schema, required=key in model.get("required", ()))
        repeated = "[]" if any(each.get("type") == "array" for each in _alternatives(value)) else ""
        named = ".NAME" if any("additionalProperties" in each for each in _alternatives(value)) else ""
        inner += [(f"{path}.{key}{repeated}{named}", each) for each in _find_models(value, schema)]
    yield ""
    for inner_path, each in inner:
        if not inner_path.endswith(".NAME") and (inner_path, each) not in seen:
            seen.append((inner_path, each))
            yield from (f"### {inner_path}", "", *_render_model(inner_path, each, schema, seen))


def _render_row(name: str, value: Mapping[str, Any], schema: Mapping[str, Any], *, required: bool) -> str:
    default = "required" if required else _format_default(value, schema)
    description = " ".join(value.get("description", "").split())
    if not description and (models := _find_models(value, schema)):
        description = " ".join(models[0].get("description", "").partition("\n\n")[0].split())
    cells = (name, format_type(value, schema), default, link_references(_mark_code(description), PAGE))
    return f"| {' | '.join(_escape_cell(each) for each in cells)} |"


def _alternatives(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(value.get("anyOf", [value]))


def _find_models(value: Mapping[str, Any], schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the definitions that a value refers to, alone, in a list or by name, except those of objectives."""
    found: list[Mapping[str, Any]] = []
    for each in _alternatives(value):
        if "$ref" in each:
            name = each["$ref"].rpartition("/")[2]
            if name in schema.get("$defs", {}) and not name.startswith("objective_"):
                found.append(schema["$defs"][name])
        elif isinstance(inner := each.get("items", each.get("additionalProperties")), Mapping):
            found += _find_models(inner, schema)
    return [each for index, each in enumerate(found) if each not in found[:index]]


def format_type(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """Return the type of a JSON schema in words: `int` from 1, `stop` or `skip`, list of `str`, null."""
    return ", ".join(dict.fromkeys(_format_alternative(each, schema) for each in _alternatives(value)))


def _format_alternative(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "$ref" in value:
        return "mapping"
    if len(value.get("enum", ())) > MAX_CHOICES:
        return "name"
    if "enum" in value or "const" in value:
        return ", ".join(f"`{_format_value(each)}`" for each in value.get("enum", [value.get("const")]))
    kind = value.get("type")
    if kind == "array":
        return f"list of {format_type(value.get('items', {}), schema)}"
    if kind == "object" and isinstance(inner := value.get("additionalProperties"), Mapping) and inner:
        return f"mapping of names to {format_type(inner, schema)}"
    word = _WORDS.get(str(kind), "any")
    value = {key: each for key, each in value.items() if key != "exclusiveMinimum" or "minimum" not in value}
    limits = [
        f"{sign} {_format_value(value[key])}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
        # The limits of an integer's width say nothing to a reader.
        if key in value and value[key] not in (2**31, 2**63)
    ]
    return " ".join([f"`{word}`" if word in ("int", "float", "str", "bool") else word, *limits])


def _format_default(value: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "default" not in value:
        return "by a function"
    default = value["default"]
    if isinstance(default, dict) and default and _find_models(value, schema):
        return "see below"
    return f"`{_format_value(default)}`"


def _format_value(value: Any) -> str:
    """Return a value as a run file has it."""
    if isinstance(value, float):
        return f"{value:g}"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000, allow_unicode=True)
    return text.strip().removesuffix("\n...")


def _mark_code(text: str) -> str:
    """Show mappings and lists within a description as code; Markdown gives braces another meaning."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if index % 2 else _BRACES.sub(r"`\g<0>`", part) for index, part in enumerate(parts))


def link_references(text: str, page: str) -> str:
    """Turn each `docs/PAGE.md` of a text into a link, as seen from a page of docs/."""
    here = str(PurePosixPath(page).parent)

    def link(match: re.Match[str]) -> str:
        title = (ROOT / "docs" / match["page"]).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        return f"[{title.partition(':')[0]}]({os.path.relpath(match['page'], here)})"

    return _REFERENCE.sub(link, text)


def _escape_cell(text: str) -> str:
    return text.replace("|", "&#124;").replace("<", "&lt;")
