"""Packages of core and the imports between them, for the table and the picture of docs/contribute/architecture.md.

    python tests/support/package_map.py          # draws docs/images/packages.png, and writes the table

The order of the packages is that of the contracts of import-linter in pyproject.toml.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"
_CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
_CONTRACT_LAYERS = next(each["layers"] for each in _CONTRACTS if each.get("containers") == ["meshwright"])
LAYERS = [layer.split(" : ") for layer in reversed(_CONTRACT_LAYERS)]  # Packages of core from the bottom up


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
    """Pairs of packages of core of which the first imports the second."""
    names = ((module.package, name.split(".")) for module in modules.values() for name in module.imports())
    pairs = {(package, parts[1]) for package, parts in names if parts[0] == "meshwright" and len(parts) > 1}
    packages = {package for layer in LAYERS for package in layer}
    return {(one, other) for one, other in pairs if {one, other} <= packages and one != other}


def render_table(modules: Mapping[str, SourceModule]) -> str:
    """The packages from the bottom up, as a table in Markdown."""
    packages = [package for layer in LAYERS for package in layer]
    pairs = find_import_edges(modules)
    rows = ["| package | contents | imports |", "|---|---|---|"]
    for package in packages:
        imported = ", ".join(each for each in packages if (package, each) in pairs)
        rows.append(f"| `{package}` | {_describe_package(modules, package)} | {imported} |")
    return "\n".join(rows)


def render_page(text: str, modules: Mapping[str, SourceModule]) -> str:
    """docs/contribute/architecture.md with the table of today's sources."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{render_table(modules)}\n\n{END}{rest.split(END)[1]}"


@dataclass(frozen=True)
class MapLayout:
    """Positions of `draw_map`, in rows from the top and in inches from the left.

    Attributes:
        boxes: (left, top, right, bottom) of each package.
        arrows: for each import, the corners of its line, from the importing box to the imported one.
    """

    boxes: dict[str, tuple[float, float, float, float]]
    arrows: dict[tuple[str, str], list[tuple[float, float]]]


_BOX_RIGHT = 7.0


def lay_out_map(pairs: Collection[tuple[str, str]]) -> MapLayout:
    """Place packages below each other, and each import on a lane to their right, so no line crosses a box."""
    import networkx as nx  # type: ignore[import-untyped]

    height = {package: number for number, layer in enumerate(reversed(LAYERS)) for package in layer}
    order = nx.lexicographical_topological_sort(nx.DiGraph([*pairs]), key=lambda each: (height[each], each))
    rows = {package: row for row, package in enumerate(order)}
    boxes = {package: (0.1, row + 0.12, _BOX_RIGHT, row + 0.88) for package, row in rows.items()}
    lanes: list[list[tuple[int, int]]] = []
    lane_of = {}
    for pair in sorted(pairs, key=lambda pair: (rows[pair[1]] - rows[pair[0]], rows[pair[0]])):
        span = rows[pair[0]], rows[pair[1]]
        free = (n for n, taken in enumerate(lanes) if all(span[0] >= end or span[1] <= start for start, end in taken))
        lane_of[pair] = next(free, len(lanes))
        if lane_of[pair] == len(lanes):
            lanes.append([])
        lanes[lane_of[pair]].append(span)
    arrows = {}
    for pair, lane in lane_of.items():
        # At a box, arrows end in the upper part and start in the lower part, in the order that crosses fewest lanes.
        outgoing = sorted((each for each in pairs if each[0] == pair[0]), key=lane_of.__getitem__)
        incoming = sorted((each for each in pairs if each[1] == pair[1]), key=lane_of.__getitem__, reverse=True)
        start = rows[pair[0]] + 0.62 + 0.24 * (outgoing.index(pair) + 0.5) / len(outgoing)
        end = rows[pair[1]] + 0.14 + 0.24 * (incoming.index(pair) + 0.5) / len(incoming)
        x = _BOX_RIGHT + 0.35 + lane * 0.2
        arrows[pair] = [(_BOX_RIGHT, start), (x, start), (x, end), (_BOX_RIGHT, end)]
    return MapLayout(boxes, arrows)


def draw_map(modules: Mapping[str, SourceModule], path: Path) -> None:
    """Draw packages as boxes, with arrows to what they import, except those that follow from other arrows."""
    import networkx as nx
    from matplotlib.figure import Figure

    pairs = sorted(nx.transitive_reduction(nx.DiGraph(sorted(find_import_edges(modules)))).edges)
    layout = lay_out_map(pairs)
    width = max(x for corners in layout.arrows.values() for x, _ in corners) + 0.2
    figure = Figure(figsize=(width, len(layout.boxes) * 0.46))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(len(layout.boxes) + 0.05, -0.05))
    for package, (left, top, right, bottom) in layout.boxes.items():
        lines = sum(module.lines for module in modules.values() if module.package == package)
        axes.fill([left, right, right, left], [top, top, bottom, bottom], fc="#f4f1ea", ec="#555", lw=0.8)
        y = (top + bottom) / 2
        summary = _shorten(_describe_package(modules, package))
        axes.text(left + 0.12, y, package, va="center", fontsize=9.5, weight="bold")
        axes.text(left + 1.75, y, f"{lines:,}", va="center", ha="right", fontsize=8.5, color="#555")
        axes.text(left + 1.95, y, summary, va="center", fontsize=8.5)
    colors = ("#3f6fc6", "#d9822b", "#2f8f6b", "#9c4a9c", "#b8324a", "#6b7280")
    for (package, _), corners in layout.arrows.items():
        color = colors[list(layout.boxes).index(package) % len(colors)]
        line = corners[:-1]
        axes.plot([x for x, _ in line], [y for _, y in line], color=color, lw=1.1)
        arrow = {"arrowstyle": "-|>", "color": color, "shrinkA": 0, "shrinkB": 0, "lw": 1.1}
        axes.annotate("", corners[-1], corners[-2], arrowprops=arrow)
    figure.savefig(path, dpi=110)


def _describe_package(modules: Mapping[str, SourceModule], package: str) -> str:
    """Return the first sentence of a package's docstring."""
    text = (ast.get_docstring(modules[f"meshwright.{package}"].tree) or "").split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.) (?=[A-Z])", text)[0]


def _shorten(sentence: str) -> str:
    """Return a sentence up to its colon or parenthesis, and no more than a box holds."""
    head = sentence.rstrip(".").replace("`", "").partition(":")[0].partition(" (")[0]
    return head if len(head) <= 72 else textwrap.shorten(head, 72, placeholder=" ...")


if __name__ == "__main__":
    core = read_modules(ROOT / "core" / "meshwright")
    written = ROOT / "docs" / "contribute" / "architecture.md"
    written.write_text(render_page(written.read_text(encoding="utf-8"), core), encoding="utf-8")
    draw_map(core, ROOT / "docs" / "images" / "packages.png")
