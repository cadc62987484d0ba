"""The version, and completion in shells: known without torch, and complete with the subcommands of plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright

BIN = Path(sys.executable).parent
COMMANDS = {"train", "plan", "init", "explain", "doctor", "checkpoint", "data", "export", "schema"}


def run(line: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False, env=environment)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_the_version_is_told_without_torch():
    done = run([sys.executable, "-X", "importtime", "-m", "meshwright", "--version"])
    assert done.stdout == f"meshwright {meshwright.__version__}\n"
    # No command's implementation, nor torch.
    heavy = {"torch", "transformers", "matplotlib", "meshwright_plan.asked", "meshwright_watch.server"}
    assert not imported(done) & heavy


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_and_all_subcommands_without_torch(shell):
    script = run(["meshwright"], _MESHWRIGHT_COMPLETE=f"source_{shell}")
    assert script.returncode == 0
    assert f"complete_{shell}" in script.stdout
    # What the script asks for when a word is completed.
    asked = {"_TYPER_COMPLETE_ARGS": "meshwright ", "COMP_WORDS": "meshwright ", "COMP_CWORD": "1"}
    asked |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_MESHWRIGHT_COMPLETE": f"complete_{shell}"}
    code = "import sys; sys.argv[0] = 'meshwright'; from meshwright.cli.main import main; main()"
    found = run([sys.executable, "-X", "importtime", "-c", code], **asked)
    assert not {name for name in COMMANDS if name not in found.stdout}
    # Of the plugin `pipeline`.
    assert "pipeline" in found.stdout
    assert not imported(found) & {"torch", "transformers"}


def test_bash_completes_subcommands_and_options_by_the_script_that_is_shown():
    script = """
        eval "$(meshwright --show-completion)"
        for words in "meshwright tra" "meshwright train --plan"; do
            COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _meshwright_completion meshwright
            echo "${COMPREPLY[@]}"
        done
    """
    done = run(["bash", "--norc", "-c", script])
    assert done.stdout.split() == ["train", "--plan-only"], done.stderr
