"""Malformed steps end in the same BatchError on every rank, before any other collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiers import mostly_slow

from meshwright import BatchError, MeshwrightError, StrategyError, count_tokens
from meshwright.step.token_loss import token_loss_sum
from meshwright.testing import Case, pool
from meshwright.testing.case import share
from meshwright.testing.parity import build_manager


def _step_with(strategy: str, change: Any, rank: int, tokens: Any = None) -> tuple[str, float]:
    """Change rank `rank`'s microbatches; afterwards a good step must still work."""
    case = Case(microbatches=3)
    manager = build_manager(strategy, {}, {}, case)
    good = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    num_tokens = count_tokens(good, manager.mesh)
    mine = manager.mesh.rank == rank
    text = "not raised"
    try:
        manager.forward_backward(
            change(good) if mine else good,
            num_tokens=tokens if mine and tokens is not None else num_tokens,
        )
    except MeshwrightError as error:
        text = f"{type(error).__name__}: {error}"
    return text, float(manager.forward_backward(good, num_tokens=num_tokens))


def keep(batches: list[Any]) -> list[Any]:
    return batches


def drop_one(batches: list[Any]) -> list[Any]:
    return batches[:-1]


def drop_all(batches: list[Any]) -> list[Any]:
    return []


def as_int32(batches: list[Any]) -> list[Any]:
    return [{**batch, "input_ids": batch["input_ids"].int()} for batch in batches]


def without_labels(batches: list[Any]) -> list[Any]:
    return [{"input_ids": batch["input_ids"]} for batch in batches]


def shorter_labels(batches: list[Any]) -> list[Any]:
    return [{**batch, "labels": batch["labels"][:, 1:]} for batch in batches]


def one_token(batches: list[Any]) -> list[Any]:
    return [{key: value[:, :1] for key, value in batch.items()} for batch in batches]


def id_too_large(batches: list[Any]) -> list[Any]:
    return [{**batch, "input_ids": batch["input_ids"] + 131} for batch in batches]


def label_too_large(batches: list[Any]) -> list[Any]:
    return [{**batch, "labels": torch.full_like(batch["labels"], 131)} for batch in batches]


def negative_id(batches: list[Any]) -> list[Any]:
    return [{**batch, "input_ids": batch["input_ids"] - 131} for batch in batches]


@pytest.mark.parametrize("strategy", mostly_slow(["ddp", "fsdp2"], "fsdp2"))
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_one, "between 2 and 3"),
        (drop_all, "non-empty"),
        (as_int32, "torch.int32"),
        (without_labels, "labels must be an int64 tensor"),
        (shorter_labels, "must have one shape"),
        (one_token, "S >= 2"),
        (id_too_large, "131 entries"),
        (label_too_large, "labels range from 131 to 131"),
        (negative_id, "range from -"),
    ],
)
def test_defect_on_one_rank_raises_on_all_and_training_goes_on(strategy: str, change: Any, words: str) -> None:
    texts, losses = zip(*pool(2).run(_step_with, strategy, change, 1), strict=True)
    assert len(set(texts)) == 1, texts
    assert texts[0].startswith("BatchError")
    assert words in texts[0]
    assert len(set(losses)) == 1


def test_token_counts_that_differ_are_refused_on_all_ranks() -> None:
    texts, _ = zip(*pool(2).run(_step_with, "ddp", keep, 1, torch.tensor(7)), strict=True)
    assert len(set(texts)) == 1
    assert "disagree on num_tokens: between 7 and" in texts[0]


def _no_tokens() -> str:
    case = Case(empty=12)
    manager = build_manager("fsdp2", {}, {}, case)
    batches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    with pytest.raises(BatchError) as caught:
        manager.forward_backward(batches, num_tokens=count_tokens(batches, manager.mesh))
    return str(caught.value)


def test_step_without_any_target_is_refused() -> None:
    assert all("num_tokens is 0" in text for text in pool(2).run(_no_tokens))


def _count(shares: tuple[int, ...] | None, sizes: dict[str, int]) -> int:
    from meshwright import Mesh, MeshSizes, open_world

    world = open_world("cpu")
    mesh = Mesh(MeshSizes(**sizes).resolve(world.size), world)
    batches = share(Case(shares=shares, microbatches=1), 0, mesh.data_rank, mesh.data_size)
    return int(count_tokens(batches, mesh))


