"""Links from messages to the documentation."""

from __future__ import annotations

import os
from pathlib import Path

SITE_URL = ""
"""Address of the published documentation; empty as long as none is published. The site is built with it, too."""
SITE_URL_VARIABLE = "MESHWRIGHT_DOCS_URL"
"""Environment variable that replaces `SITE_URL`, such as the address of a copy on a local server."""
_CLONE = Path(__file__).resolve().parents[3]


def get_site_url() -> str:
    """Return the address of the documentation without a slash at the end; an empty string if it has none."""
    return (os.environ.get(SITE_URL_VARIABLE) or SITE_URL).rstrip("/")


def format_docs_link(page: str, anchor: str = "") -> str:
    """Return where a user finds a page of the documentation, such as "reference/plan.md".

    It is a page of the site, if that has an address. In a clone, it is the page that `make docs` has built, or else its
    source. Without either, it is the path in the repository.
    """
    fragment = f"#{anchor}" if anchor else ""
    html = page.removesuffix(".md") + ".html"
    if site := get_site_url():
        return f"{site}/{html}{fragment}"
    for file in (_CLONE / "build" / "site" / html, _CLONE / "docs" / page):
        if file.is_file():
            return f"{file.as_uri()}{fragment}"
    return f"docs/{page}{fragment} in a clone of meshwright"
