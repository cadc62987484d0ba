"""A process that runs one case after another, which saves each of them the imports."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

CaseRunner = Callable[..., tuple[int, str, str]]


@contextmanager
def start_case_server(
    *command: str, log: Path, environment: Mapping[str, str] | None = None, timeout_s: float = 120
) -> Iterator[CaseRunner]:
    """Start a Python that reads a case from each line of stdin, and answers with "exit code N" at its end.

    Yields:
        A function that gives it the words of a case, and returns the exit code, stdout and stderr.
    """
    pipe = subprocess.PIPE
    words = [sys.executable, *command]
    with log.open("w") as stderr:
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=environment)
    with process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None
        assert answers is not None

        def run(*words: object) -> tuple[int, str, str]:
            start, out = log.stat().st_size, ""
            asks.write(" ".join(map(str, words)) + "\n")
            asks.flush()
            giving_up = threading.Timer(timeout_s, process.kill)
            giving_up.start()
            for line in answers:
                if line.startswith("exit code "):
                    giving_up.cancel()
                    return int(line.split()[2]), out, log.read_bytes()[start:].decode()
                out += line
            pytest.fail(f"{words} did not end; stderr: {log.read_bytes()[start:].decode()}")

        yield run
        asks.close()
        process.wait(timeout=timeout_s)
