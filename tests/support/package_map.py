"""Rooms of core and the imports between them, for the table and the picture of docs/contribute/architecture.md.

    python tests/support/package_map.py          # draws docs/images/house.png, and writes the table

The order of the rooms is that of the contracts of import-linter in pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- rooms: begin -->", "<!-- rooms: end -->"
_CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
_CONTRACT_LAYERS = next(each["layers"] for each in _CONTRACTS if each.get("containers") == ["meshwright"])
LAYERS = [layer.split(" : ") for layer in reversed(_CONTRACT_LAYERS)]  # Rooms of core from the bottom up


@dataclass(frozen=True)
class SourceModule:
    """One file of a package; `name` starts with the package's."""

    name: str
    path: Path

    @property
    def package(self) -> str:
        """The folder within the package; empty for modules of the package itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or (len(parts) == 2 and self.path.name == "__init__.py") else ""

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def imports(self) -> Iterator[str]:
        """Dotted names that the module imports, also within functions."""
        package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                start = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*start, *filter(None, [node.module])])
                yield from (f"{base}.{alias.name}" for alias in node.names)


def find_packages() -> list[Path]:
    found = [ROOT / "core" / "meshwright", *ROOT.glob("plugins/*/src/*")]
    return [path for path in sorted(found) if (path / "__init__.py").is_file()]


def read_modules(package: Path) -> dict[str, SourceModule]:
    """The modules of a package by name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        found[name] = SourceModule(name, path)
    return found


def find_import_edges(modules: Mapping[str, SourceModule]) -> set[tuple[str, str]]:
    """Pairs of rooms of core of which the first imports the second."""
    names = ((module.package, name.split(".")) for module in modules.values() for name in module.imports())
    pairs = {(room, parts[1]) for room, parts in names if parts[0] == "meshwright" and len(parts) > 1}
    rooms = {room for floor in LAYERS for room in floor}
    return {(one, other) for one, other in pairs if {one, other} <= rooms and one != other}


def render_table(modules: Mapping[str, SourceModule]) -> str:
    """The rooms from the bottom up, as a table in Markdown."""
    rooms = [room for floor in LAYERS for room in floor]
    pairs = find_import_edges(modules)
    rows = ["| room | what is in it | stands on |", "|---|---|---|"]
    for room in rooms:
        text = (ast.get_docstring(modules[f"meshwright.{room}"].tree) or "").split("\n\n")[0].replace("\n", " ")
        sentence = re.split(r"(?<=\.) (?=[A-Z])", text)[0]
        rows.append(f"| `{room}` | {sentence} | {', '.join(each for each in rooms if (room, each) in pairs)} |")
    return "\n".join(rows)


def render_page(text: str, modules: Mapping[str, SourceModule]) -> str:
    """docs/contribute/architecture.md with the table of today's sources."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{render_table(modules)}\n\n{END}{rest.split(END)[1]}"


def draw_map(modules: Mapping[str, SourceModule], path: Path) -> None:
    """Draw rooms as boxes, with arrows to what they import, except those that follow from other arrows."""
    import networkx as nx
    from matplotlib.figure import Figure

    axes = Figure(figsize=(9, 11)).add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 9)
    axes.set_ylim(-0.2, len(LAYERS))
    place = {
        room: ((index + 0.5) * 9 / len(floor), height + 0.4)
        for height, floor in enumerate(LAYERS)
        for index, room in enumerate(floor)
    }
    for room, (x, y) in place.items():
        lines = sum(module.lines for module in modules.values() if module.package == room)
        box = {"boxstyle": "round,pad=0.4", "fc": "#f4f1ea", "ec": "#555"}
        axes.text(x, y, f"{room}\n{lines:,} lines", ha="center", va="center", fontsize=9, bbox=box)
    for room, other in nx.transitive_reduction(nx.DiGraph(sorted(find_import_edges(modules)))).edges:
        arrow = {"arrowstyle": "-|>", "color": "#888", "shrinkA": 16, "shrinkB": 16}
        axes.annotate("", place[other], place[room], arrowprops=arrow)
    axes.figure.savefig(path, dpi=110)


if __name__ == "__main__":
    core = read_modules(ROOT / "core" / "meshwright")
    written = ROOT / "docs" / "contribute" / "architecture.md"
    written.write_text(render_page(written.read_text(encoding="utf-8"), core), encoding="utf-8")
    draw_map(core, ROOT / "docs" / "house.png")
