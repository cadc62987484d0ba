"""The reference of all public names, from the lists of them that the packages hold.

Pages hold directives of mkdocstrings, which reads signatures and docstrings without importing anything. The list of all
names, docs/reference/api/README.md, is for a plain viewer too: there a name leads to its source, in the site to its
page.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe
from links import DOCS, ROOT

from meshwright.base.lazy import read_stub_names

INDEX = DOCS / "reference" / "api" / "README.md"
PAGES = {
    "training": ("Training", ("training", "meshwright_run", "checkpoint", "objectives", "step", "launch")),
    "mesh": ("World and mesh", ("mesh",)),
    "observers": ("Arguments of observer hooks", ("events",)),
    "errors": ("Errors", ("base.errors",)),
    "strategies": ("Strategies", ()),
    "plugin": ("For authors of plugins", ()),
}
"""Pages of core's names: the title, and the packages or modules whose names are on it; `strategies` has the rest."""
MOST_USED = ("from_pretrained", "from_config", "fit", "Loop", "train", "load_run", "RunConfig", "open_world", "resolve")
"""Names with which scripts begin: the first of their page and of the index."""
CLASSES_WITH_METHODS = ("StrategyManager", "Mesh", "World", "Checkpointer")
"""Classes that users call: the index lists their methods, too."""
_NOTE_REFERENCE = re.compile(r"[;,:.]? [Ss]ee (?:\[Note: [^\]]+\](?: in `[\w.]+`)?|docs/[\w/-]+\.md)")
INDEX_HEADER = """# Python API

Each public name, with what it is. Shapes, dtypes, units and errors are where the name leads. Tasks are in
[Train from Python](../../guides/python-api.md), the keys of `RunConfig` in [Run file](../run-file.md).
"""


@dataclass(frozen=True)
class PublicName:
    """A public name.

    Attributes:
        package: whence a user imports it.
        page: without the suffix, within docs/reference.
        source: the file that defines it, absolute.
        summary: the first sentence of its docstring.
        is_documented: whether its source says what it is; else its class is made when it is asked for.
    """

    package: str
    name: str
    page: str
    source: Path
    summary: str
    is_documented: bool = True

    @property
    def path(self) -> str:
        return f"{self.package}.{self.name}"


def public_packages() -> list[str]:
    """Packages whose names are public, core first."""
    plugins = sorted(path.parent.name for path in ROOT.glob("plugins/*/src/*/__init__.py"))
    return ["meshwright", "meshwright.plugin", "meshwright.testing", *plugins]


def find_exported_names(package: str) -> list[str]:
    """The names that a package exports, in its order: `__all__`, and of core what it imports on first use."""
    if package.partition(".")[0] == "meshwright":
        return [*_find_modules(package)]
    assigned = load_packages()[package].members.get("__all__")
    return [] if assigned is None else list(ast.literal_eval(str(assigned.value)))  # type: ignore[union-attr]


def _find_modules(package: str) -> dict[str, str]:
    """The module that defines each name that a package imports on first use, relative to core."""
    file = importlib.import_module(package).__file__
    names = {name: module.lstrip(".") for name, (module, _) in read_stub_names(str(file)).items()}
    return {name: module for name, module in names.items() if not name.startswith("_")}


@cache
def load_packages() -> griffe.ModulesCollection:
    """Every package, read and not imported."""
    loader = griffe.GriffeLoader(
        search_paths=[ROOT / "core", *ROOT.glob("plugins/*/src")], docstring_parser=griffe.Parser.google
    )
    for package in public_packages():
        loader.load(package.partition(".")[0])
    loader.resolve_aliases(implicit=True, external=False)
    return loader.modules_collection


@cache
def find_public_names() -> tuple[PublicName, ...]:
    """Every public name.

    Raises:
        KeyError: a package exports a name that its source does not define.
    """
    return tuple(
        _build_public_name(package, each) for package in public_packages() for each in find_exported_names(package)
    )


def _build_public_name(package: str, name: str) -> PublicName:
    module = load_packages()[package]
    if name not in module.members:
        return PublicName(
            package,
            name,
            _find_page(package, name),
            Path(str(module.filepath)),
            _describe_generated_classes(package)[name],
            is_documented=False,
        )
    target = _resolve_alias(module.members[name])
    return PublicName(
        package, name, _find_page(package, name), Path(str(target.filepath)), _summarize(target.docstring)
    )


