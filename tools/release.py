"""The one version of all distributions, and what is uploaded of them: `python tools/release.py --help`.

The version is written in `core/meshwright/base/version.py`. Every pyproject.toml repeats it, and so does each of our
distributions that depends on another of them, exactly; `set` writes it everywhere, and `check` compares, also with the
tag of a release. So a clone without tags, a source distribution and a release all know it. `build` makes wheels and
source distributions, and looks into them. See docs/contribute/releasing.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_VERSION_LINE = re.compile(r'(?m)^(__version__ = |version = |version: )"([^"]+)"$')
_PINNED_REQUIREMENT = re.compile(r"(meshwright[a-z0-9-]*==)([^\"',;\s]+)")
_VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
_NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist", "tests")


@dataclass(frozen=True)
class Distribution:
    """A folder with a pyproject.toml of ours."""

    directory: Path

    @property
    def project(self) -> dict[str, Any]:
        """The table `project`."""
        return tomllib.loads((self.directory / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    @property
    def name(self) -> str:
        """As it is installed, such as "meshwright-fsdp2"."""
        return self.project["name"]

    @property
    def package(self) -> Path:
        """The folder of what is imported."""
        folder = "src" if (self.directory / "src").is_dir() else "core"
        return self.directory / folder / self.name.replace("-", "_")

    @property
    def files(self) -> set[str]:
        """What of it is installed, relative to the folder above the package."""
        return {
            path.relative_to(self.package.parent).as_posix()
            for path in self.package.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }


def find_distributions(root: Path = ROOT) -> list[Distribution]:
    """All of ours, core first; a folder of `plugins/` with a pyproject.toml is one."""
    return [Distribution(root), *(Distribution(path.parent) for path in sorted(root.glob("plugins/*/pyproject.toml")))]


def read_version(root: Path = ROOT) -> str:
    """The version that the source states."""
    return _VERSION_LINE.findall((root / "core/meshwright/base/version.py").read_text(encoding="utf-8"))[0][1]


def iter_stated_versions(root: Path = ROOT) -> Iterator[tuple[Path, str, str]]:
    """Every place that repeats the version: file, the words before it, and the version there."""
    for path in _find_version_files(root):
        text = path.read_text(encoding="utf-8")
        for found in (*_VERSION_LINE.finditer(text), *_PINNED_REQUIREMENT.finditer(text)):
            yield path, found[1].strip(), found[2]


def set_version(new: str, root: Path = ROOT) -> None:
    """Write a version everywhere.

    Raises:
        SystemExit: it is not a version such as 0.2.0 or 0.2.0rc1.
    """
    if not _VERSION.fullmatch(new):
        raise SystemExit(f"{new!r} is not a version of ours: 1.2.3, or 1.2.3a1, 1.2.3b1 or 1.2.3rc1 before it.")
    for path in _find_version_files(root):
        text = path.read_text(encoding="utf-8")
        text = _VERSION_LINE.sub(lambda found: f'{found[1]}"{new}"', text)
        path.write_text(_PINNED_REQUIREMENT.sub(lambda found: f"{found[1]}{new}", text), encoding="utf-8")


def find_version_mismatches(root: Path = ROOT, tag: str | None = None) -> list[str]:
    """What does not agree with the version, as text; with a tag also what a release would lack."""
    wanted = read_version(root)
    found = [
        f"{path.relative_to(root)}: {words} {other}, but {wanted} is the version"
        for path, words, other in iter_stated_versions(root)
        if other != wanted
    ]
    for each in find_distributions(root):
        if each.project.get("version") is None:
            found.append(f"{each.directory.relative_to(root)}/pyproject.toml: states no version")
    if tag is not None:
        if tag != f"v{wanted}":
            found.append(f"the tag is {tag}, but the version is {wanted}: the tag must be v{wanted}")
        if not re.search(rf"(?m)^## {re.escape(wanted)} \(\d{{4}}-\d\d-\d\d\)$", _read(root / "CHANGELOG.md")):
            found.append(f"CHANGELOG.md: no heading '## {wanted} (YYYY-MM-DD)', the day of the release")
    return found


def build_distributions(output: Path, names: list[str] | None = None, root: Path = ROOT) -> list[Path]:
    """Make a source distribution of each, and a wheel of what that holds, with the setuptools that is installed.

    They are made of copies, into which nothing gets that an earlier build has left, and which hold the one LICENSE.

    Args:
        output: a folder.
        names: of distributions; None for all.
        root: of the project.

    Returns:
        The files.

    Raises:
        SystemExit: a build fails, or what it has made is not as it must be.
    """
    wanted = [each for each in find_distributions(root) if names is None or each.name in names]
    before = set(output.glob("*"))
    with tempfile.TemporaryDirectory() as directory:
        for each in wanted:
            copy = Path(directory) / each.name
            copy.mkdir()
            for path in (each.directory / "pyproject.toml", each.directory / "README.md", root / "LICENSE"):
                shutil.copy(path, copy)
            folder = each.package.parent
            shutil.copytree(folder, copy / folder.name, ignore=_NOT_SOURCE)
            _run_build(copy, output)
    made = sorted(set(output.glob("*")) - before)
    wrong = [text for each in wanted for text in find_build_defects(each, made)]
    if wrong:
        raise SystemExit("\n".join(wrong))
    return made


def find_build_defects(distribution: Distribution, built_files: list[Path]) -> list[str]:
    """What is wrong with the wheel and the source distribution of one, as text."""
    stem = f"{distribution.name.replace('-', '_')}-{distribution.project['version']}"
    files = {path.name: path for path in built_files}
    wheel, source = files.get(f"{stem}-py3-none-any.whl"), files.get(f"{stem}.tar.gz")
    if wheel is None or source is None:
        return [f"{stem}: no wheel or no source distribution among {', '.join(sorted(files)) or 'no files'}"]
    with zipfile.ZipFile(wheel) as opened:
        inside = {name for name in opened.namelist() if not name.endswith("/")}
    information = f"{stem}.dist-info/"
    found = [f"{wheel.name}: lacks {name}" for name in sorted(distribution.files - inside)]
    others = {name for name in inside - distribution.files if not name.startswith(information)}
    found += [f"{wheel.name}: has {name}, which is not of the package" for name in sorted(others)]
    needed = {f"{distribution.package.name}/py.typed", f"{information}METADATA", f"{information}licenses/LICENSE"}
    found += [f"{wheel.name}: lacks {name}" for name in sorted(needed - inside)]
    with tarfile.open(source) as archive:
        names = set(archive.getnames())
    needed = {f"{stem}/{name}" for name in ("pyproject.toml", "README.md", "LICENSE")}
    return found + [f"{source.name}: lacks {name}" for name in sorted(needed - names)]


def _run_build(source: Path, output: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(output), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{source.name} is not built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _find_version_files(root: Path) -> list[Path]:
    """The files that state a version of ours."""
    projects = [each.directory / "pyproject.toml" for each in find_distributions(root)]
    return [root / "core/meshwright/base/version.py", root / "CITATION.cff", *projects]


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Versions and builds of all distributions.")
    commands = parser.add_subparsers(dest="command", required=True)
    checks = commands.add_parser("check", help="do all files state one version?")
    checks.add_argument("--tag", help="of a release, such as v0.2.0: must be that version, with a day in CHANGELOG.md")
    sets = commands.add_parser("set", help="write a version everywhere")
    sets.add_argument("version")
    builds = commands.add_parser("build", help="make wheels and source distributions, and look into them")
    builds.add_argument("output", type=Path)
    given = parser.parse_args()
    if given.command == "set":
        set_version(given.version)
    elif given.command == "build":
        for path in build_distributions(given.output):
            print(path)
    else:
        found = find_version_mismatches(tag=given.tag)
        if found:
            raise SystemExit("\n".join(found))
        print(f"{read_version()}: {', '.join(each.name for each in find_distributions())}")


if __name__ == "__main__":
    main()
