"""Malformed steps end in the same BatchError on every rank, before any other collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.caught_errors import catch_error
from support.managers import build_model_manager
from support.tiers import mark_mostly_slow

from meshwright import Mesh, MeshSizes, OptimizerConfig, count_tokens, open_world, optimizer_factory
from meshwright.step.tokens import sum_token_loss
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.case import build_global_batch, rank_microbatches
from meshwright_testing.models import build_tiny_model
from meshwright_testing.parity import build_manager


def _each(**changes: Any) -> Callable[[list[Any]], list[Any]]:
    """Change entries of each microbatch; None leaves one out."""

    def changed(batch: dict[str, Any]) -> dict[str, Any]:
        made = {**batch, **{name: change and change(batch[name]) for name, change in changes.items()}}
        return {name: tensor for name, tensor in made.items() if tensor is not None}

    return lambda batches: [changed(batch) for batch in batches]


DEFECTS: list[tuple[Callable[[list[Any]], list[Any]], str]] = [
    (lambda batches: batches[:-1], "between 2 and 3"),
    (lambda batches: [], "non-empty"),
    (_each(input_ids=lambda ids: ids.int()), "torch.int32"),
    (_each(labels=None), "labels must be an int64 tensor"),
    (_each(labels=lambda labels: labels[:, 1:]), "must have one shape"),
    (_each(input_ids=lambda ids: ids[:, :1], labels=lambda labels: labels[:, :1]), "S >= 2"),
    (_each(input_ids=lambda ids: ids + 131), "131 entries"),
    (_each(labels=lambda labels: torch.full_like(labels, 131)), "labels range from 131 to 131"),
    (_each(input_ids=lambda ids: ids - 131), "range from -"),
]


def _defects(strategy: str) -> tuple[list[str], float]:
    """Change the second rank's microbatches, then its tokens; leave out all targets; then take a good step."""
    manager = build_manager(strategy, {}, {}, Case(microbatches=3))
    mesh, texts = manager.mesh, []
    good = rank_microbatches(Case(microbatches=3), 0, mesh.data_rank, mesh.data_size)
    tokens = count_tokens(good, mesh)
    for change, others in (*((change, tokens) for change, _ in DEFECTS), (list, torch.tensor(7))):
        given = (change(good), others) if mesh.rank == 1 else (good, tokens)
        texts.append(catch_error(manager.forward_backward, given[0], num_tokens=given[1]))
    empty = _each(labels=lambda labels: torch.full_like(labels, -100))(good)
    texts.append(catch_error(manager.forward_backward, empty, num_tokens=count_tokens(empty, mesh)))
    return texts, float(manager.forward_backward(good, num_tokens=tokens))


@pytest.mark.parametrize("strategy", mark_mostly_slow(["ddp", "fsdp2"], "fsdp2"))
def test_defect_on_one_rank_raises_on_all_and_training_continues(strategy: str) -> None:
    first, second = pool(2).run(_defects, strategy)
    assert first == second
    for text, words in zip(
        first[0], [*(words for _, words in DEFECTS), "between 7 and", "num_tokens is 0"], strict=True
    ):
        assert text.startswith("BatchError: ")
        assert words in text


def _count(shares: tuple[int, ...] | None, sizes: dict[str, int]) -> int:
    world = open_world("cpu")
    mesh = Mesh(MeshSizes(**sizes).resolve(world.size), world)
    batches = rank_microbatches(Case(shares=shares, microbatches=1), 0, mesh.data_rank, mesh.data_size)
    return int(count_tokens(batches, mesh))


@pytest.mark.slow
def test_tokens_are_those_after_the_shift_and_count_once_for_ranks_that_share_a_batch() -> None:
    labels = build_global_batch(Case(), 0)["labels"]
    expected = int((labels[:, 1:] != -100).sum())
    assert pool(4).run(_count, (1, 2, 4, 5), {}) == [expected] * 4
    assert pool(4).run(_count, None, {"tp_size": 2, "dp_size": 2}) == [expected] * 4
    assert pool(4).run(_count, None, {"pp_size": 2, "cp_size": 2, "dp_size": 1}) == [expected] * 4


def _misuse(strategy: str) -> list[str]:
    case = Case()
    manager = build_manager(strategy, {}, {}, case)
    batches = rank_microbatches(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    manager.forward_backward(batches, num_tokens=tokens)
    fresh = type(manager)(manager.config, manager.mesh)
    frozen, routed = build_tiny_model().requires_grad_(False), build_tiny_model()
    routed.config.output_router_logits = True
    return [
        *(catch_error(build_model_manager, model, strategy) for model in (frozen, routed)),
        catch_error(manager.forward_backward, batches, num_tokens=tokens),
        catch_error(manager.parallelize, build_tiny_model()),
        catch_error(fresh.forward_backward, batches, num_tokens=tokens),
        catch_error(fresh.build_optimizer, optimizer_factory(OptimizerConfig())),
        catch_error(fresh.optimizer_step),
        catch_error(fresh.state_dict),
    ]


def test_the_loss_of_logits_in_half_precision_is_that_in_float32() -> None:
    logits = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(10).view(2, 5)
    loss = sum_token_loss(logits, labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, sum_token_loss(logits.float(), labels))


@pytest.mark.parametrize("strategy", mark_mostly_slow(["single", "ddp", "fsdp2"], "ddp"))
def test_calls_out_of_order_are_reported(strategy: str) -> None:
    ranks = 1 if strategy == "single" else 2
    for frozen, routed, pending, twice, *others in pool(ranks).run(_misuse, strategy):
        assert "no parameter" in frozen
        assert "router loss" in routed
        assert "pending" in pending
        assert "twice" in twice
        assert all("parallelize" in text or "build_optimizer" in text for text in others)


def _shared(rank: int) -> list[str]:
    """Rank `rank` chooses another batch than the rank that it shares one with; then all choose right."""
    case = Case()
    manager = build_manager("fsdp2", {}, {"tp_size": 2}, case)
    mesh, texts = manager.mesh, []
    for culprit in (rank, None):
        mine = rank_microbatches(case, 0, mesh.data_rank, mesh.data_size)
        if mesh.rank == culprit:
            mine = [{**batch, "input_ids": batch["input_ids"].flip(0)} for batch in mine]
        texts.append(catch_error(lambda mine=mine: manager.forward_backward(mine, num_tokens=count_tokens(mine, mesh))))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_that_share_a_batch_must_have_the_same_tokens(rank: int) -> None:
    for text, then in pool(4).run(_shared, rank):
        assert "BatchError: ranks that share a batch" in text
        assert f"different input_ids for data rank {rank // 2} of 2" in text
        assert not then