def _resolve_alias(found: griffe.Object | griffe.Alias) -> griffe.Object:
    return found.final_target if isinstance(found, griffe.Alias) else found


def _describe_generated_classes(package: str) -> Mapping[str, str]:
    """Classes over others' that a package makes when they are asked for: what each is."""
    table = ast.literal_eval(str(load_packages()[package].members["_TRAINER_CLASSES"].value))  # type: ignore[union-attr]
    return {name: f"`{base}` of {library} on a mesh; see `{package}`." for name, (library, base) in table.items()}


def _find_page(package: str, name: str) -> str:
    if package != "meshwright":
        return package.removeprefix("meshwright").strip("._").replace("_", "-")
    module = _find_modules(package)[name]
    for page, (_, owned) in PAGES.items():
        if module in owned or module.partition(".")[0] in owned:
            return page
    return "strategies"


def render_pages() -> dict[str, str]:
    """Texts of the pages that mkdocstrings fills, by their place in docs/."""
    by_page: dict[str, list[PublicName]] = defaultdict(list)
    for name in find_public_names():
        by_page[name.page].append(name)
    order = sorted(by_page, key=lambda page: [*PAGES, page].index(page))
    return {f"reference/api/{page}.md": "\n".join(_render_page_lines(page, by_page[page])) for page in order}


def _render_page_lines(page: str, page_names: list[PublicName]) -> Iterator[str]:
    if page in PAGES:
        yield f"# {PAGES[page][0]}\n"
    else:
        package = page_names[0].package
        docstring = load_packages()[package].docstring
        yield f"# {package}\n\n{docstring.value if docstring else ''}\n"
    for name in sorted(page_names, key=_rank):
        yield f"::: {name.path}\n" if name.is_documented else f"## {name.name} {{ #{name.path} }}\n\n{name.summary}\n"
        if name.name == "RunConfig":
            yield "Its fields are the keys of the [run file](../run-file.md).\n"


def _rank(name: PublicName) -> int:
    return MOST_USED.index(name.name) if name.name in MOST_USED else len(MOST_USED)


def render_index() -> str:
    """docs/reference/api/README.md: the list of all names, each leading to its source."""
    lines = [INDEX_HEADER, "## Most used\n", "| name | what it is |", "|---|---|"]
    used = [each for each in find_public_names() if each.package == "meshwright" and each.name in MOST_USED]
    lines += [*map(_render_index_row, sorted(used, key=_rank)), ""]
    for package in filter(find_exported_names, public_packages()):
        lines += [f"## {package}\n", "| name | what it is |", "|---|---|"]
        for name in sorted(
            (each for each in find_public_names() if each.package == package), key=lambda each: each.name.lower()
        ):
            lines.append(_render_index_row(name))
        lines.append("")
        if package == "meshwright":
            for class_name in CLASSES_WITH_METHODS:
                lines += [f"### Methods of {class_name}\n", "| name | what it is |", "|---|---|"]
                lines += [f"| `{method}` | {_escape_cell(summary)} |" for method, summary in _find_methods(class_name)]
                lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _render_index_row(name: PublicName) -> str:
    target = "../../../" + name.source.relative_to(ROOT).as_posix()
    return f"| [`{name.name}`]({target}) | {_escape_cell(name.summary)} |"


def _find_methods(name: str) -> list[tuple[str, str]]:
    """Return the public methods and properties of a class of core, in its order, with their first paragraphs."""
    target = _resolve_alias(load_packages()["meshwright"].members[name])
    return [
        (member, _summarize(value.docstring))
        for member, value in target.members.items()
        if not member.startswith("_") and (value.is_function or "property" in value.labels) and value.docstring
    ]


def _summarize(docstring: griffe.Docstring | None) -> str:
    """Return the first paragraph of a docstring as one line, without references to notes."""
    text = " ".join((docstring.value if docstring else "").strip().partition("\n\n")[0].split())
    return re.sub(r"\[(Note: [^\]]+)\]", r"\1", _NOTE_REFERENCE.sub("", text))


def _escape_cell(text: str) -> str:
    return text.replace("|", "&#124;")


def render_site_index() -> str:
    """The same, each name leading to its place in the reference."""
    text = render_index()
    for name in find_public_names():
        target = "../../../" + name.source.relative_to(ROOT).as_posix()
        text = text.replace(f"[`{name.name}`]({target})", f"[`{name.name}`]({name.page}.md#{name.path})")
    return text
