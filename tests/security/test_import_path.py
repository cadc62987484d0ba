"""No process that a command starts imports what lies in the directory where the user stands."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from security.small_run import write_small_run
from support.launched_processes import find_free_port

import meshwright

CORE = Path(meshwright.__file__).parent
ROOT = CORE.parents[1]
FOREIGN = ("torch", "numpy", "transformers", "matplotlib", "yaml", "rich", "typer", "pydantic", "pluggy", "tokenizers")
NAMES = sorted({*sys.stdlib_module_names, *FOREIGN} - {"__main__", "antigravity", "this"})
MODULE = """
import os, sys
with open({mark!r}, "a") as file:
    file.write(f"{name} by {{os.getpid()}} {{sys.argv[:3]}}\\n")
raise ImportError("a module of the current directory")
"""

SCRIPT = """
import sys
import meshwright_run.launch.local as local
def main(store): import torch
if __name__ == '__main__':
    sys.exit(local.launch_ranks(main, (), nproc=2))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a module of each name, which leaves a mark, and a run file."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(MODULE.format(mark=str(tmp_path / "mark"), name=name))
    checkpoint = {"every": 3, "replicate": "neighbor"}
    write_small_run(tmp_path, strategy="ddp", nproc=2, steps=6, max_restarts=1, output_dir="out", checkpoint=checkpoint)
    return tmp_path


def _run(place: Path, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    # A clone's packages, which are found by absolute paths.
    path = os.pathsep.join(each for each in sys.path if each and os.path.isabs(each))
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_modules_would_be_imported(place: Path) -> None:
    # -c looks into the current directory.
    assert _run(place, sys.executable, "-c", "import torch").returncode != 0
    assert (place / "mark").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["two ranks", "planner", "rank of a launcher", "python -m", "script"])
def test_a_command_imports_nothing_from_the_current_directory(how: str, place: Path) -> None:
    command, more = [shutil.which("meshwright", path=str(Path(sys.executable).parent)) or ""], {}
    alone = ("--set", "nproc=1", "--set", "checkpoint.replicate=null")
    if how == "two ranks":
        # With keepers and pictures.
        command += ["train", "run.yaml"]
    elif how == "planner":
        command += ["plan", "run.yaml", "--gpus", "2", "--device", "h100-80gb"]
    elif how == "rank of a launcher":
        command += ["train", "run.yaml", *alone, "--set", "watchdog_s=60"]
        more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "RANK": "0", "LOCAL_RANK": "0"}
        more |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    elif how == "python -m":
        # What Python loads before it runs any module of ours is its own matter; torch is not among it.
        code = "import runpy, sys, meshwright; print(*(name for name in sys.modules if '.' not in name))"
        known = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
        loaded = {*known.stdout.split()} - {"meshwright"}
        assert not loaded & {*FOREIGN}
        for name in loaded:
            (place / f"{name}.py").unlink(missing_ok=True)
        command = [sys.executable, "-m", "meshwright", "train", "run.yaml", *alone]
    else:
        script = place.parent / "script" / "main.py"
        script.parent.mkdir()
        script.write_text(SCRIPT)
        command = [sys.executable, str(script)]
    if not command[0]:
        pytest.skip("meshwright is not installed as a command")
    done = _run(place, *command, **more)
    output = done.stdout + done.stderr
    assert not (place / "mark").exists(), (place / "mark").read_text() + output
    assert done.returncode == 0, output


def test_every_python_that_is_started_is_started_by_one_name() -> None:
    sources = [CORE, *ROOT.glob("plugins/*/src")]
    places = [path for source in sources for path in source.rglob("*.py")]
    assert len(places) > 300
    found = {
        path.name
        for path in places
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "executable"
    }
    assert found == {"safe_path.py"}
