"""Training needs what the packages declare, and nothing that tests, lint or documents need."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
SOURCES = {"core/meshwright": ".", **{f"plugins/{name}/src": f"plugins/{name}" for name in PLUGINS}}
OF_TESTS = {"pytest": "core/meshwright/testing/cells.py"}
"""Imported where tests are made for authors of strategies."""


def project(directory: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def named(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", each)[0].lower().replace("_", "-") for each in requirements}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return {name for name in found if name not in sys.stdlib_module_names and not name.startswith("meshwright")}


@pytest.mark.parametrize("sources", SOURCES)
def test_what_is_imported_is_declared_by_the_distribution_itself(sources):
    own = project(SOURCES[sources])
    extras = [each for name, those in own.get("optional-dependencies", {}).items() if name != "dev" for each in those]
    declared = named([*own["dependencies"], *extras])
    if sources == "core/meshwright":
        # Those of transformers are there with it.
        declared |= named([each for each in requires("transformers") or [] if "extra ==" not in each])
    brings = packages_distributions()
    for path in sorted((ROOT / sources).rglob("*.py")):
        for name in imports(path):
            if OF_TESTS.get(name) == str(path.relative_to(ROOT)):
                continue
            distributions = {each.lower().replace("_", "-") for each in brings.get(name, [name])}
            assert distributions & declared, f"{path.relative_to(ROOT)} imports {name}, which is declared nowhere"


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_takes_the_versions_that_core_takes(plugin):
    core = set(project(".")["dependencies"])
    own = project(f"plugins/{plugin}")["dependencies"]
    assert {each for each in own if named([each]) <= named(list(core))} <= core


def test_make_train_installs_no_more_than_training_needs():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\n.venv/trains:")[2].partition("\n\n")[0]
    plugins = re.search(r"^PLUGINS := (.*)$", makefile, flags=re.MULTILINE)
    assert plugins is not None
    # With the extras, pip would install a second copy of each, and refuses.
    assert "$(INSTALL) -e . $(PLUGINS)" in recipe
    assert "$(BRIDGES)" not in recipe
    strategies = re.fullmatch(r"meshwright\[(.*)\]", project(".")["optional-dependencies"]["all"][0])
    assert strategies is not None
    names = {name.replace("-", "_") for name in strategies[1].split(",")}
    assert set(re.findall(r"plugins/(\w+)", plugins[1])) == names
    train = makefile.partition("\ntrain:")[2].partition("\n\n")[0]
    assert train.split()[0] == ".venv/trains"