@pytest.mark.slow
def test_tokens_are_those_after_the_shift_and_count_once_for_ranks_that_share_a_batch() -> None:
    from meshwright.testing.case import global_batch

    labels = global_batch(Case(), 0)["labels"]
    expected = int((labels[:, 1:] != -100).sum())
    assert pool(4).run(_count, (1, 2, 4, 5), {}) == [expected] * 4
    assert pool(4).run(_count, None, {"tp_size": 2, "dp_size": 2}) == [expected] * 4
    assert pool(4).run(_count, None, {"pp_size": 2, "cp_size": 2, "dp_size": 1}) == [expected] * 4


def _misuse(strategy: str) -> list[str]:
    from meshwright.optim.build import optimizer_factory
    from meshwright.testing.models import tiny_model
    from meshwright.train.run.run_file import OptimizerConfig

    case = Case()
    manager = build_manager(strategy, {}, {}, case)
    batches = share(case, 0, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    manager.forward_backward(batches, num_tokens=tokens)
    fresh = type(manager)(manager.config, manager.mesh)
    calls = [
        lambda: manager.forward_backward(batches, num_tokens=tokens),
        lambda: manager.parallelize(tiny_model()),
        lambda: fresh.forward_backward(batches, num_tokens=tokens),
        lambda: fresh.build_optimizer(optimizer_factory(OptimizerConfig())),
        lambda: fresh.optimizer_step(),
        lambda: fresh.state_dict(),
    ]
    texts = []
    for call in calls:
        with pytest.raises(StrategyError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_the_loss_of_logits_in_half_precision_is_that_in_float32() -> None:
    logits = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(10).view(2, 5)
    loss = token_loss_sum(logits, labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, token_loss_sum(logits.float(), labels))


@pytest.mark.parametrize("strategy", mostly_slow(["single", "ddp", "fsdp2"], "ddp"))
def test_calls_out_of_order_are_told(strategy: str) -> None:
    ranks = 1 if strategy == "single" else 2
    for texts in pool(ranks).run(_misuse, strategy):
        assert "pending" in texts[0]
        assert "twice" in texts[1]
        assert all("parallelize" in text or "build_optimizer" in text for text in texts[2:])


def _untrainable() -> list[str]:
    from meshwright import Mesh, MeshSizes, ModelError, open_world, resolve
    from meshwright.testing.models import tiny_model

    world = open_world("cpu")
    stack, degrees = resolve("ddp", MeshSizes(), world.size)
    mesh = Mesh(degrees, world)
    frozen = tiny_model().requires_grad_(False)
    routed = tiny_model()
    routed.config.output_router_logits = True
    texts = []
    for model in (frozen, routed):
        with pytest.raises(ModelError) as caught:
            stack.build(mesh).parallelize(model)
        texts.append(str(caught.value))
    return texts


def test_models_that_would_train_wrongly_are_refused_on_all_ranks() -> None:
    first, second = pool(2).run(_untrainable)
    assert first == second
    assert "no parameter" in first[0]
    assert "router loss" in first[1]


def _shared(rank: int) -> list[str]:
    """Rank `rank` chooses another batch than the rank that it shares one with; then all choose right."""
    case = Case()
    manager = build_manager("fsdp2", {}, {"tp_size": 2}, case)
    mesh, texts = manager.mesh, []
    for culprit in (rank, None):
        mine = share(case, 0, mesh.data_rank, mesh.data_size)
        if mesh.rank == culprit:
            mine = [{**batch, "input_ids": batch["input_ids"].flip(0)} for batch in mine]
        try:
            manager.forward_backward(mine, num_tokens=count_tokens(mine, mesh))
            texts.append("trained")
        except BatchError as error:
            texts.append(str(error))
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_that_share_a_batch_must_have_the_same_tokens(rank: int) -> None:
    for told, then in pool(4).run(_shared, rank):
        assert f"different input_ids for data rank {rank // 2} of 2" in told
        assert then == "trained"
