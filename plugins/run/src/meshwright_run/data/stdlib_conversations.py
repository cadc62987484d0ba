"""Conversations about the running Python's standard library: questions about names, answered by their docstrings."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .config import Format

_TOPICS = "pydoc_data.topics"
"""Module that holds topics of the language reference."""
_PUBLIC_NAMES = {"posixpath": "os.path"}
_MIN_CHARACTERS, _TARGET_CHARACTERS, _MAX_CHARACTERS = 12, 80, 600
"""Length of answers: shorter ones are dropped; paragraphs are added up to `_TARGET_CHARACTERS`, but never beyond
`_MAX_CHARACTERS`."""

_QUESTIONS: dict[str, tuple[str, ...]] = {
    "function": (
        "What does {name} do?",
        "What does {name}{signature} do?",
        "In Python, what is {name} for?",
        "Explain {name}{signature}.",
        "Tell me what {name} does.",
    ),
    "class": (
        "What is {name}?",
        "What is the class {name} for?",
        "In Python, what is {name} for?",
        "Explain the class {name}.",
    ),
    "module": ("What is the module {name} for?", "What does the module {name} offer?", "Explain the module {name}."),
    "topic": ("Explain this topic of the Python language: {name}.", "What does Python's reference say about {name}?"),
}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class _DocstringEntry:
    name: str
    kind: Literal["function", "class", "module", "topic"]
    line: int
    text: str
    signature: str = ""


def iter_stdlib_records(source: str, path: Path, source_format: Format) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield questions with answers about the names of a standard-library module, and the location of each."""
    relative = path.relative_to(sysconfig.get_paths()["stdlib"])
    for entry in _iter_entries(source, _module_name(relative)):
        answer = _extract_answer(entry.text)
        if answer:
            question, where = _build_question(entry), f"{relative}:{entry.line}"
            if source_format == "prompt_completion":
                yield {"prompt": f"{question}\n", "completion": answer}, where
            else:
                turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                yield {"messages": turns}, where


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return _PUBLIC_NAMES.get(name, name)


def _iter_entries(source: str, module: str) -> Iterator[_DocstringEntry]:
    """Yield the docstrings of a module in order, without those of private modules, classes and functions."""
    if any(part.startswith("_") for part in module.split(".")):
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # a few files of the library do not parse, on purpose
    if module == _TOPICS:
        yield from _iter_topics(tree)
        return
    if text := ast.get_docstring(tree):
        yield _DocstringEntry(module, "module", 1, text)
    yield from _iter_definitions(tree.body, module)


def _iter_definitions(body: list[ast.stmt], prefix: str, is_method: bool = False) -> Iterator[_DocstringEntry]:
    seen = set()
    for node in body:
        # A second definition of a name is usually for another platform.
        if not isinstance(node, Definition) or node.name.startswith("_") or node.name in seen:
            continue
        seen.add(node.name)
        name = f"{prefix}.{node.name}"
        text = ast.get_docstring(node)
        if isinstance(node, ast.ClassDef):
            if text:
                yield _DocstringEntry(name, "class", node.lineno, text)
            yield from _iter_definitions(node.body, name, is_method=True)
        elif text:
            signature = f"({ast.unparse(node.args)})"
            if is_method:
                signature = re.sub(r"\A\((self|cls)(, (/, )?)?", "(", signature)
            yield _DocstringEntry(name, "function", node.lineno, text, signature)


def _iter_topics(tree: ast.Module) -> Iterator[_DocstringEntry]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    # A text begins with its underlined title.
                    text = re.sub(r"\A.*\n([*=-])\1+\n", "", value.value.lstrip())
                    yield _DocstringEntry(str(key.value), "topic", key.lineno, text)


def _build_question(entry: _DocstringEntry) -> str:
    wordings = _QUESTIONS[entry.kind]
    chosen = int.from_bytes(hashlib.blake2b(entry.name.encode(), digest_size=8).digest()) % len(wordings)
    return wordings[chosen].format(name=entry.name, signature=entry.signature)


def _extract_answer(text: str) -> str:
    """Return the first paragraph of a docstring, and further ones if it is short, without examples."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if re.search(r"\n([=*~-])\1+$", paragraph) or paragraph.startswith(("New in ", "Changed in ")):
            continue  # a title, or a version note
        line = re.sub(r"\s+", " ", paragraph).strip()
        is_prose = not paragraph.startswith((" ", ">>>", "-", "=", "*")) and "\n>>>" not in paragraph
        if not is_prose or len(line) + sum(map(len, kept)) > _MAX_CHARACTERS:
            break
        kept.append(line)
        if sum(map(len, kept)) >= _TARGET_CHARACTERS:
            break
    answer = "\n\n".join(kept)
    return answer if len(answer) >= _MIN_CHARACTERS else ""
