"""The site: no public name is left out of its reference, no error without its section; it builds strictly."""

from __future__ import annotations

import ast
import functools
import http.server
import importlib
import importlib.util
import os
import re
import shutil
import socketserver
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterable
from pathlib import Path

import playwright.sync_api
import pytest
import reference

import meshwright
import meshwright.plugin
import meshwright.testing
from meshwright.base import docs, errors
from meshwright.base.errors import MeshwrightError, format_error
from meshwright.base.lazy import read_stub_names

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
CLASSES = [
    each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.MeshwrightError)
]


# -- the reference


def test_the_reference_has_every_name_that_is_exported() -> None:
    found = {(name.package, name.name) for name in reference.find_public_names()}
    stubs = (meshwright, meshwright.plugin, meshwright.testing)
    exported = {
        (each.__name__, name)
        for each in stubs
        for name in read_stub_names(str(each.__file__))
        if not name.startswith("_")
    }
    for package in reference.public_packages()[3:]:
        # Fabric takes seconds to import; its list, and that of a plugin that is not installed, is as its source has it.
        is_imported = package != "meshwright_fabric" and importlib.util.find_spec(package)
        module = importlib.import_module(package) if is_imported else None
        listed = getattr(module, "__all__", None) or reference.find_exported_names(package)
        exported |= {(package, name) for name in listed}
    assert found == exported
    directives = re.findall(
        r"^(?:::: |## \S+ \{ #)(\S+)", "\n".join(reference.render_pages().values()), flags=re.MULTILINE
    )
    assert sorted(directives) == sorted(f"{package}.{name}" for package, name in exported)


# -- errors


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_class_of_errors_leads_to_its_section(cls: type[MeshwrightError], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(docs.SITE_URL_VARIABLE, "https://docs.example/")
    last = format_error(cls("no such thing")).splitlines()[-1]
    assert (path := re.fullmatch(r"see https://docs.example/(\S+).html#(\w+)", last)) is not None
    assert (ROOT / "docs" / f"{path[1]}.md") == TROUBLESHOOTING
    headings = re.findall(r"^## (\w+)$", TROUBLESHOOTING.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cls.__name__ in headings
    assert path[2] == cls.__name__.lower()
    # One of a class of one room leads to the class that it derives from.
    assert format_error(type("OwnError", (cls,), {})("x")).endswith(f"#{path[2]}")


def test_without_an_address_links_lead_to_the_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(docs.SITE_URL_VARIABLE, raising=False)
    monkeypatch.setattr(docs, "SITE_URL", "")
    monkeypatch.setattr(docs, "_CLONE", tmp_path)
    assert docs.format_docs_link("a/b.md", "c") == "docs/a/b.md#c in a clone of meshwright"
    for file in (tmp_path / "docs" / "a" / "b.md", tmp_path / "build" / "site" / "a" / "b.html"):
        file.parent.mkdir(parents=True)
        file.touch()
        assert docs.format_docs_link("a/b.md", "c") == f"{file.as_uri()}#c"
    monkeypatch.setattr(docs, "SITE_URL", "https://docs.example/v1/")
    assert docs.format_docs_link("a/b.md", "c") == "https://docs.example/v1/a/b.html#c"
    monkeypatch.setenv(docs.SITE_URL_VARIABLE, "https://other\x1b[2J")
    assert "\x1b" not in format_error(MeshwrightError("x"))


def test_links_from_messages_lead_to_pages() -> None:
    found = set()
    for path in [*ROOT.glob("core/meshwright/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        found |= {*re.findall(r"""format_docs_link\(["']([^"']+)""", path.read_text(encoding="utf-8"))}
        found |= {*re.findall(r"\bdocs/([a-z/_-]+\.md)", path.read_text(encoding="utf-8"))}
    assert len(found) > 10
    assert [page for page in sorted(found) if not (ROOT / "docs" / page).is_file()] == []


def texts_of_sources() -> list[str]:
    """The constant parts of each text, joined by `...` where values go."""
    found = []
    for path in [*ROOT.glob("core/meshwright/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("...".join(str(each.value) for each in node.values if isinstance(each, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_of_the_page_are_those_of_the_sources() -> None:
    missing, texts = [], texts_of_sources()
    for message in re.findall(r"^\| `([^`]+)`", TROUBLESHOOTING.read_text(encoding="utf-8"), flags=re.MULTILINE):
        fragments = [each.strip(" ,.:;()") for each in message.split("...")]
        fragments = [each for each in fragments if len(each) > 3]
        if not any(fragments and all(each in text for each in fragments) for text in texts):
            missing.append(message)
    assert missing == []


# -- the whole


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    # Without --quiet, which hides warnings from the strict mode.
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(directory)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.mark.zoo
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    for path, page in pages.items():
        assert not re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="?(?:https?:)?//', page), path
        assert not re.findall(r'<link\b(?![^>]*canonical)[^>]*\bhref="?(?:https?:)?//', page), path
    troubles = pages[site / "troubleshooting.html"]
    assert {cls.__name__.lower() for cls in CLASSES} <= {*re.findall(r'\bid="?(\w+)', troubles)}
    assert {name.path for name in reference.find_public_names()} <= {
        *re.findall(r'\bid="?([\w.]+)', "".join(pages.values()))
    }


SEARCHES = {
    "LoRA": "guides/fine-tune.html",
    "OOM": "guides/out-of-memory.html",
    "out of memory": "guides/out-of-memory.html",
    "gradient accumulation": "guides/pretrain.html",
    "ZeRO": "guides/choose-a-layout.html",
    "HSDP": "guides/choose-a-layout.html",
    "resume": "guides/checkpoints.html",
    "chat": "reference/chat-data.html",
    "eval": "guides/python-api.html",
    "DPO": "reference/objectives.html",
    "install": "get-started/install.html",
}
"""What a reader searches for, and the page that comes first."""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def find_search_results(site: Path, queries: Iterable[str]) -> dict[str, list[str]]:
    """Return the pages that the search of the site lists for each query, in its order, in a browser."""
    handler, found = functools.partial(QuietHandler, directory=str(site)), {}
    with (
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server,
        playwright.sync_api.sync_playwright() as started,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        for query in queries:
            page.goto(f"{address}/index.html?q={urllib.parse.quote(query)}")
            page.wait_for_selector(".md-search-result__link", state="attached", timeout=60_000)
            links = page.eval_on_selector_all(".md-search-result__link", "links => links.map(link => link.pathname)")
            found[query] = list(dict.fromkeys(link.lstrip("/") for link in links))
        browser.close()
        server.shutdown()
    return found


@pytest.mark.zoo
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_a_search_finds_the_page_that_a_reader_needs_first(site: Path) -> None:
    found = find_search_results(site, SEARCHES)
    assert {query: pages[0] for query, pages in found.items()} == SEARCHES
