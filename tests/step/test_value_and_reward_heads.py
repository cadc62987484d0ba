"""Heads over tokens (values) and sequences (rewards), instead of a vocabulary's, train alike in every layout."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.caught_errors import catch_error
from support.managers import build_model_manager
from support.objective_layouts import LAYOUTS, ZERO1, ObjectiveLayout, train_manager
from support.tiers import mark_mostly_slow
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaForSequenceClassification,
)
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from meshwright import count_tokens, load_checkpoint, save_checkpoint
from meshwright.base.types import IGNORE_INDEX, Batch
from meshwright.checkpoint import export_checkpoint
from meshwright.objectives import get_objective
from meshwright.step.tokens import Outputs, Tokens
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case, Outcome
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE
from meshwright_testing.models import TINY
from meshwright_testing.parity import find_max_difference, full_weights
from meshwright_testing.zoo import compute_in_float64

PAD, VOCAB = 130, 131
SIZES: dict[str, dict[str, Any]] = {
    **TINY,
    "mixtral": {**TINY["llama"], "num_local_experts": 4, "experts_implementation": "eager"},
}
AUTO = {"tokens": AutoModelForTokenClassification, "sequences": AutoModelForSequenceClassification}


class Pooled(LlamaForSequenceClassification):
    """Scores the last token of a sequence, padding or not, or the mean of all."""

    takes = "last"

    def forward(self, input_ids: Tensor, **inputs: Any) -> SequenceClassifierOutputWithPast:
        logits_BSK = self.score(self.model(input_ids=input_ids, **inputs).last_hidden_state)
        return SequenceClassifierOutputWithPast(
            logits=logits_BSK[:, -1] if self.takes == "last" else logits_BSK.mean(1)
        )


def _model(kind: str, model_type: str, *, features: int = 1, padding: int | None = PAD) -> nn.Module:
    config = AutoConfig.for_model(
        model_type,
        **{**SIZES[model_type], "n_layer" if model_type == "gpt2" else "num_hidden_layers": 4},
        num_labels=features,
        classifier_dropout=0.0,
        pad_token_id=padding,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model: nn.Module
    if kind in AUTO:
        model = AUTO[kind].from_config(config, dtype=torch.float64)
    else:
        model = Pooled(config).double()
        model.takes = kind
    compute_in_float64(model)
    return model


def _manager(layout: ObjectiveLayout, model: nn.Module) -> StrategyManager:
    how = layout.strategy, layout.config, layout.sizes
    return build_model_manager(model, *how, wrapper=layout.wrapper, optimizer=Case().optimizer)


class Value:
    """The squared error of each position that predicts a token; other features take part as sums over documents."""

    input_kind, columns = "outputs", ("returns",)

    def __call__(self, outputs: Outputs, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        value_BS = outputs.logits[..., 0]
        rest = outputs.sum_by_document(outputs.logits[..., 1:].sum(-1) * outputs.mask).square().sum() * 1e-2
        errors_BS = (value_BS - batch["returns"]) ** 2 * outputs.mask
        return errors_BS.sum() / 2 + rest, {"values": (value_BS * outputs.mask).sum()}


REWARD = get_objective("reward")
OBJECTIVES: dict[str, Any] = {"tokens": Value(), "sequences": REWARD}


# -- microbatches

PAIRS = {1: (6,), 2: (4, 2), 4: (2, 1, 1, 2)}
"""Of each data rank in a step, by their number."""


def _rows(kind: str, step: int) -> dict[str, Tensor]:
    """Twelve rows: packed with two documents each; or padded behind answers of different lengths."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids_BS = torch.randint(PAD, (12, 16), generator=generator)
    at_BS, length_B1 = torch.arange(16).expand(12, 16), torch.randint(3, 17, (12, 1), generator=generator)
    if kind == "tokens":
        positions_BS = torch.where(at_BS < length_B1, at_BS, at_BS - length_B1)
        labels_BS = ids_BS.where(torch.rand(12, 16, generator=generator) > 0.3, IGNORE_INDEX)
        returns_BS = (ids_BS.double() + at_BS).sin()
        return {"input_ids": ids_BS, "labels": labels_BS, "position_ids": positions_BS, "returns": returns_BS}
    if kind == "last":
        # The model is tried with the first row.
        length_B1[0] = 16
    mask_BS = (at_BS < length_B1).long()
    labels_BS = ids_BS.where(mask_BS > 0, IGNORE_INDEX)
    return {"input_ids": ids_BS.where(mask_BS > 0, PAD), "labels": labels_BS, "attention_mask": mask_BS}


