"""A plan beside its run: told before it, compared with it, and a reason to refuse it."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.plan.beside.comparison import Comparison, accompany
from meshwright.plan.device import DEVICES
from meshwright.train.run_file import load_run

RUN: dict[str, Any] = {
    "strategy": "fsdp2",
    "model": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
    "data": {"vocab_size": 300, "seq_len": 32},
    "steps": 4,
    "batch_size": 8,
    "micro_batch_size": 2,
    "threads_per_rank": 1,
    "nproc": 2,
    "sample": None,
}


def _train(directory: Path, *arguments: str, launcher: tuple[str, ...] = (), **changes: Any) -> Any:
    documents = directory / "documents"
    documents.mkdir(exist_ok=True)
    for number in range(8):
        (documents / f"{number}.txt").write_text(f"{number} words and {number} more words\n" * 60, encoding="utf-8")
    data = {**RUN["data"], "corpus": str(documents / "*.txt"), "cache_dir": str(directory / "cache")}
    values = {**RUN, "data": data, "output_dir": str(directory / "run"), **changes}
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [sys.executable, "-m", *launcher, "meshwright", "train", str(file), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)


def _device(directory: Path, **changes: Any) -> str:
    values = yaml.safe_load((DEVICES / "cpu.yaml").read_text(encoding="utf-8"))
    file = directory / "device.yaml"
    file.write_text(yaml.safe_dump({**values, **changes}), encoding="utf-8")
    return str(file)


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy_config": {"reduce_dtype": "float64"}},
    "ddp": {"strategy": "ddp", "strategy_config": {"reduce_dtype": "float64"}},
    "bucketed": {"strategy": "ddp", "strategy_config": {"engine": "bucketed"}, "ema": {"decay": 0.9}},
    "tp": {"tp_size": 2, "strategy_config": {"sequence_parallel": True}},
    "pp": {"pp_size": 2},
    "megatron_fsdp": {"strategy": "megatron_fsdp"},
}


@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_holds_and_sends_what_was_planned(changes, tmp_path):
    done = _train(tmp_path, **changes)
    assert done.returncode == 0, done.stderr
    assert "planned: a rank holds" in done.stdout
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("plan beside step 3: ")]
    assert "memory at the peak: " in line
    assert line.count("as planned") == 3, line
    # Times are told of devices that are named.
    assert "time: " not in line


def test_ranks_of_a_launcher_have_a_plan_and_times_of_a_named_device_are_compared(tmp_path):
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", "-m")
    done = _train(tmp_path, launcher=launcher, plan={"device": _device(tmp_path)})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("plan beside step 3: ")]
    assert len(lines) == 1
    assert "; time: " in lines[0]
    assert "; a step of " in done.stdout


def test_a_run_that_does_not_fit_is_refused_with_what_would(tmp_path):
    device = _device(tmp_path, memory_bytes=100_000)
    refused = _train(tmp_path, plan={"device": device})
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: the run does not fit: a rank would take ")
    assert "--set strategy_config.activation_checkpointing=full" in refused.stderr
    assert not (tmp_path / "run").exists()
    warned = _train(tmp_path, "--set", "plan.when_too_large=warn", plan={"device": device})
    assert warned.returncode == 0, warned.stderr
    assert "warning: the run does not fit" in warned.stderr


def test_ranks_of_a_launcher_are_refused_together(tmp_path):
    device = _device(tmp_path, memory_bytes=100_000)
    launcher = ("torch.distributed.run", "--nproc-per-node", "2", "-m")
    refused = _train(tmp_path, launcher=launcher, plan={"device": device})
    assert refused.returncode != 0
    assert refused.stderr.count("error: the run does not fit") == 1
    assert not (tmp_path / "run").exists()


def test_a_plan_alone_starts_nothing(tmp_path):
    shown = _train(tmp_path, "--plan-only")
    assert shown.returncode == 0, shown.stderr
    assert "memory of a rank at its peak" in shown.stdout
    assert "reduce_scatter" in shown.stdout
    assert not (tmp_path / "run").exists()
    silent = _train(tmp_path, plan={"enabled": False})
    assert silent.returncode == 0, silent.stderr
    assert "planned:" not in silent.stdout
    assert "plan beside" not in silent.stdout


def test_a_plan_of_the_token_loss_refuses_no_run_of_another_objective(tmp_path):
    file = tmp_path / "run.yaml"
    device = _device(tmp_path, memory_bytes=1)
    file.write_text(yaml.safe_dump({**RUN, "plan": {"device": device}, "objective": "dpo"}), encoding="utf-8")
    found = accompany(load_run(file), 2)
    assert found is not None
    assert (found.plan, found.refusal) == (None, None)
    assert "objective='dpo'" in found.lines()[0]


def test_where_a_plan_was_off_is_told():
    row = {"kind": "all_gather", "group": "dp_shard", "ranks": 2, "dtype": "float32", "calls": 3, "bytes": 3_000_000}
    rank = {"peak_allocated_bytes": 10_000_000, "held_bytes": 5_000_000, "collectives": [row], "step_seconds": 1.0}
    comparison = Comparison({"ranks": [rank]}, has_time=True)
    comparison.found = copy.deepcopy(rank) | {"peak_allocated_bytes": 12_000_000}
    comparison.found["collectives"] = [{**row, "calls": 4, "bytes": 4_000_000}, {**row, "kind": "send"}]
    comparison.seconds = [9.0, 9.0, 9.0, 1.5]
    (line,) = comparison.compared()
    assert "memory at the peak: 12.0 MB, 10.0 MB planned (+20 %)" in line
    assert "memory between steps: 5.0 MB, as planned" in line
    assert "all_gather over dp_shard (float32): 3 calls of 3.0 MB planned, 4 of 4.0 MB done" in line
    assert "send over dp_shard (float32): 0 calls of 0.0 MB planned, 3 of 3.0 MB done" in line
    assert "time: 1.5 s, 1 s planned (+50 %)" in line
