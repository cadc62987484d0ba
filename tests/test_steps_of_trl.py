"""Whole steps are those of trl's trainers on one process: losses, and weights after AdamW, then in every layout.

The model is a llama of transformers in float64. trl's own loss is minimized by torch's AdamW in a loop by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from objective_cells import microbatch, trained
from test_objectives_of_trl import dpo_of_trl, dpo_trainer, grpo_of_trl, in_float64, inputs_of
from torch import Tensor

from meshwright.testing.models import tiny_model
from meshwright.testing.pool import pool

CELLS: dict[str, dict[str, Any]] = {
    "dpo": {"name": "dpo", "beta": 0.3},
    "grpo": {"name": "grpo", "beta": 0.05, "clip_low": 0.3, "clip_high": 0.4},
}
LAYOUTS: list[Any] = [
    pytest.param("single", {}, {}, 1, id="single"),
    pytest.param("ddp", {}, {}, 2, id="ddp"),
    pytest.param("ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}, 2, id="zero1"),
    pytest.param("fsdp2", {}, {}, 2, id="fsdp2"),
    pytest.param("fsdp2", {}, {"tp_size": 2}, 2, id="tp2"),
    pytest.param("fsdp2", {}, {"pp_size": 2}, 4, id="pp2"),
    pytest.param("megatron_fsdp", {}, {}, 2, id="megatron_fsdp"),
]


def _batch(name: str) -> dict[str, Tensor]:
    batch = microbatch(None, seed=3, rows=8)
    batch["input_ids"] = inputs_of(batch)[0]
    if name == "grpo":
        # Near what the untrained model says, so that some ratios are clipped, and others not.
        for column in ("old_log_probs", "reference_log_probs"):
            batch[column] = batch[column] * 0.1 - 4.6
    return batch


def _trl_steps(name: str) -> tuple[list[float], dict[str, Tensor]]:
    batch, model = _batch(name), tiny_model()
    if name == "dpo":
        loss_of = dpo_of_trl(batch, dpo_trainer(beta=0.3))
    else:
        loss_of, _ = grpo_of_trl(batch, beta=0.05, epsilon_low=0.3, epsilon_high=0.4)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), []
    for _ in range(2):
        with in_float64():
            loss = loss_of(model(input_ids=batch["input_ids"], use_cache=False).logits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize(("strategy", "config", "sizes", "ranks"), LAYOUTS)
@pytest.mark.parametrize("name", CELLS)
def test_steps_are_those_of_trl(name: str, strategy: str, config: Any, sizes: Any, ranks: int) -> None:
    losses, weights = _trl_steps(name)
    batch = {key: value for key, value in _batch(name).items() if key not in ("logits", "position_ids")}
    assert len(set(losses)) == 2
    for found, found_weights in pool(ranks).run(trained, strategy, config, sizes, CELLS[name], batch):
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_weights.keys() == weights.keys()
        for key, weight in weights.items():
            torch.testing.assert_close(found_weights[key], weight.detach(), rtol=0, atol=1e-9)
