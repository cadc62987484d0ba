"""Links that leave docs/: what they lead to becomes a page of the site, and the link leads to that page.

A plain viewer of Markdown follows `../plugins/ddp/README.md` in the repository; the site holds docs/ alone. So what
a page links to is mirrored under `repository/`: Markdown as it is, a source as one block of code, a folder as its
README or a list of what is in it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MIRROR_DIR = "repository"
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<rest>(?:#[^)\s]*)?\))")
FENCE = re.compile(r"(^ *(`{3,})[^\n]*\n.*?^ *\2 *$)", flags=re.MULTILINE | re.DOTALL)
HIDDEN_FROM_SEARCH = "---\nsearch:\n  exclude: true\n---\n\n"
LANGUAGES = {".py": "python", ".json": "json", ".yaml": "yaml", ".toml": "toml", ".sh": "bash", ".jinja": "jinja"}


def find_page(path: Path) -> str:
    """Where a file or folder of the repository is in the site.

    Args:
        path: absolute, of something that exists.
    """
    if path.is_relative_to(DOCS) and not path.is_dir():
        return path.relative_to(DOCS).as_posix()
    within = path.relative_to(DOCS) if path.is_relative_to(DOCS) else MIRROR_DIR / path.relative_to(ROOT)
    if path.is_dir():
        return str(within / "README.md")
    kept = path.suffix in (".md", ".png", ".svg")
    return within.as_posix() if kept else f"{within.as_posix()}.md"


def find_source(page: str) -> Path | None:
    """The file or folder of the repository that a page of the site shows; None for one made from nothing."""
    within = PurePosixPath(page)
    path = ROOT / within.relative_to(MIRROR_DIR) if within.is_relative_to(MIRROR_DIR) else DOCS / within
    for candidate in (path, path.with_suffix(""), path.parent if path.name == "README.md" else path):
        if candidate.exists():
            return candidate
    return None


def rewrite_links(markdown: str, source: Path) -> tuple[str, set[Path]]:
    """Lead the links of a text to the pages of the site.

    Args:
        markdown: as a plain viewer shows it.
        source: the absolute path of the file that it is in.

    Returns:
        The text, and what its links lead to, absolute. Links to the web, and code, are as they were.

    Raises:
        FileNotFoundError: a link leads out of docs/ to something that does not exist.
    """
    found: set[Path] = set()
    here = PurePosixPath(find_page(source)).parent

    def lead(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"\w+:", target):
            return match[0]
        path = (source.parent / target).resolve()
        if not path.is_relative_to(ROOT) or (not path.exists() and not path.is_relative_to(DOCS)):
            raise FileNotFoundError(f"{source.relative_to(ROOT)} links to {target!r}, which does not exist.")
        if path.exists():
            found.add(path)
            target = os.path.relpath(find_page(path), here)
        return f"{match['before']}{target}{match['rest']}"

    parts = FENCE.split(markdown)
    # Of each fence there are two parts, it and its mark: text, fence, mark, text ...
    texts = [LINK.sub(lead, part) if index % 3 == 0 else part for index, part in enumerate(parts) if index % 3 != 2]
    return "".join(texts), found


def render_page(path: Path) -> str:
    """What a page shows of a file or folder outside docs/, or of a folder of docs/; links are as they are there."""
    if path.is_dir():
        readme = path / "README.md"
        return readme.read_text(encoding="utf-8") if readme.is_file() else _render_listing(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    name = path.relative_to(ROOT).as_posix()
    return f"{HIDDEN_FROM_SEARCH}# `{name}`\n\n~~~~{LANGUAGES.get(path.suffix, 'text')}\n{text}\n~~~~\n"


def _render_listing(directory: Path) -> str:
    """Pages of a folder by their headings; of a folder of sources, the names."""
    lines = [f"# `{directory.relative_to(ROOT).as_posix()}`\n"]
    for path in sorted(directory.iterdir()):
        if path.name.startswith((".", "__")):
            continue
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ") if path.suffix == ".md" else None
        lines.append(f"- [{title}]({path.name})" if title else f"- `{path.name}`")
    return "\n".join(lines) + "\n"
