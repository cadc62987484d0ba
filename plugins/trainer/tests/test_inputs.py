"""What a trainer's data, model and loss may be over a mesh: what would be left out or counted twice is not."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer_cases
import transformers
import trl
from datasets import IterableDataset
from torch import nn
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration, TrainingArguments

from meshwright.base.errors import BatchError, CheckpointError, ConfigError, ModelError
from meshwright.launch.open_world import open_world
from meshwright_testing import pool
from meshwright_trainer import MeshTrainer, MeshTrainerMixin
from meshwright_trainer.arguments import check_arguments

ROWS = trainer_cases.rows_of(8)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A world of this process alone, which trainers join."""
    with open_world("cpu"):
        yield


def trained(directory: Any, cls: type = MeshTrainer, model: Any = None, collator: Any = None) -> Any:
    args = TrainingArguments(**trainer_cases.arguments(directory, 1, eval_strategy="no", max_steps=1))
    data = {"train_dataset": trainer_cases.Dataset.from_list(ROWS), "data_collator": collator or trainer_cases.Padded()}
    trainer = cls(model or trainer_cases.model(), args, mesh={}, **data)
    trainer.train()
    return trainer


class Other(MeshTrainer):  # type: ignore[misc]
    """Calls its model a second time, with rows in another order."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        turned = model(input_ids=inputs["input_ids"].flip(0)).logits
        return super().compute_loss(model, inputs, *args, **kwargs) + 1e-3 * turned.sum()


def test_a_loss_that_calls_the_model_with_other_tokens_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="other input_ids than those of its microbatch"):
        trained(tmp_path, Other)


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize("kind", ["masked", "encoder and decoder"])
def test_a_model_that_does_not_predict_the_next_token_is_refused(kind, tmp_path):
    if kind == "masked":
        model = BertForMaskedLM(BertConfig(vocab_size=16, **SMALL))
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(vocab_size=16, decoder_start_token_id=0, **sizes))
    with pytest.raises(ConfigError, match="is not a causal language model"):
        trained(tmp_path, model=model)


class Embedded(trainer_cases.Padded):
    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = super().__call__(examples)
        return {**batch, "inputs_embeds": batch["labels"].roll(-1, 1)}


def test_what_the_model_would_not_be_given_is_refused(tmp_path):
    with pytest.raises(BatchError, match="a microbatch has 'inputs_embeds'"):
        trained(tmp_path, collator=Embedded())


@pytest.mark.parametrize(
    ("name", "text"), [("KTOTrainer", "KTOTrainer of trl is not supported on a mesh"), ("GRPOTrainer", "MeshGRPOMixin")]
)
def test_a_trainer_whose_batches_are_not_known_is_refused(name, text):
    with pytest.raises(ConfigError, match=text):
        check_arguments(None, type("Mine", (MeshTrainerMixin, getattr(trl, name)), {}))


# -- what transformers' own tests have found


def test_the_model_of_another_trainer_and_a_checkpoint_that_is_not_there_are_refused(tmp_path):
    trainer = trained(tmp_path)
    assert trainer.accelerator.unwrap_model(nn.DataParallel(trainer.model)) is trainer.model
    with pytest.raises(ModelError, match="has been parallelized by another manager already"):
        trained(tmp_path, model=trainer.model)
    with pytest.raises(CheckpointError, match=r"checkpoint-9' is not a checkpoint of a trainer"):
        trainer.train(str(tmp_path / "checkpoint-9"))


# -- streams: of rows that are dealt out, or of shards of unequal lengths


def rows_of(shards: list[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        yield from shard


def stream(rows: list[dict[str, Any]], cuts: list[int]) -> IterableDataset:
    edges = [0, *cuts, len(rows)]
    shards = [rows[start:end] for start, end in pairwise(edges)]
    return IterableDataset.from_generator(rows_of, gen_kwargs={"shards": shards})


def reported(mesh: Any, directory: Path, data_size: int, cuts: list[int]) -> dict[str, Any]:
    """What a run over streams tells."""
    rows = trainer_cases.rows_of(61)
    options = {"max_steps": 7, "gradient_accumulation_steps": 3, "eval_strategy": "no"}
    args = TrainingArguments(**trainer_cases.arguments(directory, data_size, **options))
    cls, given = (transformers.Trainer, {}) if mesh is None else (MeshTrainer, {"mesh": mesh})
    data = {"train_dataset": stream(rows[:48], cuts), "eval_dataset": stream(rows[48:], cuts)}
    trainer = cls(trainer_cases.model(), args, data_collator=trainer_cases.Padded(), **data, **given)
    trainer.train()
    ids = trainer.predict(data["eval_dataset"]).label_ids
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return {"losses": losses, "labels": sorted(ids.tolist()), "eval_loss": trainer.evaluate()["eval_loss"]}


def streamed(directory: Path) -> dict[str, dict[str, Any]]:
    """A task of a pool."""
    with open_world("cpu") as world:
        cuts = {"rows": [], "shards": [5, 6]}
        return {name: reported({}, directory / name, world.size, each) for name, each in cuts.items()}


def test_rows_of_streams_are_dealt_out_once_and_ranks_end_together(tmp_path):
    rows, shards = pool(2).run(streamed, tmp_path)[0].values()
    wanted = reported(None, tmp_path / "plain", 1, [])
    assert rows["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert rows["labels"] == wanted["labels"]
    assert shards["labels"] == wanted["labels"]
    assert len(shards["losses"]) == len(wanted["losses"])
