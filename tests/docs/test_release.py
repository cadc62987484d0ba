"""What is released, as docs/contribute/releasing.md says: one version everywhere, and whole wheels that pip resolves
ours from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).parents[2]
ALL = release.find_distributions()
RUN = """
strategy: {strategy}
threads_per_rank: 1
model: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}}
data: {{corpus: texts.jsonl, vocab_size: 300, seq_len: 16, eval_fraction: 0.1}}
steps: 2
batch_size: 4
micro_batch_size: 2
sample: null
output_dir: out
"""


# -- one version


def _tree(directory: Path) -> Path:
    """The files of the project that state its version, in another place."""
    for path in {path for path, _, _ in release.iter_stated_versions()} | {ROOT / "CHANGELOG.md"}:
        copy = directory / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    return directory


def test_a_version_is_set_everywhere_and_must_be_one_of_ours(tmp_path: Path) -> None:
    assert release.find_version_mismatches() == []
    tree = _tree(tmp_path)
    before = len(list(release.iter_stated_versions(tree)))
    for file, words in {
        "pyproject.toml": "meshwright-fsdp2==",
        "plugins/ddp/pyproject.toml": "meshwright==",
        "plugins/run/pyproject.toml": 'version = "',
        "CITATION.cff": 'version: "',
    }.items():
        text = (tree / file).read_text(encoding="utf-8")
        (tree / file).write_text(text.replace(words, f"{words}9.", 1), encoding="utf-8")
        (found,) = release.find_version_mismatches(tree)
        assert found.startswith(f"{file}: " + words.strip(' "'))
        (tree / file).write_text(text, encoding="utf-8")
    for version in ("1.0", "v1.0.0", "1.0.0.dev1", "1.0.0+mine", ""):
        with pytest.raises(SystemExit, match="is not a version of ours"):
            release.set_version(version, tree)
    release.set_version("3.1.0rc2", tree)
    assert release.find_version_mismatches(tree) == []
    assert [version for _, _, version in release.iter_stated_versions(tree)] == ["3.1.0rc2"] * before
    # Versions of others are as they were.
    assert "megatron-fsdp>=0.6.1,<0.7" in (tree / "plugins/megatron_fsdp/pyproject.toml").read_text(encoding="utf-8")


def test_a_tag_must_be_the_version_with_a_day_in_the_changelog(tmp_path: Path) -> None:
    tree = _tree(tmp_path)
    release.set_version("0.9.0", tree)
    wrong_tag, no_day = release.find_version_mismatches(tree, tag="v0.9.1")
    assert "the tag must be v0.9.0" in wrong_tag
    assert "## 0.9.0 (YYYY-MM-DD)" in no_day
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 0.9.0 (2027-01-31)\n", encoding="utf-8")
    assert release.find_version_mismatches(tree, tag="v0.9.0") == []


# -- wheels and source distributions


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels and source distributions of core and what trains with a strategy; what is in them has been looked at."""
    directory, plugins = tmp_path_factory.mktemp("two"), ("fsdp2", "run", "objectives")
    assert len(release.build_distributions(directory, ["meshwright", *(f"meshwright-{name}" for name in plugins)])) == 8
    return directory


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels and source distributions of all."""
    directory = tmp_path_factory.mktemp("every")
    assert len(release.build_distributions(directory)) == 2 * len(ALL)
    return directory


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


@pytest.mark.slow
def test_wheels_hold_data_types_and_license_and_what_one_lacks_is_named(two: Path, tmp_path: Path) -> None:
    (wheel,), (source,) = two.glob("meshwright-*.whl"), two.glob("meshwright-*.tar.gz")
    gone = {f"meshwright/{name}" for name in ("py.typed", "plugin.pyi", "cli/main.py")}
    contents = _contents(wheel)
    assert {*gone, "meshwright/parallel/tensor/plan_corrections.yaml"} <= contents.keys()
    with zipfile.ZipFile(tmp_path / wheel.name, "w") as written:
        for name in contents.keys() - gone:
            written.writestr(name, contents[name])
        written.writestr("tests/test_core.py", "")
    found = release.find_build_defects(ALL[0], [tmp_path / wheel.name, source])
    assert {f"{wheel.name}: lacks {name}" for name in gone} <= {*found}
    assert f"{wheel.name}: has tests/test_core.py, which is not of the package" in found


# -- installed


@dataclass(frozen=True)
class Fresh:
    """An environment that has what is installed here but nothing of ours, and a folder with wheels of ours alone."""

    directory: Path
    wheels: Path

    def run(self, *command: str, where: Path | None = None) -> str:
        """What a program of the environment prints; it must succeed."""
        program = str(self.directory / "bin" / command[0])
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
        done = subprocess.run(
            [program, *command[1:]],
            env={**environment, "OMP_NUM_THREADS": "1"},
            cwd=where or self.directory,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, requirement: str) -> set[str]:
        """Names and versions that pip installs from the folder."""
        found = ("--disable-pip-version-check", "--no-index", "--find-links", str(self.wheels))
        reported = self.run("python", "-m", "pip", "install", *found, requirement)
        (line,) = [line for line in reported.splitlines() if line.startswith("Successfully installed")]
        return set(line.split()[2:])


@pytest.fixture
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Fresh:
    """Parametrized indirectly with the fixture that built."""
    links = tmp_path / "links"
    links.mkdir()
    for place in (each for each in sys.path if Path(each).name == "site-packages"):
        for entry in Path(place).iterdir():
            if "meshwright" not in entry.name and entry.suffix != ".pth" and not (links / entry.name).exists():
                (links / entry.name).symlink_to(entry)
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text(str(links), encoding="utf-8")
    return Fresh(environment, request.getfixturevalue(request.param))


def _named(*names: str) -> set[str]:
    return {f"{name}-{release.read_version()}" for name in names}


def _train(fresh: Fresh, where: Path, strategy: str, ranks: int) -> None:
    where.mkdir()
    texts = ["".join(chr(97 + row * place % 26) for place in range(200)) for row in range(20)]
    (where / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    (where / "run.yaml").write_text(RUN.format(strategy=strategy), encoding="utf-8")
    reported = fresh.run("meshwright", "train", "run.yaml", "--set", f"nproc={ranks}", where=where)
    assert "step" in reported
    assert len((where / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert (where / "out" / "model" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("fresh", ["two"], indirect=True)
def test_an_extra_is_resolved_from_wheels_and_trains(fresh: Fresh, tmp_path: Path) -> None:
    brought = ("meshwright", "meshwright-fsdp2", "meshwright-run", "meshwright-objectives")
    assert fresh.install("meshwright[fsdp2,run]") == _named(*brought)
    where = fresh.run("python", "-c", "import meshwright; print(meshwright.__file__, meshwright.__version__)").split()
    assert Path(where[0]).is_relative_to(fresh.directory)
    assert where[1] == release.read_version()
    reported = fresh.run("meshwright", "strategies").partition("installable")[0]
    assert [line for line in reported.splitlines() if line and not line.startswith(" ")] == ["fsdp2", "single"]
    _train(fresh, tmp_path / "run", "fsdp2", 2)


@pytest.mark.zoo
@pytest.mark.parametrize("fresh", ["every"], indirect=True)
def test_all_distributions_install_and_every_strategy_trains(fresh: Fresh, tmp_path: Path) -> None:
    assert fresh.install("meshwright[all]") == _named(*(each.name for each in ALL))
    for each in ALL:
        assert fresh.run("python", "-c", f"import {each.package.name}; print({each.package.name}.__file__)")
    assert "broken:" not in fresh.run("meshwright", "strategies")
    for strategy in ("single", "ddp", "fsdp2", "megatron_fsdp"):
        _train(fresh, tmp_path / strategy, strategy, 1 if strategy == "single" else 2)
