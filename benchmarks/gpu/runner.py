"""Run parts one after another, each in processes of its own and under a limit, and write the results after each.

A part that fails, hangs or is killed costs its own result only: its process group is ended at the limit, and the JSON
file holds what the parts before it have found.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOG_CHARACTERS = 3000
"""How much of a command's output is kept: its end."""

Report = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """Commands that measure one thing.

    Attributes:
        name: of the part, for the command line and the report.
        claim: the sentence that the part checks.
        page: the document that makes the claim.
        limit_s: seconds for all commands together.
        commands: by name; they run one after another. "{json}" stands for a file to write a result to, "{run}" for the
            directory of a run, "{out}" for the directory of the report.
        until: a pattern of the output after which a command is ended and counts as done: what follows the last step
            of a large model, saving it, takes longer than its steps.
    """

    name: str
    claim: str
    page: str
    limit_s: int
    commands: Mapping[str, Sequence[str]]
    until: str | None = None


@dataclass
class Runner:
    """Runs parts while there is time.

    Args:
        out: directory of the report, `gpu.json`, which is replaced after each part.
        budget_s: seconds for all parts together.
        about: what the report begins with.
    """

    out: Path
    budget_s: float
    about: Mapping[str, Any]
    parts: dict[str, Report] = field(default_factory=dict)

    def run(self, parts: Sequence[Part]) -> Report:
        """Run the parts in their order, and return the report."""
        begin = time.monotonic()
        for part in parts:
            left = self.budget_s - (time.monotonic() - begin)
            if part.limit_s > left:
                reason = f"needs {part.limit_s} s, and {left:.0f} s were left"
                self.parts[part.name] = {"status": "not reached", "reason": reason}
            else:
                self.parts[part.name] = self._run(part)
            found = self.parts[part.name]
            print(f"{part.name}: {found['status']}, {found.get('reason') or str(found['seconds']) + ' s'}", flush=True)
            self._write()
        return self.report()

    def report(self) -> Report:
        return {**self.about, "parts": self.parts}

    def _run(self, part: Part) -> Report:
        start = time.monotonic()
        results: Report = {}
        for name, command in part.commands.items():
            left = part.limit_s - (time.monotonic() - start)
            words = [word.replace("{out}", str(self.out)) for word in command]
            results[name] = run_command(
                words, self.out / "work" / f"{part.name}-{name}", limit_s=left, until=part.until
            )
        failed = [name for name, each in results.items() if each["ending"] != "done"]
        status = f"failed: {', '.join(failed)}" if failed else "done"
        return {"status": status, "seconds": round(time.monotonic() - start, 1), "results": results}

    def _write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        scratch = self.out / "gpu.json.tmp"
        scratch.write_text(json.dumps(self.report(), indent=1) + "\n", encoding="utf-8")
        scratch.replace(self.out / "gpu.json")


def run_command(command: Sequence[str], place: Path, *, limit_s: float, until: str | None = None) -> Report:
    """Run one command in a process group of its own, which is killed at the limit, or when its output matches `until`.

    Returns:
        `ending` ("done", "exit code N" or "limit"), `seconds`, the JSON that it has written, the last steps and the
        events of its run, what it says of its plan, and the end of the output of one that failed.
    """
    place.mkdir(parents=True, exist_ok=True)
    wrote, log, run = place / "result.json", place / "log.txt", place / "run"
    words = [word.replace("{json}", str(wrote)).replace("{run}", str(run)) for word in command]
    start, ending = time.monotonic(), "limit"
    with log.open("w", encoding="utf-8") as stream:
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(
            words, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
        while ending == "limit" and time.monotonic() - start < limit_s:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(0.2)
                ending = "done" if code == 0 else f"exit code {code}"
            if (
                ending == "limit"
                and until is not None
                and re.search(until, log.read_text(errors="replace"), re.MULTILINE)
            ):
                ending = "done"
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    shown = " ".join(command).replace(sys.executable, "python").replace(f"{ROOT}/", "")
    found: Report = {"ending": ending, "seconds": round(time.monotonic() - start, 1), "command": shown}
    if wrote.is_file():
        found["result"] = json.loads(wrote.read_text(encoding="utf-8"))
    if (run / "metrics.jsonl").is_file():
        found["steps"] = _lines(run / "metrics.jsonl")[-3:]
        found["events"] = _lines(run / "events.jsonl")
    if planned := [line for line in text.splitlines() if line.startswith(("planned:", "plan compared"))]:
        found["planned"] = planned
    return found if ending == "done" else {**found, "output": text[-LOG_CHARACTERS:]}


def _lines(path: Path) -> list[Any]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