def _microbatches(kind: str, case: Case, step: int, data_rank: int, data_ranks: int) -> list[Batch]:
    """Two of each data rank, of which the second may be one that counts for nothing."""
    shares = PAIRS[data_ranks]
    start, size = sum(shares[:data_rank]), shares[data_rank]
    first = -(-size // 2)
    parts = [slice(2 * start, 2 * (start + first)), slice(2 * (start + first), 2 * (start + size))]
    found = [{name: tensor[part] for name, tensor in _rows(kind, step).items()} for part in parts]
    if first == size:
        found[1] = {**found[0], "labels": torch.full_like(found[0]["labels"], IGNORE_INDEX)}
    return found


# -- parity

PLACES: dict[str, ObjectiveLayout] = {
    **{
        name: LAYOUTS[name] for name in ("ddp", "fsdp2", "tp", "tp-sequence", "cp", "cp-ulysses", "ep", "megatron_fsdp")
    },
    **{name: replace(LAYOUTS[name], wrapper={"pp_microbatch_size": 2}) for name in ("pp", "pp-cp")},
    "pp-zbv": ObjectiveLayout(2, "single", {}, {"pp_size": 2}, {"pp_schedule": "zbv", "pp_microbatch_size": 2}),
    "budget": ObjectiveLayout(2, "ddp", {**ZERO1, "activation_checkpointing": {"budget_gb": 1.0}}, data_ranks=2),
}


def _trained(layout: ObjectiveLayout, kind: str, model_type: str, features: int = 1, device: str = "cpu") -> Outcome:
    with torch.device(device):
        model = _model(kind, model_type, features=features)
    torch.manual_seed(0)
    case = Case(steps=4, model_type=model_type)
    return train_manager(_manager(layout, model), case, OBJECTIVES[kind], functools.partial(_microbatches, kind))


@functools.cache
def _expected(kind: str, model_type: str, features: int = 1) -> Outcome:
    return pool(1).run(_trained, LAYOUTS["single"], kind, model_type, features)[0]


def _worst(layout: ObjectiveLayout, kind: str, model_type: str, features: int = 1) -> float:
    found = pool(layout.ranks).run(_trained, layout, kind, model_type, features)
    return find_max_difference(found, _expected(kind, model_type, features)).worst


@pytest.mark.parametrize("name", mark_mostly_slow(PLACES, "fsdp2"))
def test_values_of_tokens_train_as_on_one_rank(name: str) -> None:
    layout = PLACES[name]
    assert _worst(layout, "tokens", layout.model, features=3 if "tp" in name else 1) <= TOLERANCE


@pytest.mark.parametrize("name", mark_mostly_slow(["fsdp2", "tp-sequence", "cp", "pp-zbv", "pp-cp"], "cp"))
def test_rewards_of_sequences_train_as_on_one_rank(name: str) -> None:
    layout = PLACES[name]
    assert _worst(layout, "sequences", "gpt2" if layout.model == "llama" else layout.model) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("tokens", "fsdp2"), ("sequences", "pp")])
def test_heads_on_the_meta_device_get_the_values_of_their_class(kind: str, name: str) -> None:
    found = pool(PLACES[name].ranks).run(_trained, PLACES[name], kind, "llama", 1, "meta")
    assert find_max_difference(found, _expected(kind, "llama")).worst <= TOLERANCE


@pytest.mark.slow
def test_a_plan_of_the_user_may_divide_a_head() -> None:
    plan = {"model.layers.*.mlp.up_proj": "colwise_gather_output", "score": "colwise_gather_output"}
    assert _worst(replace(PLACES["tp"], config={"tp_plan": plan}), "tokens", "llama", features=3) <= TOLERANCE


