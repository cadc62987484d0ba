"""Install each plugin from its wheel, alone with core, in a fresh environment, and run its tests there.

    make test-wheels                        # all plugins; about three minutes each
    python tests/run_wheel_tests.py cluster watch    # some

First with what the plugin depends on and nothing else: every module is imported, and the command line starts. Then with
its extra `test`, which names what its tests need besides. The packages' sources are not there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # of an extra of the plugin
        if error.name.startswith("meshwright"):
            raise
"""


def build_wheels(directory: Path) -> None:
    for source in (ROOT, *sorted(each.parent for each in ROOT.glob("plugins/*/pyproject.toml"))):
        with tempfile.TemporaryDirectory() as copy:  # setuptools writes into the folder that it builds
            ignored = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info")
            shutil.copytree(source, f"{copy}/source", ignore=ignored)
            build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory]
            subprocess.run([*build, f"{copy}/source"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def copy_tests(directory: Path) -> None:
    """Copy what git tracks, without the packages' sources."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0")[:-1]:
        if not name.startswith("core/") and "/src/" not in name:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)


def check_plugin(folder: str, wheels: Path, directory: Path) -> str | None:
    """Return which check of a plugin failed, or None."""
    project = tomllib.loads((ROOT / "plugins" / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    environment, tree = directory / folder, directory / "tree"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    install += ["--find-links", wheels]
    tests = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not zoo"]
    steps = {
        "installs": [*install, f"{name}=={version}"],
        "imports": [python, "-c", IMPORT_ALL, f"meshwright_{folder}"],
        "starts": [environment / "bin" / "meshwright", "strategies"],
        "installs its test extra": [*install, f"{name}[test]=={version}"],
        "passes its tests": [*tests, f"plugins/{folder}/tests"],
    }
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    try:
        for step, command in steps.items():
            ran = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, check=False)
            if ran.returncode:
                print(ran.stdout[-4000:], ran.stderr[-4000:], sep="\n")
                return step
        print(f"{name}: {ran.stdout.strip().splitlines()[-1]}", flush=True)
        return None
    finally:
        shutil.rmtree(environment)


def main(folders: list[str]) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        build_wheels(directory / "wheels")
        copy_tests(directory / "tree")
        failed = {each: check_plugin(each, directory / "wheels", directory) for each in folders}
    for folder, step in failed.items():
        if step is not None:
            print(f"{folder}: fails where it {step}")
    return any(failed.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or sorted(each.parent.name for each in ROOT.glob("plugins/*/pyproject.toml"))))
