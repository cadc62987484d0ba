"""Documents that share a row train as in rows of their own, whatever stands beside their positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import BatchError, count_tokens
from meshwright.base.types import IGNORED_LABEL, Batch
from meshwright.testing import Case, pool
from meshwright.testing.parity import build_manager, full_weights

LENGTHS = (6, 10)
CASE = Case(layers=2)


def documents(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, 97, (2, length), generator=generator) for length in LENGTHS]


def apart(step: int) -> list[Batch]:
    return [{"input_ids": ids, "labels": ids.clone()} for ids in documents(step)]


def packed(step: int) -> Batch:
    """The same documents, two to a row, beside an attention mask of ones."""
    ids = torch.cat(documents(step), 1)
    labels = ids.clone()
    labels[:, LENGTHS[0]] = IGNORED_LABEL
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return {
        "input_ids": ids,
        "labels": labels,
        "position_ids": positions.expand(ids.shape),
        "attention_mask": torch.ones_like(ids),
    }


def _train(strategy: str, sizes: dict[str, int], config: dict[str, Any], is_packed: bool) -> tuple[list[float], Any]:
    manager = build_manager(strategy, config, sizes, CASE)
    found = []
    for step in range(3):
        mine = [packed(step)] if is_packed else apart(step)
        # Data ranks have a row each, or both.
        size, rank = manager.mesh.data_size, manager.mesh.data_rank
        mine = [{name: tensor.chunk(size)[rank] for name, tensor in batch.items()} for batch in mine]
        num_tokens = count_tokens(mine, manager.mesh)
        found.append(float(manager.eval_loss(mine, num_tokens=num_tokens)))
        found.append(float(manager.forward_backward(mine, num_tokens=num_tokens)))
        found.append(float(manager.clip_grad_norm(0.5)))
        manager.optimizer_step()
    return found, full_weights(manager)


@pytest.fixture(scope="module")
def rows_of_their_own() -> Any:
    return pool(1).run(_train, "single", {}, {}, False)[0]


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("single", {}),
        *(pytest.param("fsdp2", {f"{axis}_size": 2}, marks=pytest.mark.slow) for axis in ("tp", "pp", "cp")),
    ],
)
def test_documents_in_one_row_with_a_mask_of_ones_train_as_in_rows_of_their_own(
    strategy: str, sizes: dict[str, int], rows_of_their_own: Any
) -> None:
    expected, expected_weights = rows_of_their_own
    for found, weights in pool(1 if strategy == "single" else 2).run(_train, strategy, sizes, {}, True):
        assert found == pytest.approx(expected, rel=0, abs=1e-9)
        for name, weight in expected_weights.items():
            assert float((weights[name] - weight).abs().max()) <= 1e-9


def _losses(changes: list[dict[str, Any]]) -> list[float | str]:
    manager = build_manager("single", {}, {}, CASE)
    found: list[float | str] = []
    for change in changes:
        batch = {name: tensor for name, tensor in {**packed(0), **change}.items() if tensor is not None}
        try:
            found.append(float(manager.eval_loss([batch], num_tokens=count_tokens([batch], manager.mesh))))
        except BatchError as error:
            found.append(str(error))
    return found


def losses(*changes: dict[str, Any]) -> list[float | str]:
    return pool(1).run(_losses, list(changes))[0]


def test_a_mask_with_zeros_beside_positions_that_restart_is_refused() -> None:
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, -1] = 0
    for text in losses({"attention_mask": mask}, {"attention_mask": mask.bool()}):
        assert "microbatch 0 of 1: position_ids restart" in str(text)
        assert "Leave the mask out" in str(text)


def test_masks_that_say_something_are_kept() -> None:
    """Padding on the left and on the right, with the positions that transformers gives them; skipped positions; and a
    mask of queries and keys."""
    left, right = torch.ones(2, 16, dtype=torch.int64), torch.ones(2, 16, dtype=torch.int64)
    left[:, :4], right[:, 12:] = 0, 0
    by_mask = [(mask.cumsum(1) - 1).masked_fill(mask == 0, 1) for mask in (left, right)]
    jump = torch.arange(16) + 3 * (torch.arange(16) > 7)
    labels = packed(0)["labels"]
    cases = [
        {"attention_mask": left, "position_ids": by_mask[0], "labels": labels.masked_fill(left == 0, IGNORED_LABEL)},
        {"attention_mask": right, "position_ids": by_mask[1], "labels": labels.masked_fill(right == 0, IGNORED_LABEL)},
        {"position_ids": jump.expand(2, 16)},
    ]
    found = losses(*cases, *({**case, "attention_mask": None} for case in cases))
    assert all(isinstance(loss, float) for loss in found)
    # Without the mask each of them is another computation.
    assert all(kept != left_out for kept, left_out in zip(found[:1] + found[2:3], found[3:4] + found[5:6], strict=True))
    causal = torch.zeros(2, 1, 16, 16, dtype=torch.float64).masked_fill(torch.ones(16, 16).triu(1).bool(), -1e9)
    whole, none = losses({"attention_mask": causal}, {"attention_mask": None})
    assert whole != none