def _checkpointed(layout: ObjectiveLayout, kind: str, path: str, loads: bool) -> dict[str, Tensor]:
    manager = _manager(layout, _model(kind, "llama"))
    if loads:
        load_checkpoint(manager, path)
    else:
        train_manager(manager, Case(steps=1), OBJECTIVES[kind], functools.partial(_microbatches, kind))
        save_checkpoint(manager, path, step=1)
    return full_weights(manager)


@pytest.mark.slow
@pytest.mark.parametrize("kind", AUTO)
def test_models_with_heads_are_saved_loaded_and_exported(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    weights = pool(2).run(_checkpointed, PLACES["tp"], kind, path, False)[0]
    export_checkpoint(path, tmp_path / "plain")
    exported = AUTO[kind].from_pretrained(tmp_path / "plain", dtype=torch.float64).state_dict()
    for found in (*pool(2).run(_checkpointed, PLACES["pp-zbv"], kind, path, True), exported):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], each) for name, each in weights.items())


def test_values_that_have_not_moved_far_are_not_counted_as_clipped() -> None:
    generator = torch.Generator().manual_seed(0)
    value_BS, old_BS, returns_BS = (0.1 * torch.rand(64, 64, generator=generator) for _ in range(3))
    outputs = Outputs(torch.zeros(64, 64, dtype=torch.int64), value_BS[..., None])
    _, sums = get_objective("value")(outputs, {"returns": returns_BS, "old_values": old_BS})
    assert float(sums["clipfrac"]) == 0


# -- what is refused


def _on_tokens(tokens: Tokens, batch: Batch) -> Tensor:
    return -tokens.log_probs.sum()


def _refusal(layout: ObjectiveLayout, kind: str, objective: Any, padding: int | None, features: int) -> str:
    """The error of the first step, or of what comes before."""

    def train() -> None:
        manager = _manager(layout, _model(kind, "llama", features=features, padding=padding))
        mesh = manager.mesh
        batches = _microbatches(kind, Case(), 0, mesh.data_rank, mesh.data_size)
        if objective is None:
            batches = [{name: batch[name] for name in ("input_ids", "labels")} for batch in batches]
        count = count_tokens(batches, mesh, objective)
        manager.forward_backward(batches, num_tokens=count, objective=objective)

    return catch_error(train)


REFUSED: dict[str, tuple[str, str, Any, int | None, int, str]] = {
    "no objective": ("fsdp2", "tokens", None, PAD, 1, "gives logits (1, 8, 1), which are not those of its vocabulary"),
    "no objective, pipeline": ("pp", "tokens", None, PAD, 1, "Give an objective with input_kind = 'outputs'"),
    "over tokens": ("tp", "tokens", _on_tokens, PAD, 1, "there is no loss over tokens"),
    "cp, of the last position": ("cp", "last", REWARD, PAD, 1, "than the last position that is no padding. Set cp"),
    "pp-cp": ("pp-cp", "mean", REWARD, PAD, 1, "Set cp_size=1."),
    "no padding": ("fsdp2", "sequences", REWARD, None, 1, "fails with input_ids (2, 8): *no padding token is defined"),
    "no padding, pipeline": ("pp", "sequences", REWARD, None, 1, "cannot be divided into stages: *no padding token"),
    "values of rewards": ("ddp", "sequences", Value(), PAD, 1, "lacks the column 'returns'"),
}


@pytest.mark.parametrize("name", mark_mostly_slow(REFUSED, "no objective", "no padding"))
def test_what_a_head_cannot_do_is_reported_on_all_ranks_before_the_first_step(name: str) -> None:
    where, kind, objective, padding, features, text = REFUSED[name]
    found = pool(PLACES[where].ranks).run(_refusal, PLACES[where], kind, objective, padding, features)
    assert len(set(found)) == 1, found
    start, *rest = text.split("*")
    assert all(each in found[0] for each in (start, *rest)), found[0]
