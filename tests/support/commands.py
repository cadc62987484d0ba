"""Run files of a tiny model, and the command line in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from meshwright.cli import main as cli

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MODEL = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


def leave_launcher(patch: pytest.MonkeyPatch) -> None:
    """Remove a launcher's variables from the environment of this process."""
    for name in LAUNCHER_VARIABLES:
        patch.delenv(name, raising=False)


def copy_environment() -> dict[str, str]:
    """Return the environment without a launcher's variables."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}


def write_run(directory: Path) -> Path:
    """Write a tiny corpus and a run file that trains two steps on it; return the run file."""
    for index in range(2):
        words = [f"{(index + 3) * n % 17} is {'even' if n % 2 else 'odd'}" for n in range(200)]
        (directory / f"{index}.txt").write_text(", ".join(words) + ".", encoding="utf-8")
    (directory / "lines.jsonl").write_text(json.dumps({"text": "some other words " * 60}) + "\n", encoding="utf-8")
    corpus = [str(directory / "*.txt"), str(directory / "*.jsonl")]
    values: dict[str, Any] = {"strategy": "fsdp2", "strategy_config": {"reduce_dtype": "float64"}}
    values |= {"device": "cpu", "timeout_s": 60, "output_dir": str(directory / "out"), "model": MODEL}
    values |= {"nproc": 2, "threads_per_rank": 1}
    values |= {"steps": 2, "batch_size": 4, "micro_batch_size": 1, "sample": {"prompt": "4 is ", "max_new_tokens": 5}}
    values["data"] = {"corpus": corpus, "cache_dir": str(directory / "cache"), "vocab_size": 300, "seq_len": 16}
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def invoke_in_process(*arguments: object) -> tuple[int, str]:
    """Run a command in this process; return its exit code and output."""
    result = CliRunner().invoke(cli.app, [*map(str, arguments)])
    return result.exit_code, result.output


def run_command(
    *arguments: str, launcher: tuple[str, ...] = (), timeout_s: float = 240
) -> subprocess.CompletedProcess[str]:
    environment = copy_environment()
    words = [sys.executable, *launcher, "-m", "meshwright", *arguments]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
