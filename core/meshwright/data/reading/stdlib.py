"""Conversations made of the running Python: what is asked is a name of its library, what is answered its docstring.

Nothing is drawn at random: the wording of a question hangs on the name alone. Modules are parsed, not imported.
"""

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

from ..config import Format

_TOPICS = "pydoc_data.topics"
"""The part of the language's reference that comes with every Python: texts by topic."""
_PUBLIC_NAMES = {"posixpath": "os.path"}
_LEAST, _ENOUGH, _MOST = 12, 80, 600
"""Characters of an answer: shorter ones say nothing; with as many it is whole; a further paragraph is not added."""

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
class _Entry:
    name: str
    kind: Literal["function", "class", "module", "topic"]
    line: int
    text: str
    signature: str = ""


def library_records(source: str, path: Path, source_format: Format) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield questions about what a source of Python's library defines, and the answers.

    Args:
        source: its text.
        path: of it, absolute.
        source_format: `messages` or `prompt_completion`.

    Yields:
        The fields of each, and where it comes from ("posixpath.py:71").
    """
    relative = path.relative_to(sysconfig.get_paths()["stdlib"])
    for entry in _entries(source, _module_name(relative)):
        answer = _answer(entry.text)
        if answer:
            yield _fields(_question(entry), answer, source_format), f"{relative}:{entry.line}"


def _fields(question: str, answer: str, source_format: Format) -> dict[str, Any]:
    if source_format == "prompt_completion":
        return {"prompt": f"{question}\n", "completion": answer}
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return _PUBLIC_NAMES.get(name, name)


def _entries(source: str, module: str) -> Iterator[_Entry]:
    """What has a docstring, in the order of its lines; nothing of a private module, class or function."""
    if any(part.startswith("_") for part in module.split(".")):
        return
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # a few sources are there to be refused by the parser
    if module == _TOPICS:
        yield from _topics(tree)
        return
    text = ast.get_docstring(tree)
    if text:
        yield _Entry(module, "module", 1, text)
    yield from _definitions(tree.body, module)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> str:
    written = f"({ast.unparse(node.args)})"
    return re.sub(r"\A\((self|cls)(, (/, )?)?", "(", written) if is_method else written


def _definitions(body: list[ast.stmt], prefix: str, is_method: bool = False) -> Iterator[_Entry]:
    seen = set()
    for node in body:
        # A name that is defined twice is mostly so for several platforms.
        if not isinstance(node, Definition) or node.name.startswith("_") or node.name in seen:
            continue
        seen.add(node.name)
        name = f"{prefix}.{node.name}"
        text = ast.get_docstring(node)
        is_class = isinstance(node, ast.ClassDef)
        if text:
            signature = "" if isinstance(node, ast.ClassDef) else _signature(node, is_method)
            yield _Entry(name, "class" if is_class else "function", node.lineno, text, signature)
        if is_class:
            yield from _definitions(node.body, name, is_method=True)


def _topics(tree: ast.Module) -> Iterator[_Entry]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                    # A text begins with its underlined title.
                    text = re.sub(r"\A.*\n([*=-])\1+\n", "", value.value.lstrip())
                    yield _Entry(str(key.value), "topic", key.lineno, text)


def _question(entry: _Entry) -> str:
    wordings = _QUESTIONS[entry.kind]
    chosen = int.from_bytes(hashlib.blake2b(entry.name.encode(), digest_size=8).digest()) % len(wordings)
    return wordings[chosen].format(name=entry.name, signature=entry.signature)


def _answer(text: str) -> str:
    """The first paragraph of a docstring, and more if it is short; none of its examples."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if re.search(r"\n([=*~-])\1+$", paragraph) or paragraph.startswith(("New in ", "Changed in ")):
            continue  # a title, or a remark on versions
        line = re.sub(r"\s+", " ", paragraph).strip()
        is_prose = not paragraph.startswith((" ", ">>>", "-", "=", "*")) and "\n>>>" not in paragraph
        if not is_prose or len(line) + sum(map(len, kept)) > _MOST:
            break
        kept.append(line)
        if sum(map(len, kept)) >= _ENOUGH:
            break
    answer = "\n\n".join(kept)
    return answer if len(answer) >= _LEAST else ""
