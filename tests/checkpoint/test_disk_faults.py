"""Disks that are full, broken or too small, under real runs: what continues does so bit for bit, and all is reported.

A library that is loaded before others (tests/faults/faulty_disk.c) makes system calls fail on some paths.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkpoint_runs import CheckpointRuns, FinishedRun

from meshwright_run.metrics_report import LineWriter

FULL, READ_ONLY, BROKEN = 28, 30, 5
FULL_AT_4 = f"step-00000004.writing write {FULL} 0 -1"
COMPILER = shutil.which("gcc") or shutil.which("cc")
no_library = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler, and Linux")
Run = Callable[..., FinishedRun]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a run of some name, with some faults of its disk."""
    library = tmp_path_factory.mktemp("library") / "disk.so"
    source = Path(__file__).parents[1] / "faults" / "faulty_disk.c"
    subprocess.run([str(COMPILER), "-O2", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    runs = CheckpointRuns(tmp_path_factory.mktemp("runs"), 8, on_error="continue")

    def run(name: str, faults: str = "", **checkpoint: Any) -> FinishedRun:
        environment = {"LD_PRELOAD": str(library), "DISK_FAULTS": faults} if faults else {}
        return runs(name, environment=environment, **checkpoint)

    return run


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> FinishedRun:
    ended = run("undisturbed")
    assert ended.code == 0, ended.output
    assert ended.verify_checkpoints() == [2, 4, 6, 8]
    return ended


def _check(ended: FinishedRun, undisturbed: FinishedRun, steps: list[int], *reported: str) -> None:
    """Check that a run ended well, with the numbers of one that was not disturbed, and reported something."""
    assert (ended.code, "Traceback" in ended.output) == (0, False), ended.output
    assert ended.verify_checkpoints() == steps
    assert ended.reproducible_results == undisturbed.reproducible_results
    for text in reported:
        assert text in ended.output, ended.output


@no_library
@pytest.mark.slow
def test_the_run_stops_where_it_is_reported_to(run: Run, undisturbed: FinishedRun) -> None:
    ended = run("stopped", FULL_AT_4, on_error="stop")
    ended.assert_fails(1, "No space left")
    assert re.search(r"error: the checkpoint .*step-00000004 could not be written: .*No space left", ended.output)
    assert ended.verify_checkpoints() == [2]
    # The disk has room again: the same command resumes.
    _check(run("stopped", on_error="stop"), undisturbed, [2, 4, 6, 8])


@no_library
@pytest.mark.slow
def test_what_may_be_gone_a_moment_later_is_tried_again(run: Run, undisturbed: FinishedRun) -> None:
    ended = run("retried", f"step-00000004.writing fsync {BROKEN} 0 2", retries=2)
    _check(ended, undisturbed, [2, 4, 6, 8], "(2 of 2)")
    # A full disk does not get better by waiting.
    full = run("full", FULL_AT_4, retries=2)
    assert full.verify_checkpoints() == [2, 6, 8]
    assert "Trying again" not in full.output


@no_library
@pytest.mark.slow
def test_a_disk_that_cannot_be_read_is_tried_again_and_then_reported(run: Run, undisturbed: FinishedRun) -> None:
    run("read", f"step-00000008.writing write {FULL} 0 -1", on_error="stop", retries=0)
    refused = run("read", f"step-00000006/tensors read {BROKEN} 0 -1", retries=1)
    refused.assert_fails(2, "Input/output error")
    assert re.search(r"error: \S*step-00000006 cannot be read: .*Input/output error", refused.output)
    ended = run("read", f"step-00000006/tensors read {BROKEN} 0 1", retries=1)
    _check(ended, undisturbed, [2, 4, 6, 8])
    assert "Trying again in" in ended.output
    assert "resuming from" in ended.output


@no_library
@pytest.mark.slow
def test_metrics_wait_for_a_disk_that_takes_none_and_other_files_are_reported_once(
    run: Run, undisturbed: FinishedRun
) -> None:
    rules = f"ranks/ open,write {READ_ONLY} 0 -1;events.jsonl open,write {READ_ONLY} 0 -1"
    ended = run("metrics", f"{rules};metrics.jsonl write {FULL} 0 3")
    _check(ended, undisturbed, [2, 4, 6, 8], "metrics.jsonl cannot be written: [Errno 28]")
    for name in ("metrics.jsonl", "ranks/00000.jsonl", "ranks/00001.jsonl", "events.jsonl"):
        assert ended.output.count(f"{name} cannot be written") == 1, ended.output
    stopped = run("no-metrics", f"metrics.jsonl write {FULL} 0 -1", on_error="stop")
    stopped.assert_fails(1, "No space left")
    assert re.search(r"error: \S*metrics\.jsonl cannot be written: .*No space left", stopped.output)


def test_lines_are_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_text("first\n")
    lines, write = LineWriter(path), os.write

    def half(file: int, content: Any) -> int:
        if len(content) < 3:
            raise OSError(FULL, "No space left on device")
        return write(file, content[: len(content) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        assert lines.append("second\n") is not None
        assert path.read_text() != "first\n"
        assert lines.append("third\n") is not None
    assert lines.append("fourth\n") is None
    lines.close()
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"
