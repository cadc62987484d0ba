"""Rotary embeddings that look at the batch give a row the same loss in every division of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.managers import build_model_manager
from support.tiers import mark_mostly_slow
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from meshwright import OptimizerConfig
from meshwright.base.types import IGNORE_INDEX, Batch
from meshwright.step.handshake import count_tokens
from meshwright_testing.models import build_tiny_model
from meshwright_testing.workers import pool

ORIGINAL, PP2 = 12, {"pp_size": 2}
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0, 1.0],
        "long_factor": [1.5, 4.0],
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}
LENGTHS = (20, 8, 16, 6)
"""Of the rows of a step: tokens without padding, some on each side of where frequencies change."""


def model_of(rope: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**build_tiny_model().config.to_dict(), "rope_parameters": ROPES[rope]})
    config.max_position_embeddings = 48 if rope == "longrope" else ORIGINAL
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def rows(step: int) -> list[dict[str, Tensor]]:
    """Rows of different lengths; the later steps are shorter, and one row holds two documents."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for length in (each - 4 * step for each in LENGTHS):
        ids = torch.randint(0, 131, (1, max(length, 3)), generator=generator)
        found.append({"input_ids": ids, "labels": ids.clone()})
    return found


def batch_of(given: list[dict[str, Tensor]], *, packed: bool) -> Batch:
    """One microbatch of rows, padded to its longest; or of documents of at most five tokens."""
    length = max(row["input_ids"].shape[1] for row in given)
    fill = {"input_ids": 0, "labels": IGNORE_INDEX}
    batch = {
        key: torch.cat([pad(row[key], (0, length - row[key].shape[1]), value=value) for row in given])
        for key, value in fill.items()
    }
    positions = (torch.arange(length) % 5).expand_as(batch["input_ids"]).contiguous()
    return {**batch, "position_ids": positions} if packed else batch


def trained(rope: str, strategy: str, sizes: dict[str, int], microbatches: int) -> list[float]:
    """Losses, norms and evaluation losses of three steps."""
    manager = build_model_manager(model_of(rope), strategy, sizes=sizes, optimizer=OptimizerConfig(name="SGD", lr=0.1))
    found = []
    for step in range(3):
        each = rows(step)
        mine = each[manager.mesh.data_rank :: manager.mesh.data_size]
        parts = [mine[index::microbatches] for index in range(microbatches)]
        batches = [batch_of(part, packed=step == 1) for part in parts]
        num_tokens = count_tokens(batches, manager.mesh)
        # Another length than that of the step before or after.
        short = [batch_of(rows(2)[:1], packed=False)]
        eval_loss = manager.eval_loss(short, num_tokens=count_tokens(short, manager.mesh))
        loss = manager.forward_backward(batches, num_tokens=num_tokens)
        found += [float(loss), float(manager.clip_grad_norm(None)), float(eval_loss)]
        manager.optimizer_step()
    return found


@pytest.mark.parametrize("rope", mark_mostly_slow(ROPES, "dynamic"))
@pytest.mark.parametrize(
    ("ranks", "strategy", "sizes", "microbatches"),
    mark_mostly_slow(
        [(2, "fsdp2", {}, 2), (1, "single", {}, 2), (2, "fsdp2", {"tp_size": 2}, 4), (2, "ddp", {"pp_size": 2}, 2)]
    ),
)
def test_rope_that_looks_at_the_batch_gives_the_same_loss_in_every_layout(ranks, strategy, sizes, microbatches, rope):
    (expected,) = pool(1).run(trained, rope, "single", {}, 1)
    for found in pool(ranks).run(trained, rope, strategy, sizes, microbatches):
        assert found == pytest.approx(expected, rel=0, abs=1e-9)


@pytest.mark.parametrize("rope", ROPES)
def test_rows_of_one_length_have_the_loss_of_transformers_after_longer_ones_too(rope: str) -> None:
    ids = rows(0)[0]["input_ids"]
    loss = cross_entropy(model_of(rope)(input_ids=ids).logits[0, :-1], ids[0, 1:])
    assert pool(1).run(first_loss, rope) == [pytest.approx(loss.item(), rel=0, abs=1e-12)]


def first_loss(rope: str) -> float:
    manager = build_model_manager(model_of(rope))
    longer = torch.ones(1, 30, dtype=torch.int64)
    before = [{"input_ids": longer, "labels": longer}]
    manager.eval_loss(before, num_tokens=count_tokens(before, manager.mesh))
    batch = [batch_of(rows(0)[:1], packed=False)]
    return float(manager.forward_backward(batch, num_tokens=count_tokens(batch, manager.mesh)))
