"""Run what a new user does in the first hour, as transcripts: `$ command`, then what it prints.

    python tests/journeys/journeys.py                # all
    python tests/journeys/journeys.py engineer --record
    python tests/journeys/journeys.py slips --record    # the answers to slips.yaml

A transcript is `tests/journeys/NAME.txt`. Its first line says who the user is. A line of output that begins with `= `
is also printed by a page that a line `shown in PATH` names. A line `...` stands for any lines, `...` within a line for
any text; numbers may differ. `> ` continues a command.
`--record` writes the times to benchmarks/results/journeys.json, of which docs/reference/proofs/first-hour.md is made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

DIRECTORY = Path(__file__).parent
ROOT = DIRECTORY.parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "journeys.json"
_LINKED = (
    "examples",
    "docs",
    "plugins",
    "core",
    "tests",
    "tools",
    "mkdocs.yml",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
)
_NUMBER = re.compile(r"[-+]?\d+(,\d+)*(\.\d+)?(e[-+]?\d+)?%?")
TIMEOUT_S = 1200


@dataclass
class Step:
    command: str
    expected: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)


@dataclass
class Journey:
    name: str
    user: str
    pages: list[str]
    steps: list[Step]


def load_journey(name: str) -> Journey:
    """Read a transcript."""
    user, *lines = (DIRECTORY / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    journey = Journey(name, user, [], [])
    for line in lines:
        if line.startswith("$ "):
            journey.steps.append(Step(line[2:]))
        elif journey.steps and line.startswith("> "):
            journey.steps[-1].command += "\n" + line[2:]
        elif journey.steps:
            journey.steps[-1].expected.append(line.removeprefix("= "))
            journey.steps[-1].shown += [line[2:]] if line.startswith("= ") else []
        elif line.startswith("shown in "):
            journey.pages.append(line.removeprefix("shown in "))
    return journey


def list_journeys() -> list[str]:
    """Return the names of all transcripts."""
    return sorted(path.stem for path in DIRECTORY.glob("*.txt"))


def normalize(text: str) -> str:
    """Return a line without its numbers, and with single spaces."""
    return " ".join(_NUMBER.sub("#", text).split())


def find_missing(expected: list[str], output: str) -> str | None:
    """Return the first expected line that the output does not have, in this order; None if it has all."""
    lines = iter(map(normalize, output.splitlines()))
    for line in expected:
        if line.strip() in ("", "..."):
            continue
        pattern = re.compile(".*".join(map(re.escape, normalize(line).split("..."))))
        if not any(pattern.fullmatch(each) for each in lines):
            return line
    return None


def run_journey(journey: Journey, directory: Path) -> list[float]:
    """Run the steps in `directory`; return their times [s]. Raises AssertionError at the first that differs."""
    for name in _LINKED:
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    environment |= {"OMP_NUM_THREADS": "1"}
    times = []
    for step in journey.steps:
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-uo", "pipefail", "-c", step.command],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        times.append(time.monotonic() - start)
        shown = f"$ {step.command}\n{done.stdout[-6000:]}"
        missing = find_missing([*step.expected], done.stdout)
        assert missing is None, f"{journey.name}: no line {missing!r} in\n{shown}"
        assert done.returncode == 0 or "exit code" in "".join(step.expected), f"{journey.name}: {shown}"
    return times


def answer_slips() -> dict[str, str]:
    """Return the error message of each slip, by its command line."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    answers = {}
    for slip in yaml.safe_load((DIRECTORY / "slips.yaml").read_text())["slips"]:
        line = f"meshwright {slip['line'].replace('FILE', 'examples/stdlib.yaml')}"
        done = subprocess.run(
            line.split(), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        answers[line] = done.stderr.rpartition("\nsee ")[0]
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="journeys; default: all")
    parser.add_argument("--record", action="store_true", help="write the times to results.json")
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if "slips" in options.names:
        answers, ratings = answer_slips(), {line: each["rating"] for line, each in results.get("slips", {}).items()}
        results["slips"] = {line: {"answer": answer, "rating": ratings.get(line)} for line, answer in answers.items()}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        return
    for name in options.names or list_journeys():
        journey = load_journey(name)
        with tempfile.TemporaryDirectory() as directory:
            times = run_journey(journey, Path(directory))
        sys.stdout.write(f"{name}: {sum(times):.0f} s in {len(times)} commands\n")
        sys.stdout.flush()
        results[name] = {"user": journey.user, "seconds": round(sum(times)), "commands": len(times)}
        if options.record:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
