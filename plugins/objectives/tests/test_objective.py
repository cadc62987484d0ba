"""How an objective is called: tried once, with one pass for what it has asked before, and with its own columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright import ConfigError, Tokens, count_tokens
from meshwright.base.types import Batch
from meshwright.step.objective import BoundObjective, probe_objective
from meshwright.step.tokens import Sequences
from meshwright_testing.case import Case, rank_microbatches
from meshwright_testing.parity import build_manager
from meshwright_testing.workers import pool


class _Counted:
    """The token loss and a little entropy, which notes its calls."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def value(self, tokens: Tokens, batch: Batch) -> Tensor:
        self.calls.append(sorted(batch))
        return -tokens.log_probs.sum() - 0.1 * (tokens.entropy * tokens.mask).sum()

    __call__ = value


def _calls(as_method: bool) -> tuple[list[list[str]], list[int]]:
    manager = build_manager("single", {}, {}, Case(microbatches=2))
    counted, asked = _Counted(), []
    of_tokens = manager.forward_runner._token_loss.compute_objective  # type: ignore[attr-defined]

    def counting(run: Any, targets_BS: Tensor, consume: Any, check: Any) -> Any:
        asked.append(0)

        def consuming(ask: Any) -> Tensor:
            def noting(*args: Any) -> Any:
                asked[-1] += 1
                return ask(*args)

            return consume(noting)

        return of_tokens(run, targets_BS, consuming, check)

    manager.forward_runner._token_loss.compute_objective = counting  # type: ignore[attr-defined]
    for step in range(3):
        batches = [
            {**batch, "mine": batch["labels"][:, 0]} for batch in rank_microbatches(Case(microbatches=2), step, 0, 1)
        ]
        tokens = count_tokens(batches, manager.mesh)
        manager.forward_backward(batches, num_tokens=tokens, objective=counted.value if as_method else counted)
        manager.optimizer_step()
    return counted.calls, asked


@pytest.mark.parametrize("as_method", [False, True])
def test_an_objective_is_tried_once_and_asks_at_once_for_what_it_has_asked_before(as_method: bool) -> None:
    ((calls, asked),) = pool(1).run(_calls, as_method)
    # Both groups of rows twice, and each of them; then two microbatches in each of three steps.
    assert calls == [["mine"]] * (4 + 6)
    assert asked == [1] * 6


def test_documents_begin_at_each_row_and_where_positions_do_not_rise() -> None:
    positions_BS = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 0, 0]])
    targets_BS = torch.tensor([[1, 1, -100, 1, 1], [1, 1, 1, 1, -100]])
    sequences = Sequences(targets_BS, positions_BS)
    values_BS = torch.arange(10.0).view(2, 5).requires_grad_()
    sums_D = sequences.sum_by_document(values_BS)
    assert sums_D.tolist() == [3.0, 7.0, 5.0, 13.0, 8.0, 9.0]
    assert sequences.sum_by_document(sequences.mask).tolist() == [2, 2, 1, 2, 1, 0]
    assert sequences.sum_by_sequence(values_BS).tolist() == [10.0, 35.0]
    (sums_D * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])).sum().backward()
    assert values_BS.grad is not None
    assert values_BS.grad.tolist() == [[1, 1, 1, 2, 2], [3, 4, 4, 5, 6]]
    assert Sequences(targets_BS).sum_by_document(values_BS).tolist() == [10.0, 35.0]
    # One row of positions for all.
    assert Sequences(targets_BS, positions_BS[:1]).sum_by_document(sequences.mask).tolist() == [2, 2, 3, 1]


def _batch(rows: int, *, masked: bool = False) -> Batch:
    ids_BS = torch.arange(rows * 6).view(rows, 6) % 11
    return {"input_ids": ids_BS, "labels": torch.full_like(ids_BS, -100) if masked else ids_BS}


def _policy(tokens: Tokens, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    length_B = tokens.sum_by_sequence(tokens.mask).clamp(min=1)
    return -(tokens.sum_by_sequence(tokens.log_probs) / length_B).sum(), {"b": length_B.sum(), "a": length_B.sum()}


def _centred(tokens: Tokens, batch: Batch) -> Tensor:
    sums_B = tokens.sum_by_sequence(tokens.log_probs)
    return (sums_B - sums_B.mean()).square().sum()


def _noisy(tokens: Tokens, batch: Batch) -> Tensor:
    return -(tokens.log_probs * torch.rand(tokens.mask.shape)).sum()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_mean_within_a_sequence_is_a_sum_over_sequences(rows: int) -> None:
    assert probe_objective(BoundObjective(_policy), _batch(rows), None, torch.float32) == ("a", "b")


@pytest.mark.parametrize("rows", [1, 4])
def test_what_one_sequence_adds_must_not_follow_from_the_others(rows: int) -> None:
    with pytest.raises(ConfigError, match="no sum over sequences"):
        probe_objective(BoundObjective(_centred), _batch(rows), None, torch.float64)


def test_an_objective_that_draws_numbers_is_not_held_to_them_and_leaves_those_of_others_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert probe_objective(BoundObjective(_noisy), _batch(3), None, torch.float32) == ()
    assert torch.equal(torch.rand(3), expected)


def test_rows_without_labels_are_no_reason_to_refuse() -> None:
    def nothing(tokens: Tokens, batch: Batch) -> Tensor:
        return torch.zeros(())

    assert probe_objective(BoundObjective(nothing), _batch(2, masked=True), None, torch.float32) == ()
    with pytest.raises(ConfigError, match="without a gradient"):
        probe_objective(BoundObjective(nothing), _batch(2), None, torch.float32)
