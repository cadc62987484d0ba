"""What mkdocs does besides showing docs/: the reference, and pages of what links lead to outside of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import docstring_links
import links
import navigation
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from meshwright.base.docs import get_site_url

SEARCH_BOOSTS = {
    "guides/out-of-memory": 16.0,
    "guides/": 8.0,
    "get-started/": 8.0,
    "faq": 4.0,
    "tutorials": 4.0,
    "troubleshooting": 4.0,
    "reference/run-file": 1.0,
    "reference/api/": 0.25,
    "reference/proofs/": 0.25,
    "reference/": 2.0,
    "repository/": 0.25,
    "decisions/": 0.125,
    "contribute/": 0.5,
}
"""Weights of pages in the search, by the beginning of their paths; the first that fits counts."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.site_url = get_site_url()
    config.nav = navigation.expand_navigation(config.nav, [*navigation.find_docs_pages(), *_render_reference()])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, text in _render_reference().items():
        files.append(File.generated(config, page, content=text))
    found = {target for file in files.documentation_pages() for target in _find_link_targets(file)}
    while found:
        path = found.pop()
        page = links.find_page(path)
        if files.get_file_from_path(page) is None:
            made = File.generated(config, page, abs_src_path=str(path)) if path.suffix in (".png", ".svg") else None
            made = made or File.generated(config, page, content=links.render_page(path))
            made.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(made)
            found |= _find_link_targets(made)
    return files


def _render_reference() -> dict[str, str]:
    return {**reference.render_pages(), **docstring_links.render_notes()}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    page.meta.setdefault("search", {}).setdefault("boost", _find_search_boost(page.file.src_uri))
    source = _find_source(page.file)
    if source == reference.INDEX:
        return reference.render_site_index()
    return links.rewrite_links(markdown, source)[0] if source else markdown


def _find_search_boost(page: str) -> float:
    """Return the weight of a page in the search: guides come before the reference, records last."""
    return next((boost for prefix, boost in SEARCH_BOOSTS.items() if page.startswith(prefix)), 1.0)


def _find_source(file: File) -> Path | None:
    """The text in whose links pages are meant; a folder's is its README."""
    source = links.find_source(file.src_uri)
    if source is None or source.is_dir():
        return source and source / "README.md"
    return source if source.suffix == ".md" else None


def _find_link_targets(file: File) -> set[Path]:
    source = _find_source(file)
    if source is None or source == reference.INDEX:
        return set()
    return links.rewrite_links(file.content_string, source)[1]
