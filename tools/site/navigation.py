"""The site's list of pages: what mkdocs.yml names, as far as it is there, with folders in place of their pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

import yaml
from links import DOCS, ROOT


def read_navigation() -> list[Any]:
    """The list of mkdocs.yml, of pages that are files of docs/."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    # The rest has tags of Python.
    nav = yaml.safe_load(text[text.index("\nnav:") :])["nav"]
    return list(expand_navigation(nav, find_docs_pages()))


def find_docs_pages() -> list[str]:
    return sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def expand_navigation(nav: Any, pages: Sequence[str]) -> Any:
    """Return the list without what is not there.

    A page that is there and not in the list is no matter of this: mkdocs warns of it, which ends a strict build.

    Args:
        nav: as mkdocs.yml has it: lists, one-entry mappings of title to page or list, and pages. An entry without the
            suffix `.md` is a folder, and stands for its pages in their order, but `README.md` first.
        pages: paths in docs/, with slashes.
    """
    if isinstance(nav, list):
        return [kept for each in nav if (kept := expand_navigation(each, pages))]
    if isinstance(nav, dict):
        return {title: kept for title, each in nav.items() if (kept := expand_navigation(each, pages))}
    if nav.endswith(".md"):
        return nav if nav in pages else None
    inside = [page for page in pages if str(PurePosixPath(page).parent) == nav]
    return sorted(inside, key=lambda page: not page.endswith("/README.md"))
