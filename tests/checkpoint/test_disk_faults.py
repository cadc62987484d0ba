"""Disks that are full, read-only, broken or slow, under real runs: what goes on does so bit for bit, and all is told.

A library that is loaded before others (tests/faults/disk.c) makes calls of the system fail on some paths.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.commands import LAUNCHER_VARIABLES, write_run

from meshwright.checkpoint import read_manifest, steps_in
from meshwright.checkpoint.manifest import verify
from meshwright.train.lines import Lines
from meshwright.train.report import MEASURED

STEPS, EVERY = 8, 2
FULL, READ_ONLY, BROKEN = 28, 30, 5
COMPILER = shutil.which("gcc") or shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler, and Linux")


@dataclass(frozen=True)
class Ended:
    """A run that has ended, and what it left."""

    code: int
    output: str
    directory: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """What is the same whenever the run is repeated."""
        return [{key: value for key, value in line.items() if key not in MEASURED} for line in self.lines]

    @property
    def weights(self) -> dict[str, str]:
        files = sorted((self.directory / "model").glob("*.safetensors"))
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def whole(self, root: Path | None = None) -> list[int]:
        """Steps of the checkpoints, each of which is read to its last byte."""
        root = root or self.directory / "checkpoints"
        for _, path in steps_in(root):
            manifest = read_manifest(path)
            verify(path, manifest, list(manifest.files))
        assert not [path.name for path in root.iterdir() if path.suffix], "leftovers"
        return sorted(step for step, _ in steps_in(root))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("library") / "disk.so"
    source = Path(__file__).parents[1] / "faults" / "disk.c"
    subprocess.run([str(COMPILER), "-O2", "-shared", "-fPIC", "-o", str(path), str(source), "-ldl"], check=True)
    return path


class Runs:
    """Runs that differ in what their disk does."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.directory, self.library = directory, library
        self.file, self.count = write_run(directory), 0

    def __call__(self, faults: str = "", *, name: str | None = None, **checkpoint: Any) -> Ended:
        self.count += 1
        output = self.directory / (name or f"run-{self.count}")
        values = yaml.safe_load(self.file.read_text())
        values |= {"plan": {"enabled": False}, "steps": STEPS, "output_dir": str(output), "sample": None}
        values["checkpoint"] = {"every": EVERY, "keep_last": None, "on_error": "continue", **checkpoint}
        file = self.directory / f"{output.name}.yaml"
        file.write_text(yaml.safe_dump(values))
        environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
        if faults:
            environment |= {"LD_PRELOAD": str(self.library), "DISK_FAULTS": faults}
        command = [sys.executable, "-m", "meshwright", "train", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        return Ended(done.returncode, done.stdout + done.stderr, output)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), library)


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> Ended:
    ended = runs(name="undisturbed")
    assert ended.code == 0, ended.output
    assert ended.whole() == [2, 4, 6, 8]
    return ended


FAULTS = {
    "full": (f"step-00000004.writing write {FULL} 0 -1", "No space left on device"),
    "read-only": (f"step-00000004.writing open,mkdir,rename {READ_ONLY} 0 -1", "Read-only file system"),
    "broken while it is written": (f"step-00000004.writing write {BROKEN} 0 -1", "Input/output error"),
    "broken when it is to be stored": (f"step-00000004.writing fsync {BROKEN} 0 -1", "Input/output error"),
    "broken when it gets its name": (f"step-00000004.writing rename {BROKEN} 0 -1", "Input/output error"),
}


@pytest.mark.parametrize(
    ("fault", "asynchronous"), [*((fault, True) for fault in FAULTS), ("full", False)], ids=[*FAULTS, "full, waiting"]
)
def test_training_goes_on_and_later_checkpoints_are_written(
    fault: str, asynchronous: bool, runs: Runs, undisturbed: Ended
) -> None:
    rules, told = FAULTS[fault]
    ended = runs(rules, retries=0, asynchronous=asynchronous)
    assert ended.code == 0, ended.output
    assert ended.whole() == [2, 6, 8]
    assert (ended.numbers, ended.weights) == (undisturbed.numbers, undisturbed.weights)
    assert len(re.findall(r"step-00000004 c\w+ (?:not )?be written", ended.output)) == 1
    assert told in ended.output
    assert "Training goes on (checkpoint.on_error=continue)" in ended.output
    assert "Traceback" not in ended.output


@pytest.mark.parametrize("asynchronous", [True, False], ids=["asynchronous", "waiting"])
def test_the_run_stops_where_it_is_told_to(asynchronous: bool, runs: Runs, undisturbed: Ended) -> None:
    name = f"stopped-{asynchronous}"
    faults = f"step-00000004.writing write {FULL} 0 -1"
    ended = runs(faults, name=name, on_error="stop", asynchronous=asynchronous)
    assert ended.code == 1
    assert re.search(r"error: the checkpoint .*step-00000004 could not be written: .*No space left", ended.output)
    assert "Traceback" not in ended.output
    assert ended.whole() == [2]
    # The disk has room again: the same command goes on.
    again = runs(name=name, on_error="stop", asynchronous=asynchronous)
    assert again.code == 0, again.output
    assert again.whole() == [2, 4, 6, 8]
    assert (again.numbers, again.weights) == (undisturbed.numbers, undisturbed.weights)


