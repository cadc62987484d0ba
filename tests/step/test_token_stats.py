"""`token_stats`: in every layout what plain transformers gives on one process, in the batch's order, on every rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pytest
import torch
from support.objective_layouts import (
    LAYOUTS,
    ObjectiveLayout,
    build_case,
    combined_objective,
    pack_documents,
    train_with_objective,
)
from support.tiers import mark_mostly_slow
from torch import Tensor

from meshwright.base.types import IGNORE_INDEX, Batch, TokenStatistic
from meshwright.step.tokens import shift_labels
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.models import build_case_model, case_vocab_size

NAMES: tuple[TokenStatistic, ...] = get_args(TokenStatistic)
WITHIN = 1e-12
ROWS = (3, 2, 1)


def _microbatches(model_type: str, data_rank: int, kinds: Sequence[str]) -> list[Batch]:
    """Of different numbers of rows on each rank, a third of the labels masked."""
    generator = torch.Generator().manual_seed(data_rank)
    found: list[Batch] = []
    for kind, rows in zip(kinds, ROWS, strict=True):
        shape = (rows + data_rank % 2, 16)
        ids = torch.randint(0, case_vocab_size(model_type), shape, generator=generator)
        labels = ids.masked_fill(torch.rand(shape, generator=generator) < 0.3, IGNORE_INDEX)
        batch: Batch = {"input_ids": ids, "labels": labels}
        if kind == "packed":
            batch = pack_documents(batch)
        elif kind == "shared":
            # The same documents in each row.
            batch = {**batch, "position_ids": pack_documents(batch)["position_ids"][:1]}
        elif kind == "padded":
            lengths = 8 + torch.arange(shape[0])[:, None] * 3
            mask = (torch.arange(16) < lengths).long()
            batch = {**batch, "attention_mask": mask, "labels": labels.where(mask > 0, IGNORE_INDEX)}
            batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        found.append(batch)
    return found


KINDS = ("shared", "packed", "padded")


@functools.cache
@torch.no_grad()
def _expected(case: Case, data_rank: int, kinds: Sequence[str]) -> list[dict[str, Tensor]]:
    model = build_case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64, layers=case.layers).eval()
    return [_plain(model, batch) for batch in _microbatches(case.model_type, data_rank, kinds)]


def _plain(model: Any, batch: Batch) -> dict[str, Tensor]:
    # With a cache, transformers does not keep packed documents apart.
    logits = model(**{name: each for name, each in batch.items() if name != "labels"}, use_cache=False).logits
    labels = shift_labels(batch["labels"])
    mask = labels != IGNORE_INDEX
    log_probs = logits.log_softmax(-1)
    of_label = [each.gather(-1, labels.clamp(min=0)[..., None])[..., 0] for each in (log_probs, logits)]
    return {
        "log_probs": of_label[0] * mask,
        "logsumexp": logits.logsumexp(-1),
        "entropy": -(log_probs.exp() * log_probs).sum(-1),
        "mean_logit": logits.mean(-1),
        "is_top1": (logits.amax(-1) == of_label[1]) & mask,
    }


def _stats(
    layout: ObjectiveLayout,
    case: Case,
    kinds: Sequence[str],
    config: Mapping[str, Any],
    names: Sequence[TokenStatistic],
) -> tuple[int, list[dict[str, Tensor]]]:
    """The task of one rank: its data rank, and what it is reported."""
    manager = layout.build(case, config)
    rank = manager.mesh.data_rank
    return rank, manager.token_stats(_microbatches(case.model_type, rank, kinds), names)


def _compare(
    layout: ObjectiveLayout,
    case: Case,
    kinds: Sequence[str] = KINDS,
    config: Mapping[str, Any] | None = None,
    names: Sequence[TokenStatistic] = NAMES,
) -> float:
    """The largest difference on any rank."""
    worst = 0.0
    answers = pool(layout.ranks).run(_stats, layout, case, kinds, config or {}, names)
    assert {rank for rank, _ in answers} == set(range(layout.data_ranks))
    for rank, found in answers:
        for mine, plain in zip(found, _expected(case, rank, kinds), strict=True):
            assert list(mine) == [*names]
            for name in names:
                assert not mine[name].requires_grad
                assert mine[name].dtype is (torch.bool if name == "is_top1" else torch.float64)
                assert mine[name].shape == plain[name].shape
                worst = max(worst, float((mine[name].double() - plain[name].double()).abs().max()))
    return worst


@pytest.mark.parametrize("name", mark_mostly_slow(LAYOUTS, "tp"))
def test_statistics_are_those_of_plain_transformers(name: str) -> None:
    """Whole sequences in the batch's order: masked, packed in two ways, padded, in microbatches of different sizes."""
    assert _compare(LAYOUTS[name], build_case(LAYOUTS[name])) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", "ddp", "tp", "cp", "pp-interleaved"])
def test_in_chunks_and_out_of_order_and_one_alone(name: str) -> None:
    layout = LAYOUTS[name]
    case, chunks = build_case(layout, tied=True), {"loss_chunk_rows": 5}
    assert _compare(layout, case, ("padded", "plain", "packed"), chunks) <= WITHIN
    assert _compare(layout, case, KINDS, chunks, ("entropy",)) <= WITHIN


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp-zero1", "fsdp2", "megatron_fsdp", "pp-interleaved"])
def test_training_continues_bit_for_bit(name: str) -> None:
    layout = LAYOUTS[name]
    case = build_case(layout, steps=2)
    alone = pool(layout.ranks).run(train_with_objective, layout, case, combined_objective)
    disturbed = pool(layout.ranks).run(
        functools.partial(train_with_objective, computes_stats=True), layout, case, combined_objective
    )
    for before, after in zip(alone, disturbed, strict=True):
        assert (before.losses, before.norms, before.eval_losses) == (after.losses, after.norms, after.eval_losses)
        assert all(torch.equal(weight, after.weights[name]) for name, weight in before.weights.items())


# -- architectures
