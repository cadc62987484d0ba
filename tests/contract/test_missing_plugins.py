"""What is said of a plugin of this project that is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import write_run

WITHOUT = """
import importlib.metadata as metadata, importlib.util as util, sys
extra, sys.argv[1:] = sys.argv[1], sys.argv[2:]
found, spec = metadata.entry_points, util.find_spec
metadata.entry_points = lambda **asked: [each for each in found(**asked) if each.name != extra]
util.find_spec = lambda name, *rest: None if name == f"meshwright_{extra}" else spec(name, *rest)
from meshwright.cli.main import main
main()
"""
"""Runs the command line as if the plugin of an extra were not there."""


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("run", ["train", "RUN"]),
        ("plan", ["plan", "RUN", "--world", "2"]),
        ("plan", ["train", "RUN", "--set", "plan.enabled=true"]),
        pytest.param("plan", ["train", "RUN", "--plan-only"], marks=pytest.mark.slow),
        ("cluster", ["launch", "RUN", "--to", "slurm"]),
        ("cluster", ["train", "RUN", "--set", "launch.nodes=2"]),
        ("watch", ["watch", "."]),
        ("diagnose", ["doctor"]),
        ("objectives", ["train", "RUN", "--set", "objective=dpo"]),
        ("replicate", ["train", "RUN", "--set", "checkpoint.replicate=neighbor"]),
        ("fsdp2", ["train", "RUN"]),
    ],
)
def test_the_line_that_installs_it_is_given(extra: str, arguments: list[str], tmp_path: Path) -> None:
    run_file = str(write_run(tmp_path))
    command = [sys.executable, "-c", WITHOUT, extra, *(run_file if each == "RUN" else each for each in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"pip install -c constraints.txt -e '.[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
