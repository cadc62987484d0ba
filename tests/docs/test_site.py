"""The site: no public name is left out of its reference, no error without its section, no link that leads nowhere."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import links
import pytest
import reference
import site_pages

import meshwright
import meshwright.plugin
import meshwright.testing
from meshwright.base import errors
from meshwright.base.errors import MeshwrightError, said
from meshwright.base.lazy import lazy_names
from meshwright_run import run_file
from meshwright_run.run_file import RunConfig

ROOT = Path(__file__).parents[2]
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
CLASSES = [
    each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.MeshwrightError)
]


# -- the reference


def test_the_reference_has_every_name_that_is_exported() -> None:
    found = {(name.package, name.name) for name in reference.names()}
    stubs = (meshwright, meshwright.plugin, meshwright.testing)
    exported = {
        (each.__name__, name) for each in stubs for name in lazy_names(str(each.__file__)) if not name.startswith("_")
    }
    for package in reference.packages()[3:]:
        # Fabric takes seconds to import; its list, and that of a plugin that is not installed, is as its source has it.
        is_imported = package != "meshwright_fabric" and importlib.util.find_spec(package)
        module = importlib.import_module(package) if is_imported else None
        listed = getattr(module, "__all__", None) or reference.exported(package)
        exported |= {(package, name) for name in listed}
    assert found == exported
    directives = re.findall(r"^(?:::: |## \S+ \{ #)(\S+)", "\n".join(reference.pages().values()), flags=re.MULTILINE)
    assert sorted(directives) == sorted(f"{package}.{name}" for package, name in exported)


def test_every_public_name_says_what_it_is() -> None:
    assert [name.path for name in reference.names() if len(name.summary.split()) < 3] == []


def test_options_are_described_as_pydantic_has_it() -> None:
    from described_fields import default, description

    constants = {"BETA": "'of the reward'", "REST": "'the rest'"}
    assert description("Field(default=1, ge=1, description='a ' 'b')", constants) == "a b"
    assert description("Field(default=0.1, description=BETA)", constants) == "of the reward"
    assert description("Field(default=None, description=f'Rate; {REST}')", constants) == "Rate; the rest"
    assert description("Field(default=1, ge=1)", constants) is None
    assert description("field(default=1)", constants) is None
    assert [default(f"Field({each})") for each in ("default=1, ge=1", "ge=1", "default_factory=dict")] == [
        "1",
        None,
        None,
    ]


def test_options_have_their_defaults_in_the_reference() -> None:
    from described_fields import default

    (source,) = (
        node
        for node in ast.walk(ast.parse(Path(str(inspect.getsourcefile(RunConfig))).read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name == run_file.BaseRunConfig.__name__
    )
    shown = {
        node.target.id: default(ast.unparse(node.value))
        for node in source.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call)
        if ast.unparse(node.value.func) == "Field"
    }
    assert len(shown) > 20
    for name, text in shown.items():
        field = RunConfig.model_fields[name]
        has_none = field.is_required() or field.default_factory is not None
        assert (text is None) if has_none else (eval(str(text), vars(run_file)) == field.default), name


# -- errors


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_class_of_errors_leads_to_its_section(cls: type[MeshwrightError]) -> None:
    last = said(cls("no such thing")).splitlines()[-1]
    assert (path := re.fullmatch(r"see (\S+)#(\w+)", last)) is not None
    assert (ROOT / path[1]) == TROUBLESHOOTING
    headings = re.findall(r"^## (\w+)$", TROUBLESHOOTING.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cls.__name__ in headings
    assert path[2] == cls.__name__.lower()


def test_an_error_of_a_class_of_one_room_leads_to_the_class_that_it_derives_from() -> None:
    class OwnError(errors.ModelError):
        """Of one room."""

    assert said(OwnError("x")).endswith("#modelerror")


@cache
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


def quoted_messages() -> Iterator[str]:
    for line in TROUBLESHOOTING.read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            yield re.findall(r"`([^`]+)`", line.split(" | ")[0])[0]


def test_messages_of_the_page_are_those_of_the_sources() -> None:
    missing = []
    for message in quoted_messages():
        fragments = [each.strip(" ,.:;()") for each in message.split("...")]
        fragments = [each for each in fragments if len(each) > 3]
        if not any(fragments and all(each in text for each in fragments) for text in texts_of_sources()):
            missing.append(message)
    assert missing == []


# -- links


def test_links_that_leave_the_docs_lead_to_pages_of_the_site() -> None:
    text = (
        "[a](../README.md#checkpoints) [b](data.md) [c](https://x.y/z) [d](../examples/loop.py) [e](../plugins/ddp)\n"
        "```md\n[f](../LICENSE)\n```\n[g](#here)"
    )
    made, found = links.mirrored(text, ROOT / "docs" / "plan.md")
    assert made == (
        "[a](repository/README.md#checkpoints) [b](data.md) [c](https://x.y/z) [d](repository/examples/loop.py.md) "
        "[e](repository/plugins/ddp/README.md)\n```md\n[f](../LICENSE)\n```\n[g](#here)"
    )
    assert {path.relative_to(ROOT).as_posix() for path in found} == {
        *("README.md", "docs/data.md", "examples/loop.py", "plugins/ddp")
    }
    back, _ = links.mirrored("[a](../../docs/plan.md)", ROOT / "plugins" / "ddp" / "README.md")
    assert back == "[a](../../../plan.md)"


def test_a_link_out_of_the_docs_that_leads_nowhere_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.py"):
        links.mirrored("[a](../nothing.py)", ROOT / "docs" / "plan.md")


def test_pages_that_are_not_there_are_left_out_of_the_list_and_folders_stand_for_theirs() -> None:
    given = ["a.md", {"B": ["b.md", {"C": "c.md"}]}, {"D": "d"}]
    assert site_pages.filled(given, ["a.md", "d/b.md", "d/README.md", "d/e/f.md"]) == [
        "a.md",
        {"D": ["d/README.md", "d/b.md"]},
    ]
    assert site_pages.filled(given, ["a.md", "b.md", "c.md"]) == ["a.md", {"B": ["b.md", {"C": "c.md"}]}]


# -- the whole


class Resources(HTMLParser):
    """What a page loads when it is opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = {"script": "src", "img": "src", "link": "href", "iframe": "src"}.get(tag)
        if name and given.get(name) and given.get("rel") != "canonical":
            self.loaded.append(str(given[name]))
        if given.get("id"):
            self.anchors.add(str(given["id"]))


@pytest.mark.zoo
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: Resources(path.read_text(encoding="utf-8")) for path in (tmp_path / "site").rglob("*.html")}
    assert len(pages) > 60
    for path, page in pages.items():
        assert not [each for each in page.loaded if re.match(r"(https?:)?//", each)], path
    anchors = pages[tmp_path / "site" / "troubleshooting.html"].anchors
    assert {cls.__name__.lower() for cls in CLASSES} <= anchors
    everywhere = set().union(*(page.anchors for page in pages.values()))
    assert {name.path for name in reference.names()} <= everywhere
