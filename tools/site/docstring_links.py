"""Links in the docstrings of the reference: to other names, to notes and to pages.

Sources say "see [Note: one timeout]", "see `meshwright.step.handshake.count_tokens`" and "see docs/guides/pretrain.md".
On the site, these become links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath

import griffe
import reference
from links import DOCS

NOTES_PAGE = "notes"
_NOTE = re.compile(r"^[ \t]*\[Note: ([^\]]+)\] (.*?)(?=^[ \t]*\[Note: |\Z)", flags=re.MULTILINE | re.DOTALL)
_NOTE_REFERENCE = re.compile(r"\[Note:\s+([^\]]+)\](?:\s+in\s+`[\w.]+`)?")
_NAME = re.compile(r"(?<!\[)`([A-Za-z_][\w.]*)`")
_PAGE = re.compile(r"\bdocs/([a-z0-9/_-]+)\.md\b")


class DocstringLinks(griffe.Extension):
    """Turn references within docstrings into links."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = add_links(obj.docstring.value)


def add_links(text: str) -> str:
    """Return a docstring with links; examples, which are indented or begin with >>>, are as they were."""
    lines = _NOTE_REFERENCE.sub(_link_note, text).split("\n")
    return "\n".join(line if line.lstrip().startswith((">>>", "```")) else _add_links_to_line(line) for line in lines)


def _link_note(match: re.Match[str]) -> str:
    title = " ".join(match[1].split())
    anchor = _anchor_of_note(title)
    return f"[note: {title}]({NOTES_PAGE}.md#{anchor})" if anchor else f"note: {title}"


def _add_links_to_line(line: str) -> str:
    def link_name(match: re.Match[str]) -> str:
        path = find_public_paths().get(match[1]) or find_public_paths().get(_without_modules(match[1]))
        return f"[`{path.partition('.')[2] if path else match[1]}`][{path}]" if path else match[0]

    line = _NAME.sub(link_name, line)
    return _PAGE.sub(lambda match: f"[{_read_title(match[1])}](../../{match[1]}.md)", line)


def _without_modules(path: str) -> str:
    """Return the last component of a path of modules, such as `meshwright.step.handshake.count_tokens`."""
    package, _, rest = path.partition(".")
    return rest.rpartition(".")[2] if package.startswith("meshwright") else ""


@cache
def find_public_paths() -> dict[str, str]:
    """Return the path of each public name, by the path and by the name if only one package has it."""
    paths = {}
    for each in reference.find_public_names():
        paths.setdefault(each.name, each.path)
        paths[each.path] = each.path
    return paths


@cache
def find_notes() -> dict[str, str]:
    """Return the text of each note in the docstrings of the sources, by its title."""
    found: dict[str, str] = {}
    for package in {name.partition(".")[0] for name in reference.public_packages()}:
        for docstring in _find_docstrings(reference.load_packages()[package]):
            for title, text in _NOTE.findall(docstring.value):
                found.setdefault(" ".join(title.split()), text.strip())
    return found


def _find_docstrings(item: griffe.Object) -> Iterator[griffe.Docstring]:
    if item.docstring is not None:
        yield item.docstring
    for member in item.members.values():
        if not member.is_alias and isinstance(member, griffe.Object):
            yield from _find_docstrings(member)


def _anchor_of_note(title: str) -> str | None:
    return f"note-{re.sub(r'[^a-z0-9]+', '-', title.lower())}" if title in find_notes() else None


def _read_title(page: str) -> str:
    heading = (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    return heading.partition(":")[0]


def render_notes() -> dict[str, str]:
    """Return the page with all notes, by its path in docs/."""
    lines = ["# Notes\n", "Design notes that the docstrings refer to.\n"]
    for title, text in sorted(find_notes().items()):
        lines += [f"## Note: {title} {{ #{_anchor_of_note(title)} }}\n", add_links(text), ""]
    return {str(PurePosixPath("reference/api") / f"{NOTES_PAGE}.md"): "\n".join(lines)}
