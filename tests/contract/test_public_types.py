"""The public names as type checkers of users see them, strictly and with no plugin of a checker's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "typed" / "program.py"
MISTAKES = """
import meshwright as mw
from meshwright_fsdp2 import FSDP2Config

mw.OptimizerConfig(lr="fast")
FSDP2Config(shard="all")
mw.get_strategy("fsdp2").no_such_name
loss: str = mw.StepResult.loss
mw.no_such_function()
mw.RunConfig(model={}, batch_size=8, steps="many")
"""
"""Each of the last six lines is one."""


CHECKERS = [pytest.param("pyright", marks=pytest.mark.slow), pytest.param("mypy", marks=pytest.mark.zoo)]


@pytest.fixture(scope="module", params=CHECKERS)
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a checker says of both programs, in a folder where no settings of ours are found; a line each."""
    directory = tmp_path_factory.mktemp("mine")
    (directory / "program.py").write_text(PROGRAM.read_text(encoding="utf-8"), encoding="utf-8")
    (directory / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    # mypy reads torch as it is, which takes a minute; transformers would take another.
    (directory / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-transformers.*]\nfollow_imports = skip\n")
    commands = {
        "mypy": ["mypy", "--config-file", "mypy.ini", "--cache-dir", "cache"],
        "pyright": ["pyright", "--pythonpath", sys.executable],
    }
    if request.param == "pyright" and shutil.which("node") is None:
        pytest.skip("pyright is a program for Node.js, which is not installed; it would be downloaded")
    done = subprocess.run(
        [sys.executable, "-m", *commands[request.param], "program.py", "mistakes.py"],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_users_program_is_typed(reported: list[str]) -> None:
    assert [line for line in reported if "program.py:" in line] == []


def test_mistakes_of_a_user_are_found(reported: list[str]) -> None:
    for number in range(5, 11):
        assert [line for line in reported if f"mistakes.py:{number}:" in line and "error" in line], reported
