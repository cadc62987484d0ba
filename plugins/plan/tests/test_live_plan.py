"""A plan and its run: printed before it, compared with it, and a reason to refuse it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.commands import MODEL, run_command, write_run

from meshwright.plugin import Evaluation
from meshwright_plan.config import DEVICE_DIRECTORY
from meshwright_plan.live import PlanMonitor, create_plan_monitor, get_peak_flops
from meshwright_run.run_file import load_run

WIDER = {**MODEL, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LAUNCHER = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def _file(directory: Path, **changes: Any) -> Path:
    path = write_run(directory)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values |= {"steps": 4, "sample": None, "model": WIDER, "batch_size": 8, "micro_batch_size": 2} | changes
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def _device(directory: Path, **changes: Any) -> str:
    values = yaml.safe_load((DEVICE_DIRECTORY / "cpu.yaml").read_text(encoding="utf-8"))
    file = directory / "device.yaml"
    file.write_text(yaml.safe_dump({**values, **changes}), encoding="utf-8")
    return str(file)


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy_config": {"reduce_dtype": "float64"}},
    "bucketed": {"strategy": "ddp", "strategy_config": {"engine": "bucketed"}, "ema": {"decay": 0.9}},
    "tp": {"tp_size": 2, "strategy_config": {"sequence_parallel": True}},
    "pp": {"pp_size": 2},
    "megatron_fsdp": {"strategy": "megatron_fsdp", "strategy_config": {}},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_holds_and_sends_what_was_planned(changes, tmp_path):
    path = str(_file(tmp_path, checkpoint={"every": 2}, **changes))
    for step, total in ((3, 4), (7, 8)):  # The second run resumes after step 4.
        done = run_command("train", path, "--set", f"steps={total}")
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"plan compared with step {step}: ")]
        assert line.count("as planned") == 3, line
        # Times are reported for devices that are named.
        assert "time: " not in line


@pytest.mark.slow
def test_averages_that_a_resumed_run_starts_are_as_planned_and_a_first_step_is_not_compared(tmp_path):
    path = str(_file(tmp_path, checkpoint={"every": 1}, steps=1))
    changes = ("steps=4", "ema={decay: 0.9}", "resume={from: auto, allow: [ema]}")
    first = run_command("train", path)
    then = run_command("train", path, *(word for each in changes for word in ("--set", each)))
    assert (first.returncode, then.returncode) == (0, 0), first.stderr + then.stderr
    assert ("plan compared" in first.stdout, "resuming from" in then.stdout) == (False, True)
    (line,) = [line for line in then.stdout.splitlines() if line.startswith("plan compared with step 4: ")]
    assert line.count("as planned") == 3, line


@pytest.mark.slow
def test_ranks_of_a_launcher_have_a_plan_whose_times_are_compared_and_are_refused_together(tmp_path):
    path = _file(tmp_path, plan={"device": _device(tmp_path)})
    done = run_command("train", str(path), launcher=LAUNCHER)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("plan compared with step 3: ")]
    assert "; time: " in line
    _device(tmp_path, memory_bytes=100_000)
    refused = run_command("train", str(path), "--set", f"output_dir={tmp_path / 'other'}", launcher=LAUNCHER)
    assert (refused.returncode != 0, refused.stderr.count("error: the run does not fit")) == (True, 1)
    assert not (tmp_path / "other").exists()


def test_a_run_that_does_not_fit_is_refused_with_what_would(tmp_path, capsys):
    device = _device(tmp_path, memory_bytes=100_000)
    refused = create_plan_monitor(load_run(_file(tmp_path, strategy_config={}, plan={"device": device})), 2)
    assert "--set strategy_config.activation_checkpointing=full" in str(refused.refusal_error)
    asked = {"device": device, "on_oom": "warn"}
    assert create_plan_monitor(load_run(_file(tmp_path, strategy_config={}, plan=asked)), 2).refusal_error is None
    assert "warning: the run does not fit" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_alone_starts_nothing(tmp_path):
    path = str(_file(tmp_path, plan={"device": _device(tmp_path, memory_bytes=100_000)}))
    shown, refused = run_command("train", path, "--plan-only"), run_command("train", path)
    assert shown.returncode == 0, shown.stderr
    assert "NO: " in shown.stdout
    assert " usable" in shown.stdout
    assert (refused.returncode, refused.stderr[:30]) == (2, "error: the run does not fit: a")
    assert not (tmp_path / "out").exists()


def test_a_plan_of_the_token_loss_refuses_no_run_of_another_objective_and_none_is_made_unasked(tmp_path):
    asked = {"device": _device(tmp_path, memory_bytes=1)}
    found = create_plan_monitor(load_run(_file(tmp_path, plan=asked, objective="dpo")), 2)
    assert (found.plan, found.refusal_error) == (None, None)
    assert create_plan_monitor(load_run(_file(tmp_path, plan={"enabled": False})), 2) is None
    assert get_peak_flops(torch.device("cpu"), "float32") is None


def test_where_a_plan_was_off_is_reported():
    row = {"kind": "all_gather", "group": "dp_shard", "ranks": 2, "dtype": "float32", "calls": 3, "bytes": 3 << 20}
    rank = {
        "peak_allocated_bytes": 10 << 20,
        "persistent_bytes": 5 << 20,
        "collectives": [row],
        "step_seconds": 1.0,
    }
    comparison = PlanMonitor({"ranks": [rank]}, has_device_times=True)
    comparison.measured = copy.deepcopy(rank) | {"peak_allocated_bytes": 12 << 20}
    comparison.measured["collectives"] = [{**row, "calls": 4, "bytes": 4 << 20}, {**row, "kind": "send"}]
    comparison.step_seconds = [9.0, 9.0, 9.0, 1.5]
    (line,) = comparison.format_comparison()
    assert line.startswith("plan compared with step 3: ")
    assert "memory at the peak: 12.00 MiB, 10.00 MiB planned (+20 %)" in line
    assert "memory between steps: 5.00 MiB, as planned" in line
    assert "all_gather over dp_shard (float32): 3 calls with 3.00 MiB planned, 4 with 4.00 MiB measured" in line
    assert "time: 1.5 s, 1 s planned (+50 %)" in line
    assert "leaves out" not in line
    comparison.has_document_masks = True
    comparison.on_evaluation(Evaluation(2, 4, {}, 0.1, 0))
    assert comparison.format_comparison()[0].endswith(
        " (the plan leaves out the masks of documents and the evaluation before this step)"
    )
    comparison.step_seconds, comparison._steady_after_steps = [9.0], 1
    assert comparison.format_comparison() == []  # The first step is not in a steady state.
