"""Tests have the same names in every process: parallel workers must collect the same ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = """
import gzip, random
import pytest

@pytest.mark.parametrize("content", [{value}]{ids})
def test_it(content): ...
"""


def _collect(directory: Path, value: str, ids: str = "") -> subprocess.CompletedProcess[str]:
    shutil.copy(ROOT / "conftest.py", directory)
    (directory / "test_it.py").write_text(FILE.format(value=value, ids=ids), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "."]
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_ADDOPTS"}
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_binary_values_name_no_test(tmp_path: Path) -> None:
    done = _collect(tmp_path, "gzip.compress(random.randbytes(9)), b'text'")
    assert done.stdout.splitlines()[:2] == ["test_it.py::test_it[content]", "test_it.py::test_it[text]"]


@pytest.mark.parametrize(("value", "reason"), [("object()", "the address of an object"), ("{'a', 'b'}", "a set")])
def test_names_that_differ_between_processes_are_refused(value: str, reason: str, tmp_path: Path) -> None:
    done = _collect(tmp_path, value, ids=", ids=str")
    assert done.returncode == 4, done.stdout
    assert f"is named by {reason}" in done.stdout + done.stderr
