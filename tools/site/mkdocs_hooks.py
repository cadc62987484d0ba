"""What mkdocs does besides showing docs/: the reference, and pages of what links lead to outside of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import links
import navigation
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from meshwright.base.docs import get_site_url


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.site_url = get_site_url()
    config.nav = navigation.expand_navigation(config.nav, [*navigation.find_docs_pages(), *reference.render_pages()])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, text in reference.render_pages().items():
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


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    source = _find_source(page.file)
    if source == reference.INDEX:
        return reference.render_site_index()
    return links.rewrite_links(markdown, source)[0] if source else markdown


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
