"""The rules of the house, held by the imports and the sizes of what is in it; see docs/architecture.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.house import FLOORS, PIPELINE, ROOT, SMALL_CORE, Module, arrows, circles, packages, page, read, upward

CORE = read(ROOT / "core" / "meshwright")
ORDER = tuple(room for floor in FLOORS for room in floor)
LONGEST = {ast.Module: 350, ast.ClassDef: 250, ast.FunctionDef: 60}
"""In lines; more only where the docstring says why it is one thing, with these words."""
WHY = "One thing, since"


def test_every_module_of_core_is_in_a_room_that_stands_somewhere():
    rooms = {module.room for name, module in CORE.items() if name not in ("meshwright", "meshwright.__main__")}
    assert rooms == set(ORDER)


def test_no_room_leans_on_one_above_it():
    assert not upward(CORE, ORDER)
    assert not [pair for pair in arrows(CORE) if set(pair) == {"parallel", "train"}]


def test_the_rooms_of_the_pipeline_stand_in_their_order():
    modules = read(ROOT / "plugins" / "pipeline" / "src" / "meshwright_pipeline")
    inner = {name: module for name, module in modules.items() if module.room in PIPELINE}
    kept = {name: Module(name, each.path, each.imports & inner.keys()) for name, each in inner.items()}
    assert {module.room for module in kept.values()} == set(PIPELINE)
    assert not upward(kept, PIPELINE)


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.name)
def test_no_modules_import_each_other_in_a_circle(package):
    assert not circles(read(package))


def test_the_small_core_is_small():
    assert sum(module.lines for module in CORE.values() if module.room in SMALL_CORE) < 2300


def test_the_small_core_lists_strategies_without_torch():
    names = [f"meshwright.{room}" for room in SMALL_CORE] + ["meshwright.strategy.registry", "meshwright.mesh.sizes"]
    code = f"import sys, {', '.join(names)}; meshwright.list_strategies(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.name)
def test_nothing_is_larger_than_one_can_hold_in_mind(package):
    assert not [text for module in read(package).values() for text in too_long(module)]


@pytest.mark.parametrize("package", packages(), ids=lambda path: path.name)
def test_every_module_and_room_says_what_it_is(package):
    silent = [module.name for module in read(package).values() if not ast.get_docstring(module.tree)]
    assert [name for name in silent if not name.endswith(".__main__")] == []


def test_the_page_about_the_house_is_as_the_house_is():
    written = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert page(written, CORE) == written, "run python tests/support/house.py"


def too_long(module: Module) -> list[str]:
    found = []
    for node in ast.walk(module.tree):
        for kind, most in LONGEST.items():
            if isinstance(node, kind):
                lines = module.lines if isinstance(node, ast.Module) else node.end_lineno - node.lineno + 1
                if lines > most and WHY not in (ast.get_docstring(node) or ""):
                    found.append(f"{module.name} {getattr(node, 'name', '')}: {lines} lines, at most {most}")
    return found


# -- what breaks the rules is seen


def _made(directory: Path, **texts: str) -> dict[str, Module]:
    package = directory / "meshwright"
    for name, text in texts.items():
        path = package / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")
    (package / "__init__.py").touch()
    return read(package)


@pytest.mark.parametrize(
    "text",
    [
        "from ..cli.main import app",
        "from meshwright.cli import main",
        "import meshwright.cli.main",
        "if TYPE_CHECKING:\n    from ..cli.main import app",
        "def f():\n    from ..cli import main",
    ],
)
def test_an_import_upward_is_seen(text, tmp_path):
    modules = _made(tmp_path, base__errors=text, cli__main="app = 1")
    assert upward(modules, ORDER)
    assert not upward(_made(tmp_path / "down", base__errors="", cli__main="from ..base import errors"), ORDER)


def test_a_circle_is_seen(tmp_path):
    modules = _made(
        tmp_path, base__a="from . import b", base__b="def f():\n    from .c import x", base__c="from .a import y"
    )
    assert circles(modules) == [["meshwright.base.a", "meshwright.base.b", "meshwright.base.c"]]


def test_what_is_too_long_is_seen(tmp_path):
    long = "def f():\n" + "    x = 1\n" * 61
    said = 'def f():\n    """One thing, since it counts."""\n' + "    x = 1\n" * 61
    modules = _made(tmp_path, base__long=long, base__said=said, base__many="x = 1\n" * 351)
    assert len([text for module in modules.values() for text in too_long(module)]) == 2
