"""Record what each command prints, for docs/reference/cli.md.

    python tools/command_outputs.py    # run every command on the CPU, and write benchmarks/results/commands.json

The commands run one after another in a temporary directory, on a small model. Takes a few minutes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "commands.json"
WIDTH = 100
"""Columns of the terminal."""


@dataclass(frozen=True)
class Example:
    """An example of a command.

    Attributes:
        words: what follows `meshwright`.
        shown: number of lines that the page shows from the beginning and from the end of the output.
        stdin: input of the command.
        is_server: whether the command runs until it is interrupted.
        exit_code: what the command ends with, except for a server.
    """

    words: str
    shown: tuple[int, int] = (12, 0)
    stdin: str = ""
    is_server: bool = False
    exit_code: int = 0


SETUP = "train run.yaml --set optimizer.lr=2e-3 --set output_dir=runs/b --set profile.steps=[15,15]"
"""Makes the second run of the commands that compare two."""
EXAMPLES = {
    "init": Example("init run.yaml --yes --devices 2 --strategy fsdp2 --steps 20"),
    "train": Example(
        "train run.yaml --set checkpoint.every=10 --set profile.steps=[15,15] --set output_dir=runs/a", (6, 2)
    ),
    "strategies": Example("strategies", (7, 0)),
    "schema": Example("schema", (8, 1)),
    "plan": Example("plan run.yaml --world 64 --device h100-80gb --set batch_size=512", (7, 1)),
    "explain": Example("explain run.yaml --world 8 --set tp_size=2"),
    "launch": Example(
        "launch run.yaml --to slurm --nodes 2 --gpus-per-node 2 --set output_dir=/shared/a --dry-run", (14, 0)
    ),
    "pipeline show": Example("pipeline show run.yaml --set pp_size=2"),
    "data show": Example("data show run.yaml --rows 1"),
    "checkpoint show": Example("checkpoint show runs/a/checkpoints"),
    "checkpoint verify": Example("checkpoint verify runs/a/checkpoints"),
    "export": Example("export runs/a/checkpoints/step-00000020 exported"),
    "eval": Example("eval runs/a --max-sequences 32"),
    "chat": Example("chat runs/a --temperature 0 --max-new-tokens 8", (4, 0), stdin="def main\n"),
    "replay": Example("replay runs/a --step 15"),
    "diff": Example("diff runs/a runs/b --no-replay", exit_code=1),
    "profile show": Example("profile show runs/a --rows 3", (5, 0)),
    "profile compare": Example("profile compare runs/a runs/b --rows 3", (6, 0)),
    "doctor": Example("doctor", (6, 0)),
    "check": Example("check ddp --ranks 2", (6, 3)),
    "watch": Example("watch runs/a --no-browser", (1, 0), is_server=True),
}
"""An example of each command, in the order in which they run."""


def record_outputs(directory: Path) -> dict[str, str]:
    """Run all examples in a directory; return the output of each command."""
    found = {}
    for name, example in EXAMPLES.items():
        found[name] = _run(example, directory)
        if name == "train":
            _run(Example(SETUP), directory)
    return found


def _run(example: Example, directory: Path) -> str:
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright", *example.words.split()],
        cwd=directory,
        env={**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    first = ""
    if example.is_server:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
    text, _ = process.communicate(example.stdin, timeout=900)
    if process.returncode != example.exit_code and not example.is_server:
        raise RuntimeError(f"meshwright {example.words} ended with {process.returncode}:\n{text}")
    # A server that is interrupted while it starts may print more.
    text = (first if example.is_server else text).replace(str(directory), ".")
    lines = [re.sub(r"token=[\w-]+", "token=...", line.rstrip()) for line in text.splitlines()]
    return "\n".join(lines).strip("\n")


def shorten(output: str, first: int, last: int) -> list[str]:
    """Return the first and last lines of an output, with `...` in place of the others."""
    lines = output.splitlines()
    return lines if len(lines) <= first + last + 1 else [*lines[:first], "...", *lines[len(lines) - last :]]


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        found = record_outputs(Path(directory).resolve())
    shown = {name: shorten(found[name], *example.shown) for name, example in EXAMPLES.items()}
    RESULTS.write_text(json.dumps(shown, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
