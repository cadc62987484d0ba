"""Whole runs of trainers over a mesh, for test_runs.py: from a path, resumed under another layout, evaluated, saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trainer_cases
from transformers import AutoModelForCausalLM, TrainingArguments

from meshwright.launch.open_world import open_world
from meshwright_trainer import MeshTrainer


def accuracy(prediction: Any) -> dict[str, float]:
    guessed, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    guessed = guessed.argmax(-1) if guessed.ndim == 3 else guessed
    kept = labels != -100
    return {"accuracy": float((guessed == labels)[kept].mean()), "rows": float(len(labels)), "kept": float(kept.sum())}


def trainer(cls: type, directory: str, data_size: int, model: Any, given: dict[str, Any], **changes: Any) -> Any:
    rows = [{"input_ids": [int(word) + 2 for word in text.split()]} for text in trainer_cases.numbers(61, 5)]
    args = TrainingArguments(**(trainer_cases.arguments(Path(directory), data_size) | changes))
    data = {
        "train_dataset": trainer_cases.Dataset.from_list(rows[:48]),
        "eval_dataset": trainer_cases.Dataset.from_list(rows[48:]),
    }
    metrics = {"compute_metrics": accuracy} if changes.get("include_for_metrics") else {}
    return cls(model, args, data_collator=trainer_cases.Padded(), **data, **metrics, **given)


def run(directory: str, mesh: dict[str, Any] | None, data_size: int, path: str, resumes: Any, **changes: Any) -> Any:
    """History, and the weights that `save_model` has written."""
    cls: type = MeshTrainer
    model: Any = path
    given: dict[str, Any] = {"mesh": mesh}
    if mesh is None:
        import transformers

        cls, given = transformers.Trainer, {}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    made = trainer(cls, directory, data_size, model, given, **changes)
    made.train(resume_from_checkpoint=resumes)
    made.save_model(f"{directory}/model")
    left_out = ("runtime", "per_second", "total_flos", "epoch", "preparation_time")
    return [
        {key: value for key, value in each.items() if not any(part in key for part in left_out)}
        for each in made.state.log_history
    ]


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    np.random.seed(0)
    with open_world("cpu") as world:
        found = run(**order["run"])
        if world.rank == 0:
            Path(order["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
