"""Run tests under a change of one module, in processes forked from one that has imported torch and none of our modules.

The change is made by `tests/mutation/sitecustomize.py`, on import, in every process that a test starts.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CHANGE_VARIABLE = "MESHWRIGHT_TEST_CHANGE"  # Environment variable with the path of a file that describes the change
PRELOAD = (
    *("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "pydantic", "transformers"),
    "transformers.models.llama.modeling_llama",
)


def run_with_hook() -> int:
    """Run this program again with the import hook, which Python looks for when it starts; return its exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "change.json"
        file.touch()
        path = os.pathsep.join(filter(None, (str(ROOT / "tests" / "mutation"), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, CHANGE_VARIABLE: str(file), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


def start_fork_server() -> None:
    """Import what tests import, and start the process that ranks are forked from."""
    multiprocessing.set_forkserver_preload([*PRELOAD])
    # The fork server inherits stderr; what ranks write there belongs to no test.
    silent, kept = os.open(os.devnull, os.O_WRONLY), os.dup(2)
    os.dup2(silent, 2)
    multiprocessing.forkserver.ensure_running()
    os.dup2(kept, 2)
    for module in PRELOAD:
        __import__(module)


def run_tests(
    ids: Sequence[str], change: dict[str, str] | None, *, timeout_s: float = 300.0, stop_early: bool = False
) -> dict[str, tuple[str, str]]:
    """Run tests under a change (see `sitecustomize`) or none, with `stop_early` until one fails.

    Returns:
        By id: passed, failed, skipped or not run, and the error.
    """
    file = Path(os.environ[CHANGE_VARIABLE])
    file.write_text("" if change is None else json.dumps(change), encoding="utf-8")
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os._exit(_run([*ids, *["-x"] * stop_early], theirs, file.with_suffix(".log")))
    theirs.close()
    found: dict[str, tuple[str, str]] = {}
    with suppress(EOFError):
        found = ours.recv() if ours.poll(timeout_s) else {}
    _end_process_group(pid)
    return {each: found.get(each, ("not run", "")) for each in ids}


class _Outcomes:
    """Plugin of pytest that records the outcome of each test."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E  ")]
            self.outcomes[report.nodeid] = ("failed", " ".join(lines[:1] + lines[-1:])[:300])
        elif report.when == "call" or report.skipped:
            self.outcomes.setdefault(report.nodeid, (report.outcome, ""))


def _run(arguments: Sequence[str], outcome: Connection, log: Path) -> int:
    import pytest

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # The fork server runs already, but is not a child of this process.
    server: Any = multiprocessing.forkserver
    server._forkserver.ensure_running = server.ensure_running = lambda: None
    outcomes = _Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins=[outcomes])
    outcome.send(outcomes.outcomes)
    atexit._run_exitfuncs()
    return 0


def _end_process_group(pid: int) -> None:
    """Wait 8 s for a process to end its ranks and exit; then kill its group."""
    for _ in range(80):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.1)
    with suppress(ProcessLookupError, ChildProcessError):
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def collect_test_ids(files: Iterable[Any]) -> list[str]:
    """Ids of the tests in some files, without the long sweeps."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not zoo", "-p", "no:cacheprovider"]
    output = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [line for line in output.splitlines() if "::" in line]
