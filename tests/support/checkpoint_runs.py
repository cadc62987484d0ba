"""Commands that train a tiny model and save checkpoints, in a process of their own, and what they leave."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from support.commands import copy_environment, write_run

from meshwright.checkpoint import list_steps, read_manifest
from meshwright.checkpoint.manifest import verify_files
from meshwright_run.metrics_report import NONDETERMINISTIC_FIELDS


@dataclass(frozen=True)
class FinishedRun:
    """A run that has ended."""

    code: int
    output: str
    directory: Path

    @property
    def reproducible_results(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Metrics that are the same when the run is repeated, and checksums of the weights."""
        lines = map(json.loads, (self.directory / "metrics.jsonl").read_text().splitlines())
        metrics = [{key: value for key, value in line.items() if key not in NONDETERMINISTIC_FIELDS} for line in lines]
        files = sorted((self.directory / "model").glob("*.safetensors"))
        return metrics, {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def verify_checkpoints(self, root: Path | None = None) -> list[int]:
        """Verify all checkpoints in a directory; return their steps."""
        root = root or self.directory / "checkpoints"
        for _, path in list_steps(root):
            manifest = read_manifest(path)
            verify_files(path, manifest, list(manifest.files))
        assert not [path.name for path in root.iterdir() if path.suffix], "leftovers"
        return sorted(step for step, _ in list_steps(root))

    def assert_fails(self, code: int, text: str) -> None:
        assert (self.code, text in self.output, "Traceback" in self.output) == (code, True, False), self.output


class CheckpointRuns:
    """Runs of so many steps that differ in their section `checkpoint`, of which `defaults` are the same."""

    def __init__(self, directory: Path, steps: int, **defaults: Any) -> None:
        self.directory, self.file, self.steps = directory, write_run(directory), steps
        self.defaults = {"every": 2, "keep_last": None, **defaults}

    def write_run_file(self, name: str, **checkpoint: Any) -> Path:
        """Write the run file of a name, which its output gets, too."""
        values = yaml.safe_load(self.file.read_text())
        output = str(self.directory / name)
        values |= {"plan": {"enabled": False}, "steps": self.steps, "output_dir": output, "sample": None}
        values["checkpoint"] = self.defaults | checkpoint
        file = self.directory / f"{name}.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    def start(self, file: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
        own = copy_environment() | environment
        command = [sys.executable, "-m", "meshwright", "train", str(file), *more]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=own, start_new_session=True, **pipes)

    def wait(self, name: str, process: subprocess.Popen[str]) -> FinishedRun:
        output, _ = process.communicate(timeout=240)
        return FinishedRun(process.returncode, output, self.directory / name)

    def __call__(
        self, name: str, *more: str, environment: dict[str, str] | None = None, **checkpoint: Any
    ) -> FinishedRun:
        return self.wait(name, self.start(self.write_run_file(name, **checkpoint), *more, **(environment or {})))
