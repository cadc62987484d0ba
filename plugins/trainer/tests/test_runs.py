"""Whole runs: a model read into shards, a run that goes on under another layout, predictions, the best model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_cases
import torch
import trainer_cases
from test_trainers import differences, ranks
from transformers import AutoModelForCausalLM

BATCH = {"eval_strategy": "no", "max_steps": 6, "warmup_steps": 2, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> str:
    directory = tmp_path_factory.mktemp("model")
    trainer_cases.model().save_pretrained(directory)
    return str(directory)


def over(world: int, mesh: dict[str, Any], directory: Path, data_size: int, path: str, **changes: Any) -> Any:
    out = directory.with_suffix(".json")
    run = {"directory": str(directory), "mesh": mesh, "data_size": data_size, "path": path, "resumes": None, **changes}
    ranks(world, "run_cases.py", json.dumps({"run": run, "out": str(out)}))
    return out.read_text()


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).named_parameters())


HOPS = {
    "tp2 to fsdp2": ((2, {"tp_size": 2}, 1), (2, {}, 2)),
    "pp2 to hsdp": ((2, {"pp_size": 2}, 1), (4, {"dp_replicate_size": 2}, 4)),
    "fsdp2 to pp2": ((2, {}, 2), (2, {"pp_size": 2}, 1)),
    "bucketed to cp2": (
        (2, {"strategy": "ddp", "strategy_config": {"engine": "bucketed", "use_distributed_optimizer": True}}, 2),
        (2, {"cp_size": 2}, 1),
    ),
}


@pytest.mark.parametrize("hop", HOPS)
def test_a_run_goes_on_under_another_layout_as_if_it_had_never_stopped(hop, path, tmp_path):
    changes = {**BATCH, "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = run_cases.run(str(tmp_path / "whole"), None, 1, path, None, **{**changes, "save_strategy": "no"})
    (first_world, first, first_size), (world, second, size) = HOPS[hop]
    strategy = {"strategy": "fsdp2"}
    # Four ranks have one row of four each.
    over(first_world, strategy | first, tmp_path / "run", first_size, path, **changes)
    checkpoint = tmp_path / "run" / "checkpoint-3"
    told = over(world, strategy | second, tmp_path / "run", size, path, **{**changes, "resumes": str(checkpoint)})
    found = [each for each in json.loads(told) if "loss" in each]
    wanted = [each for each in whole if "loss" in each]
    assert not differences(wanted, json.dumps(found))
    mine = weights(tmp_path / "run" / "model")
    for name, value in weights(tmp_path / "whole" / "model").items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-7)


@pytest.mark.parametrize("mesh", [{}, {"tp_size": 2}, {"pp_size": 2}], ids=["fsdp2", "tp2", "pp2"])
def test_each_row_is_evaluated_once_and_the_best_model_comes_back(mesh, path, tmp_path):
    changes = {
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "include_for_metrics": ["inputs"],
        "learning_rate": 0.3,
        "max_steps": 4,
    }
    # Of 13 rows some data rank has none in the second round; Trainer means over batches, so that it gets one.
    whole = run_cases.run(str(tmp_path / "whole"), None, 1, path, None, **changes, per_device_eval_batch_size=13)
    size = 1 if mesh else 2
    told = over(
        2, {"strategy": "fsdp2"} | mesh, tmp_path / "run", size, path, **changes, per_device_eval_batch_size=6 // size
    )
    assert not differences(whole, told)
    scores = [each["eval_accuracy"] for each in whole if "eval_accuracy" in each]
    assert max(scores) != scores[-1], "the last model is the best: nothing has to come back"
    mine = weights(tmp_path / "run" / "model")
    for name, value in weights(tmp_path / "whole" / "model").items():
        torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-6)
    assert len([*(tmp_path / "run").glob("checkpoint-*")]) <= 2
