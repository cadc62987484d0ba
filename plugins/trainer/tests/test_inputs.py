"""What a trainer's data, model and loss may be over a mesh: what would be left out or counted twice is not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import stream_cases
import torch
import trainer_cases
import trl
from test_trainers import ranks
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration, TrainingArguments

from meshwright.base.errors import BatchError, ConfigError
from meshwright.launch.open_world import open_world
from meshwright_trainer import MeshTrainer, MeshTrainerMixin
from meshwright_trainer.arguments import check_arguments

ROWS = [{"input_ids": [int(word) + 2 for word in text.split()]} for text in trainer_cases.numbers(8, 5)]


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


class Replaced(MeshTrainer):  # type: ignore[misc]
    """Calls its model with some tokens masked."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        ids = inputs["input_ids"]
        return super().compute_loss(model, {**inputs, "input_ids": ids.masked_fill(ids == 5, 3)}, *args, **kwargs)


@pytest.mark.parametrize("cls", [Other, Replaced])
def test_a_loss_that_calls_the_model_with_other_tokens_is_refused(cls, tmp_path):
    with pytest.raises(ConfigError, match="other input_ids than those of its microbatch"):
        trained(tmp_path, cls)


MODELS = {
    "masked": lambda: BertForMaskedLM(
        BertConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ),
    "encoder and decoder": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_does_not_predict_the_next_token_is_refused(kind, tmp_path):
    with pytest.raises(ConfigError, match="is no causal language model"):
        trained(tmp_path, model=MODELS[kind]())


@pytest.mark.parametrize("name", ["inputs_embeds", "shift_labels"])
def test_what_the_model_would_not_be_given_is_refused(name, tmp_path):
    class Further(trainer_cases.Padded):
        def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            batch = super().__call__(examples)
            return {**batch, name: batch["labels"].roll(-1, 1)}

    with pytest.raises(BatchError, match=f"a microbatch has '{name}'"):
        trained(tmp_path, collator=Further())


@pytest.mark.parametrize("name", ["KTOTrainer", "RLOOTrainer", "DistillationTrainer"])
def test_a_trainer_whose_batches_are_not_known_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} of trl does not go over a mesh"):
        check_arguments(None, type("Mine", (MeshTrainerMixin, getattr(trl, name)), {}))


def test_a_trainer_of_completions_needs_its_own_mixin():
    with pytest.raises(ConfigError, match="MeshGRPOMixin"):
        check_arguments(None, type("Mine", (MeshTrainerMixin, trl.GRPOTrainer), {}))


def test_rows_of_streams_are_dealt_out_once_and_ranks_end_together(tmp_path):
    ranks(2, "stream_cases.py", str(tmp_path))
    wanted = stream_cases.told(None, tmp_path / "plain", 1, [])
    rows, shards = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("rows", "shards"))
    assert rows["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert rows["labels"] == wanted["labels"]
    assert shards["labels"] == wanted["labels"]
    assert len(shards["losses"]) == len(wanted["losses"])
