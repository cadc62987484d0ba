"""Streams as data over data ranks, for test_inputs.py: of rows that are dealt out, or of shards of unequal lengths."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import trainer_cases
import transformers
from datasets import IterableDataset
from transformers import TrainingArguments

from meshwright.launch.open_world import open_world
from meshwright_trainer import MeshTrainer


def rows_of(shards: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        yield from shard


def stream(rows: list[dict[str, Any]], cuts: list[int]) -> IterableDataset:
    edges = [0, *cuts, len(rows)]
    shards = [rows[start:end] for start, end in pairwise(edges)]
    return IterableDataset.from_generator(rows_of, gen_kwargs={"shards": shards})


def told(mesh: Any, directory: Path, data_size: int, cuts: list[int]) -> dict[str, Any]:
    """What a run over streams tells."""
    rows = [{"input_ids": [int(word) + 2 for word in text.split()]} for text in trainer_cases.numbers(61, 5)]
    options = {"max_steps": 7, "gradient_accumulation_steps": 3, "eval_strategy": "no"}
    args = TrainingArguments(**trainer_cases.arguments(directory, data_size, **options))
    cls, given = (transformers.Trainer, {}) if mesh is None else (MeshTrainer, {"mesh": mesh})
    data = {"train_dataset": stream(rows[:48], cuts), "eval_dataset": stream(rows[48:], cuts)}
    trainer = cls(trainer_cases.model(), args, data_collator=trainer_cases.Padded(), **data, **given)
    trainer.train()
    ids = trainer.predict(data["eval_dataset"]).label_ids
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return {"losses": losses, "labels": sorted(ids.tolist()), "eval_loss": trainer.evaluate()["eval_loss"]}


def main(directory: str) -> None:
    torch.set_num_threads(1)
    with open_world("cpu") as world:
        for name, cuts in {"rows": [], "shards": [5, 6]}.items():
            found = told({}, Path(directory) / name, world.size, cuts)
            if world.rank == 0:
                (Path(directory) / f"{name}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
