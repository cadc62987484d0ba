"""The house: its rooms, what stands on what, and how large things are, read from the sources' imports.

    python tests/support/house.py          # draws docs/house.png, and writes the table of rooms into docs/architecture.md

Imports under TYPE_CHECKING and within functions count: who reads a module must know what they lead to.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = (
    ("base",),
    ("events", "files", "_compat"),
    ("mesh",),
    ("tensors",),
    ("model",),
    ("strategy", "optim"),
    ("launch", "step", "objectives", "data", "checkpoint"),
    ("memory",),
    ("parallel", "profile", "train"),
    ("manager",),
    ("single", "testing"),
    ("plan",),
    ("clusters", "guide", "watch"),
    ("replay",),
    ("cli",),
)
"""The rooms of core from the ground up; each stands on those of lower floors alone, or on those left of it."""
SMALL_CORE = ("base", "mesh", "strategy")
PIPELINE = ("schedule", "config", "cut", "run", "state", "start", "manager")
BEGIN, END = "<!-- rooms: begin -->", "<!-- rooms: end -->"
OUTSIDE = "the package itself"


@dataclass(frozen=True)
class Module:
    """One file of a package.

    Attributes:
        name: with the package's.
        imports: names of modules of the same package that it imports.
    """

    name: str
    path: Path
    imports: frozenset[str] = field(default_factory=frozenset)

    @property
    def room(self) -> str:
        package, *parts = self.name.split(".")
        # Core has rooms alone; a plugin has modules beside them.
        is_room = len(parts) > 1 or self.path.name == "__init__.py" or package != "meshwright"
        return parts[0] if parts and is_room else OUTSIDE

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return self.text.count("\n")


def read(package: Path) -> dict[str, Module]:
    """The modules of a package by name, with what they import."""
    paths = {_name(path, package): path for path in sorted(package.rglob("*.py"))}
    return {name: Module(name, path, frozenset(_imports(name, path, paths))) for name, path in paths.items()}


def packages() -> list[Path]:
    found = [ROOT / "core" / "meshwright", *ROOT.glob("plugins/*/src/*")]
    return [path for path in sorted(found) if (path / "__init__.py").is_file()]


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            start = ".".join(above[: len(above) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (start, node.module or "") if part)
            for alias in node.names:
                target = f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
                if target in known and target != name:
                    yield target


def arrows(modules: Mapping[str, Module]) -> dict[tuple[str, str], list[str]]:
    """From room to room: who imports what. The package's own `__init__` names what is public, and leans on nothing."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in modules.values():
        for target in sorted(module.imports):
            pair = module.room, modules[target].room
            if pair[0] != pair[1] and OUTSIDE not in pair:
                found[pair].append(f"{module.name} -> {target}")
    return dict(found)


def upward(modules: Mapping[str, Module], order: tuple[str, ...]) -> list[str]:
    """Imports of a room by one that stands below it, or beside it to the left."""
    place = {room: index for index, room in enumerate(order)}
    return [text for (room, other), texts in arrows(modules).items() if place[other] > place[room] for text in texts]


def circles(modules: Mapping[str, Module]) -> list[list[str]]:
    """Groups of modules that import each other, by way of others perhaps (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        # Importing a module of a package runs the package's `__init__`, which may name it.
        for other in sorted(modules[name].imports):
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for name in modules:
        if name not in index:
            visit(name)
    return found


# -- the page


def first_sentence(module: Module) -> str:
    text = (ast.get_docstring(module.tree) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


def table(modules: Mapping[str, Module]) -> str:
    """The rooms from the ground up, as a table in Markdown."""
    leans = arrows(modules)
    rows = ["| room | what is in it | stands on |", "|---|---|---|"]
    for room in (room for floor in FLOORS for room in floor):
        on = [other for floor in FLOORS for other in floor if (room, other) in leans]
        said = first_sentence(modules[f"meshwright.{room}"])
        rows.append(f"| `{room}` | {said} | {', '.join(on)} |")
    return "\n".join(rows)


def page(text: str, modules: Mapping[str, Module]) -> str:
    """docs/architecture.md with the table as it should be."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table(modules)}\n\n{END}{rest.split(END)[1]}"


def draw(modules: Mapping[str, Module], path: Path) -> None:
    """Rooms as boxes on their floors, and what each stands on; what follows from other arrows is left out."""
    import networkx as nx
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    graph = nx.transitive_reduction(nx.DiGraph(list(arrows(modules))))
    figure = Figure(figsize=(9, 11))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 9)
    axes.set_ylim(-0.2, len(FLOORS))
    place = {
        room: ((index + 0.5) * 9 / len(floor), height + 0.4)
        for height, floor in enumerate(FLOORS)
        for index, room in enumerate(floor)
    }
    for room, (x, y) in place.items():
        lines = sum(module.lines for module in modules.values() if module.room == room)
        small = room in SMALL_CORE
        box = FancyBboxPatch(
            (x - 0.95, y - 0.24), 1.9, 0.48, boxstyle="round,pad=0.02", fc="#dbe9f6" if small else "#f4f1ea", ec="#555"
        )
        axes.add_patch(box)
        axes.text(x, y + 0.06, room, ha="center", va="center", fontsize=12, weight="bold" if small else "normal")
        axes.text(x, y - 0.13, f"{lines:,} lines", ha="center", va="center", fontsize=8, color="#666")
    for room, other in graph.edges:
        (x1, y1), (x2, y2) = place[room], place[other]
        start, end = ((x1, y1 - 0.26), (x2, y2 + 0.26)) if y1 > y2 else ((x1 - 0.98, y1), (x2 + 0.98, y2))
        bend = 0.0 if y1 - y2 < 1.5 else 0.18
        arrow = FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=10, color="#888", lw=0.9, connectionstyle=f"arc3,rad={bend}"
        )
        axes.add_patch(arrow)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    core = read(ROOT / "core" / "meshwright")
    written = ROOT / "docs" / "architecture.md"
    written.write_text(page(written.read_text(encoding="utf-8"), core), encoding="utf-8")
    draw(core, ROOT / "docs" / "house.png")
