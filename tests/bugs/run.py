"""Plant each bug of the catalogue, alone, and see the tests that it names fail.

    python tests/bugs/run.py                          # all; goes on where it was interrupted
    python tests/bugs/run.py --only clip              # those of some names or modules, by a pattern
    python tests/bugs/run.py --again                  # also those that have been tried
    python tests/bugs/run.py --only clip --tests ...  # which of other tests notice it; nothing is written
    python tests/bugs/run.py --table                  # write docs/tests.md from what is there

A bug is *caught* if each test that it names fails while it is planted, and passes while it is not. No file is changed:
the source is rewritten when it is imported, in every process of a test (`tests/mutation/sitecustomize.py`).
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from catalogue import BUGS, Bug

sys.path.insert(0, str(Path(__file__).parents[1]))

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOOK = HERE.parent / "mutation"
RESULTS = ROOT / "benchmarks" / "results" / "bugs.json"
TABLE = ROOT / "docs" / "tests.md"
PLANTED = "MESHWRIGHT_PLANTED_BUG"
PRELOAD = (
    *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "pydantic", "transformers"),
    "transformers.models.llama.modeling_llama",
)
"""What most tests import, and no module of ours among it."""
AT_MOST_S = 300
AT_ONCE = 12
"""Tests that are run in one process while no bug is planted."""

Outcomes = dict[str, tuple[str, float]]
"""By the id of a test: "passed", "failed", "skipped" or "not run", and how long it took [s]."""


def digest(bug: Bug) -> str:
    """What a result is of: another text, another place or other tests make it void."""
    return hashlib.sha256(repr(astuple(bug)[1:5]).encode()).hexdigest()[:16]


def is_done(bug: Bug, results: dict[str, Any]) -> bool:
    """Whether the bug, as it stands in the catalogue, has been tried."""
    return bool(results["bugs"].get(bug.name, {}).get("digest") == digest(bug))


def is_caught(bug: Bug, results: dict[str, Any]) -> bool:
    """Whether it has been tried, and each test that it names noticed."""
    return is_done(bug, results) and results["bugs"][bug.name]["status"] == "caught"


def read_results() -> dict[str, Any]:
    """Under "tests" how long each test takes that passes without a bug [s], and under "bugs" what became of each."""
    found: dict[str, Any] = {"tests": {}, "bugs": {}}
    if RESULTS.exists():
        found.update(json.loads(RESULTS.read_text(encoding="utf-8")))
    return found


def write_results(results: dict[str, Any]) -> None:
    names = {bug.name for bug in BUGS}
    results["bugs"] = {name: each for name, each in sorted(results["bugs"].items()) if name in names}
    results["tests"] = dict(sorted(results["tests"].items()))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(table(results), encoding="utf-8")


class Outcome:
    """A plugin of pytest that notes what becomes of each test."""

    def __init__(self) -> None:
        self.found: Outcomes = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        before, seconds = self.found.get(report.nodeid, ("", 0.0))
        outcome = "failed" if "failed" in (before, report.outcome) else before
        if report.when == "call" or report.outcome == "skipped":
            outcome = outcome or report.outcome
        self.found[report.nodeid] = (outcome, seconds + report.duration)


def run_tests(ids: Sequence[str], bug: Bug | None, log: Path, *, limit_s: float = AT_MOST_S) -> Outcomes:
    """Run tests in a process of their own, which has imported nothing of ours, with a bug or without one."""
    planted = json.dumps([bug.module, bug.old, bug.new]) if bug is not None else ""
    Path(os.environ[PLANTED]).write_text(planted, encoding="utf-8")
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os._exit(_run(ids, theirs, log))
    theirs.close()
    found: Outcomes = {}
    with suppress(EOFError):
        found = ours.recv() if ours.poll(limit_s) else {}
    _end(pid)
    return {each: found.get(each, ("not run", 0.0)) for each in ids}


def _run(ids: Sequence[str], told: Connection, log: Path) -> int:
    import pytest

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # The fork server is not this process's child, but is there.
    server: Any = multiprocessing.forkserver
    server._forkserver.ensure_running = server.ensure_running = lambda: None
    outcome = Outcome()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *ids], plugins=[outcome])
    told.send(outcome.found)
    atexit._run_exitfuncs()
    return 0


def _end(pid: int) -> None:
    """Let a process end, which lets its ranks end; or end it."""
    for _ in range(80):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.1)
    try:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def see_them_pass(ids: Sequence[str], results: dict[str, Any], log: Path) -> None:
    """Run tests without a bug, those of one file together; the time of those that pass is kept."""
    waiting = sorted({each for each in ids if each not in results["tests"]})
    for start in range(0, len(waiting), AT_ONCE):
        some = waiting[start : start + AT_ONCE]
        for test, (outcome, seconds) in run_tests(some, None, log, limit_s=4 * AT_MOST_S).items():
            if outcome == "passed":
                results["tests"][test] = round(seconds, 1)
            else:
                print(f"{outcome} without a bug: {test}", flush=True)
        write_results(results)


def try_bug(bug: Bug, results: dict[str, Any], log: Path) -> None:
    """Plant it, run the tests that it names, and keep what became of them."""
    start = time.perf_counter()
    found = run_tests(bug.caught_by, bug, log)
    failed = [test for test, (outcome, _) in found.items() if outcome == "failed"]
    status = "caught" if len(failed) == len(found) else "missed"
    results["bugs"][bug.name] = {
        "status": status,
        "digest": digest(bug),
        "outcomes": {test: outcome for test, (outcome, _) in found.items()},
        "seconds": round(time.perf_counter() - start, 1),
    }
    write_results(results)


def table(results: dict[str, Any]) -> str:
    """The page of docs."""
    seconds, first = tiers.read()
    tried = [bug for bug in BUGS if is_done(bug, results)]
    caught = [bug for bug in tried if is_caught(bug, results)]
    early = [bug for bug in caught if any(tiers.is_first(test, seconds, first) for test in bug.caught_by)]
    lines = [
        "# Planted bugs, and the tests that notice",
        "",
        "Mistakes as real code has had them, each planted alone into one module, in all processes of a test:",
        "`python tests/bugs/run.py`. The tests that are named fail under it, and pass without it; they are cheap ones, and",
        "not the only ones that do. A bug is caught by the first tier, `make test`, if one of them is in it; all of them",
        "are in the full one, `make test-full`. Seconds are those of the tests with the bug, on a machine with two cores.",
        "",
        f"{len(BUGS)} bugs, {len(caught)} caught by the full tier, {len(early)} of them by the first; "
        f"{len(tried) - len(caught)} not, {len(BUGS) - len(tried)} not tried.",
        "",
        "| bug | what it stands for | module | caught by | first | full | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for bug in sorted(BUGS, key=lambda each: (each.module, each.name)):
        tests = ", ".join(dict.fromkeys(f"`{test.partition('[')[0]}`" for test in bug.caught_by))
        taken = f"{results['bugs'][bug.name]['seconds']:.0f}" if is_done(bug, results) else "not tried"
        told = tests if is_caught(bug, results) or not is_done(bug, results) else f"**missed** by {tests}"
        cells = [bug.name, bug.kind, f"`{bug.module}`", told]
        cells += ["yes" if bug in those else "no" for those in (early, caught)]
        lines.append(f"| {' | '.join(cells)} | {taken} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a pattern of names or modules")
    parser.add_argument("--again", action="store_true", help="also what has been tried")
    parser.add_argument("--tests", nargs="+", default=[], help="try these instead of those that are named")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--until", type=float, default=float("inf"), help="begin no other bug after so many seconds")
    arguments = parser.parse_args()
    results = read_results()
    if arguments.table:
        write_results(results)
        return
    chosen = [bug for bug in BUGS if re.search(arguments.only, f"{bug.name} {bug.module}")]
    if not arguments.tests and not arguments.again:
        chosen = [bug for bug in chosen if not is_done(bug, results)]
    start = time.perf_counter()
    if PLANTED not in os.environ:
        with tempfile.TemporaryDirectory() as scratch:
            sys.exit(_with_hook(Path(scratch)))
    _prepare()
    log = Path(os.environ[PLANTED]).with_suffix(".log")
    for bug in chosen if arguments.tests else ():
        found = run_tests(arguments.tests, bug, log)
        print(f"{bug.name}:", *(f"\n  {outcome} {test}" for test, (outcome, _) in found.items()), flush=True)
    if arguments.tests:
        return
    see_them_pass([test for bug in chosen for test in bug.caught_by], results, log)
    chosen = [bug for bug in chosen if all(test in results["tests"] for test in bug.caught_by)]
    for bug in sorted(chosen, key=lambda each: sum(results["tests"][test] for test in each.caught_by)):
        if time.perf_counter() - start > arguments.until:
            break
        try_bug(bug, results, log)
        became = results["bugs"][bug.name]
        print(f"{time.perf_counter() - start:6.0f} s  {bug.name}: {became['status']}", flush=True)
        if became["status"] != "caught":
            print(*(f"    {outcome} {test}" for test, outcome in became["outcomes"].items()), sep="\n", flush=True)
    caught = sum(is_caught(bug, results) for bug in BUGS)
    print(f"{caught} of {len(BUGS)} caught, {sum(not is_done(bug, results) for bug in BUGS)} not tried")


def _with_hook(scratch: Path) -> int:
    """Run this program again, since Python looks for the hook at its start; bugs are told in a file."""
    file = scratch / "planted.json"
    file.touch()
    path = os.pathsep.join(each for each in (str(HOOK), os.environ.get("PYTHONPATH")) if each)
    environment = {**os.environ, PLANTED: str(file), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


def _prepare() -> None:
    """Import what tests import, and start the process that ranks are forked from."""
    multiprocessing.set_forkserver_preload([*PRELOAD])
    # What ranks write is no part of any test's output.
    silent, kept = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(silent, 2)
    multiprocessing.forkserver.ensure_running()
    os.dup2(kept, 2)
    for module in PRELOAD:
        __import__(module)


if __name__ == "__main__":
    main()
