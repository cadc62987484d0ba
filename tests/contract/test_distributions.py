"""The distributions: one version, the right dependencies, and each plugin alone beside core."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.base.lazy import format_install_command
from meshwright.strategy.registry import find_installable_extras

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
BUILT = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "tests")


def project(directory: Path) -> dict[str, Any]:
    return tomllib.loads((directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]


CORE = project(ROOT)


STRATEGIES = [
    path for path in PLUGINS if any("def register_strategies" in each.read_text() for each in path.rglob("plugin.py"))
]
"""The others are bridges to frameworks of others, and trackers."""


def extra_of(directory: Path) -> str:
    return project(directory)["name"].removeprefix("meshwright-")


def test_core_says_its_version_once_more():
    assert meshwright.__version__ == CORE["version"]


@pytest.mark.parametrize("directory", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_has_an_extra_and_cores_version_python_licence_and_requirements(directory):
    plugin = project(directory)
    assert plugin["version"] == CORE["version"]
    assert plugin["requires-python"] == CORE["requires-python"]
    assert f"meshwright=={CORE['version']}" in plugin["dependencies"]
    ours = [each for each in plugin["dependencies"] if each.startswith("meshwright")]
    assert all(each.endswith(f"=={CORE['version']}") for each in ours)
    core = set(CORE["dependencies"])
    assert {each for each in plugin["dependencies"] if named([each]) <= named(list(core))} <= core
    assert (directory / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert plugin["license-files"] == ["LICENSE"]
    extra = CORE["optional-dependencies"][extra_of(directory)]
    assert f"{project(directory)['name']}=={CORE['version']}" in extra
    # What it needs of this project comes with it, from a clone too.
    needed = {each.partition("==")[0].removeprefix("meshwright-") for each in project(directory)["dependencies"]}
    brought = {each.partition("==")[0].removeprefix("meshwright-") for each in extra}
    brought |= {name for each in extra for name in re.findall(r"meshwright\[(.*)\]", each)}
    assert needed & {extra_of(each) for each in PLUGINS} <= brought


@pytest.mark.parametrize("directory", STRATEGIES, ids=lambda path: path.name)
def test_a_strategy_has_an_install_line_and_an_entry_point_of_its_name(directory):
    plugin = project(directory)
    name = directory.name
    assert list(plugin["entry-points"]["meshwright"]) == [name]
    assert find_installable_extras()[name] == extra_of(directory)
    assert f"'.[{extra_of(directory)}]'" in format_install_command(find_installable_extras()[name])


def test_there_is_an_extra_for_each_strategy_of_the_project_and_all_holds_those_that_exist():
    extras = CORE["optional-dependencies"]
    for extra, directories in (("strategies", STRATEGIES), ("all", PLUGINS)):
        (line,) = extras[extra]
        named = re.fullmatch(r"meshwright\[(.*)\]", line)
        assert named, line
        found = {each for name in named[1].split(",") for each in (STRATEGIES if name == "strategies" else [name])}
        assert {each if isinstance(each, str) else extra_of(each) for each in found} == set(map(extra_of, directories))
    assert set(find_installable_extras()) == {directory.name for directory in STRATEGIES}


# -- from a clone


def would_install(clone: Path, *requirements: str) -> dict[str, tuple[str, bool]]:
    """Where pip takes each distribution of ours from, and whether it stays editable there. Nothing is installed."""
    options = "--quiet --dry-run --no-index --no-build-isolation --disable-pip-version-check --report -"
    command = [sys.executable, "-m", "pip", "install", *options.split(), *requirements]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "does not provide the extra" not in done.stderr
    return {
        each["metadata"]["name"]: (
            Path(each["download_info"]["url"].removeprefix("file://")).name,
            each["download_info"].get("dir_info", {}).get("editable", False),
        )
        for each in json.loads(done.stdout)["install"]
    }


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("clones") / "with a space"
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        directory.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, directory)
    for name in ("core", "plugins"):
        shutil.copytree(ROOT / name, directory / name, ignore=BUILT)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extras", "expected"),
    [
        ("fsdp2", ["fsdp2"]),
        ("megatron_fsdp", ["megatron_fsdp"]),
        ("all", [directory.name for directory in PLUGINS]),
        ("plan", ["objectives", "plan", "run"]),
    ],
)
def test_extras_of_a_clone_install_the_plugins_that_lie_in_it(extras: str, expected: list[str], clone: Path) -> None:
    found = would_install(clone, "-e", f".[{extras}]")
    assert found.pop("meshwright") == ("with%20a%20space", True)
    assert found == {project(ROOT / "plugins" / name)["name"]: (name, False) for name in expected}


# -- each alone


def installed(source: Path, target: Path) -> Path:
    """Build a copy of a distribution, so that its source tree stays clean, and install it into `target`."""
    copy = target.with_name(f"{target.name}_source")
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "core", "src"):
        path = source / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=BUILT)
        elif path.is_file():
            shutil.copy(path, copy / name)
    command = "install --quiet --no-deps --no-build-isolation --no-index --no-compile --disable-pip-version-check"
    subprocess.run(
        [sys.executable, "-m", "pip", *command.split(), "--target", str(target), str(copy)],
        check=True,
        capture_output=True,
        text=True,
    )
    return target


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    return installed(ROOT, tmp_path_factory.mktemp("install") / "core")


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory) -> Path:
    """What is installed here, but nothing of meshwright."""
    links = tmp_path_factory.mktemp("links")
    for path in {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}:
        for entry in path.iterdir():
            if "meshwright" not in entry.name and not (links / entry.name).exists():
                (links / entry.name).symlink_to(entry)
    return links


def run_with(paths: list[Path], code: str) -> str:
    # -S: without site, and so without the .pth files of editable installations.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LIST = "import sys; sys.argv[1:] = ['strategies']; from meshwright.cli.main import main; main()"


def reported(output: str) -> tuple[list[str], list[str]]:
    """The strategies that `meshwright strategies` lists, and those that it says can be installed."""
    assert "broken:" not in output
    strategies, _, installable = output.partition("installable, from a clone of meshwright:\n")
    names = [line for line in strategies.splitlines() if line and not line.startswith(" ")]
    return names, [line.split(":")[0].strip() for line in installable.splitlines()]


@pytest.mark.slow
def test_core_alone_lists_single_and_offers_the_others(core, dependencies):
    assert reported(run_with([core, dependencies], LIST)) == (["single"], sorted(find_installable_extras()))


@pytest.mark.slow
@pytest.mark.parametrize("directory", STRATEGIES, ids=lambda path: path.name)
def test_a_plugin_works_alone_beside_core(directory, core, dependencies, tmp_path):
    name = directory.name
    paths = [installed(directory, tmp_path / name), core, dependencies]
    assert list(paths[0].glob("*.dist-info/licenses/LICENSE"))
    names, offered = reported(run_with(paths, LIST))
    assert names == sorted([name, "single"])
    assert offered == [other for other in sorted(find_installable_extras()) if other != name]
    code = f"""