def test_what_may_be_gone_a_moment_later_is_tried_again(runs: Runs, undisturbed: Ended) -> None:
    ended = runs(f"step-00000004.writing fsync {BROKEN} 0 2", retries=2)
    assert ended.code == 0, ended.output
    assert ended.whole() == [2, 4, 6, 8]
    assert ended.numbers == undisturbed.numbers
    assert "Trying again in" in ended.output
    assert "(2 of 2)" in ended.output
    # A full disk does not become well by waiting.
    full = runs(f"step-00000004.writing write {FULL} 0 -1", retries=2)
    assert full.whole() == [2, 6, 8]
    assert "Trying again" not in full.output


def test_a_disk_that_cannot_be_read_is_tried_again_and_then_told(runs: Runs, undisturbed: Ended) -> None:
    name = "read"
    runs(f"step-00000008.writing write {FULL} 0 -1", name=name, on_error="stop", retries=0)
    refused = runs(f"step-00000006/tensors read {BROKEN} 0 -1", name=name, retries=1)
    assert refused.code == 2
    assert re.search(r"error: \S*step-00000006 cannot be read: .*Input/output error", refused.output)
    assert "Traceback" not in refused.output
    ended = runs(f"step-00000006/tensors read {BROKEN} 0 1", name=name, retries=1)
    assert ended.code == 0, ended.output
    assert "Trying again in" in ended.output
    assert "going on from" in ended.output
    assert ended.whole() == [2, 4, 6, 8]
    assert (ended.numbers, ended.weights) == (undisturbed.numbers, undisturbed.weights)


def test_a_slow_disk_holds_no_step_up(runs: Runs, undisturbed: Ended) -> None:
    # Of each file of the checkpoint of step 4 that is stored, a second: some seconds in all.
    ended = runs("step-00000004.writing fsync 0 1000 -1", every=4)
    assert ended.code == 0, ended.output
    assert ended.numbers == undisturbed.numbers
    saving = {line["step"] - 1: line["times"]["save"] for line in ended.lines if "save" in line["times"]}
    assert saving.keys() == {4}
    assert saving[4] < 0.5
    events = [json.loads(line) for line in (ended.directory / "events.jsonl").read_text().splitlines()]
    waited = {each["step"]: each["seconds"] for each in events if each["event"] == "checkpoint"}
    # The next one waits for it.
    assert waited[8] > 2 > 0.5 > waited[4]
    waiting = runs("step-00000004.writing fsync 0 300 -1", every=4, asynchronous=False)
    assert {line["step"]: line["times"]["save"] for line in waiting.lines if "save" in line["times"]}[5] > 1


# -- what else is written


def test_metrics_wait_for_a_disk_that_takes_none(runs: Runs, undisturbed: Ended) -> None:
    ended = runs(f"metrics.jsonl write {FULL} 0 3")
    assert ended.code == 0, ended.output
    assert ended.numbers == undisturbed.numbers
    assert ended.output.count("metrics.jsonl cannot be written: [Errno 28]") == 1
    stopped = runs(f"metrics.jsonl write {FULL} 0 -1", on_error="stop")
    assert stopped.code == 1
    assert re.search(r"error: \S*metrics\.jsonl cannot be written: .*No space left", stopped.output)
    assert "Traceback" not in stopped.output


def test_other_files_of_a_run_are_told_once_and_end_nothing(runs: Runs, undisturbed: Ended) -> None:
    ended = runs(f"ranks/ open,write {READ_ONLY} 0 -1;events.jsonl open,write {READ_ONLY} 0 -1")
    assert ended.code == 0, ended.output
    assert (ended.numbers, ended.weights) == (undisturbed.numbers, undisturbed.weights)
    for name in ("ranks/00000.jsonl", "ranks/00001.jsonl", "events.jsonl"):
        assert ended.output.count(f"{name} cannot be written") == 1, ended.output


def test_lines_are_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.write_text("first\n")
    lines, write = Lines(path), os.write

    def half(file: int, content: Any) -> int:
        if len(content) < 3:
            raise OSError(FULL, "No space left on device")
        return write(file, content[: len(content) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        assert lines.add("second\n") is not None
        assert path.read_text() != "first\n"
        assert lines.add("third\n") is not None
    assert lines.add("fourth\n") is None
    lines.close()
    assert path.read_text() == "first\nsecond\nthird\nfourth\n"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One that can be made as small as one likes."""
    path = tmp_path / "disk"
    path.mkdir()
    try:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full_keeps_what_it_has(runs: Runs, undisturbed: Ended, small_disk: Path) -> None:
    size = sum(each.size for each in read_manifest(undisturbed.directory / "checkpoints/step-00000002").files.values())
    subprocess.run(["mount", "-o", f"remount,size={int(1.7 * size) // 4096 * 4}k", str(small_disk)], check=True)
    ended = runs(to=str(small_disk / "checkpoints"))
    assert ended.code == 0, ended.output
    assert "No space left on device" in ended.output
    assert ended.whole(small_disk / "checkpoints") == [2]
    assert (ended.numbers, ended.weights) == (undisturbed.numbers, undisturbed.weights)
