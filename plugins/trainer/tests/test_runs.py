"""Whole runs: a model read into shards, a run that continues under another layout, predictions, the best model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_cases
import transformers
from transformers import AutoModelForCausalLM

from meshwright.launch.open_world import open_world
from meshwright_testing import pool
from meshwright_trainer import MeshTrainer

BATCH = {"eval_strategy": "no", "max_steps": 6, "warmup_steps": 2, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: Any) -> str:
    directory = tmp_path_factory.mktemp("model")
    trainer_cases.model().save_pretrained(directory)
    return str(directory)


def accuracy(prediction: Any) -> dict[str, float]:
    guessed, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    guessed = guessed.argmax(-1) if guessed.ndim == 3 else guessed
    kept = labels != -100
    return {"accuracy": float((guessed == labels)[kept].mean()), "rows": float(len(labels)), "kept": float(kept.sum())}


def run(
    directory: Path, mesh: dict[str, Any] | None, data_size: int, path: str, resumes: Path | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """Train, save the model in a directory `model`, and give the history; a task of a pool."""
    rows = trainer_cases.rows_of(61)
    cls, model, given = MeshTrainer, path, {"mesh": mesh}
    if mesh is None:
        cls, model, given = transformers.Trainer, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), {}
    trainer = cls(
        model,
        transformers.TrainingArguments(**(trainer_cases.arguments(directory, data_size) | changes)),
        data_collator=trainer_cases.Padded(),
        train_dataset=trainer_cases.Dataset.from_list(rows[:48]),
        eval_dataset=trainer_cases.Dataset.from_list(rows[48:]),
        compute_metrics=accuracy if changes.get("include_for_metrics") else None,
        **given,
    )
    trainer.train(resume_from_checkpoint=resumes and str(resumes))
    trainer.save_model(f"{directory}/model")
    return trainer_cases.logged(trainer)


def task(changes: dict[str, Any], *arguments: Any) -> list[dict[str, Any]]:
    with open_world("cpu"):
        return run(*arguments, **changes)


PP2 = {"pp_size": 2}
BUCKETED = {"strategy": "ddp", "strategy_config": {"engine": "bucketed", "use_distributed_optimizer": True}}


def check_weights(directory: Path, tolerance: float) -> None:
    mine, whole = (
        AutoModelForCausalLM.from_pretrained(directory / name / "model", dtype=torch.float64).state_dict()
        for name in ("run", "whole")
    )
    torch.testing.assert_close(mine, whole, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Ranks, a mesh, data ranks; four ranks have one row of four each.
        pytest.param((2, {"tp_size": 2}, 1), (2, {}, 2), id="tp2 to fsdp2"),
        pytest.param((2, PP2, 1), (4, {"dp_replicate_size": 2}, 4), id="pp2 to hsdp", marks=pytest.mark.slow),
        pytest.param((2, {}, 2), (2, PP2, 1), id="fsdp2 to pp2", marks=pytest.mark.slow),
        pytest.param((2, BUCKETED, 2), (2, {"cp_size": 2}, 1), id="bucketed to cp2", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_under_another_layout_as_if_it_had_never_stopped(before, after, path, tmp_path):
    changes = {**BATCH, "save_steps": 3}
    whole = run(tmp_path / "whole", None, 1, path, **changes, save_strategy="no")
    for (ranks, mesh, size), resumes in ((before, None), (after, tmp_path / "run" / "checkpoint-3")):
        given = tmp_path / "run", {"strategy": "fsdp2"} | mesh, size, path, resumes
        found = pool(ranks).run(task, changes | {"save_strategy": "steps"}, *given)[0]
    wanted, found = ([each for each in logged if "loss" in each] for logged in (whole, found))
    assert not trainer_cases.differences(wanted, found)
    check_weights(tmp_path, 1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"tp_size": 2}, {"pp_size": 2}], ids=["fsdp2", "tp2", "pp2"])
def test_each_row_is_evaluated_once_and_the_best_model_comes_back(mesh, path, tmp_path):
    changes: dict[str, Any] = {"eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    changes |= {"load_best_model_at_end": True, "metric_for_best_model": "accuracy"}
    changes |= {"include_for_metrics": ["inputs"], "learning_rate": 0.3, "max_steps": 4}
    # Of 13 rows some data rank has none in the second round; Trainer means over batches, so that it gets one.
    whole = run(tmp_path / "whole", None, 1, path, **changes, per_device_eval_batch_size=13)
    size = 1 if mesh else 2
    changes["per_device_eval_batch_size"] = 6 // size
    found = pool(2).run(task, changes, tmp_path / "run", {"strategy": "fsdp2"} | mesh, size, path)[0]
    assert not trainer_cases.differences(whole, found)
    scores = [each["eval_accuracy"] for each in whole if "eval_accuracy" in each]
    assert max(scores) != scores[-1], "the last model is the best: nothing has to come back"
    check_weights(tmp_path, 1e-6)
    assert len([*(tmp_path / "run").glob("checkpoint-*")]) <= 2