import sys, meshwright
spec = meshwright.get_strategy({name!r})
print(spec.config_cls(), meshwright.__file__, sys.modules[spec.config_cls.__module__].__file__, sep="\\n")
"""
    _, core_file, plugin_file = run_with(paths, code).splitlines()
    assert Path(core_file).is_relative_to(core)
    assert Path(plugin_file).is_relative_to(tmp_path)


@pytest.mark.slow
def test_distributions_bring_their_types_and_licence(core):
    assert (core / "meshwright" / "py.typed").is_file()
    assert list(core.glob("meshwright-*.dist-info/licenses/LICENSE"))


# -- what they import

SOURCES = {"core/meshwright": ROOT, **{f"plugins/{path.name}/src": path for path in PLUGINS}}
OF_TESTS = {"pytest": "plugins/testing/src/meshwright_testing/cells.py"}
"""Imported where tests are made for authors of strategies."""


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


def test_the_whole_set_up_of_a_clone_is_one_file() -> None:
    listed = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert sorted(listed) == sorted(["-e .", *(f"-e plugins/{directory.name}" for directory in PLUGINS)])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "$(INSTALL) -r requirements.txt" in makefile.partition("\n.venv/trains:")[2].partition("\n\n")[0]
    assert makefile.partition("\ntrain:")[2].split()[0] == ".venv/trains"
