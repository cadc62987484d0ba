"""The router loss: that of transformers on one process, and the same on many, whatever the strategy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.caught_errors import catch_error
from support.managers import build_empty_manager, build_model_manager
from support.objective_layouts import LAYOUTS as OBJECTIVES
from support.objective_layouts import (
    ObjectiveLayout,
    build_all_columns,
    build_shipped_objective,
    pack_documents,
    train_manager,
)
from support.tiers import mark_mostly_slow
from torch import nn

from meshwright import count_tokens
from meshwright.base.types import IGNORE_INDEX, Batch
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.case import Outcome, rank_microbatches
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import find_max_difference, full_weights

CASE = Case(model_type="mixtral", tied=None, steps=2, sequences=16)
COEFFICIENT = 0.3


def _model(case: Case, coefficient: float = COEFFICIENT) -> nn.Module:
    model = build_case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64)
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = coefficient
    return model


def _padded(batch: Batch) -> Batch:
    """Sequences of different lengths, by an attention mask."""
    ids = batch["input_ids"]
    lengths = 8 + ids[:, :1] % 9
    mask = torch.arange(ids.shape[1]) < lengths
    return {**batch, "attention_mask": mask.long(), "labels": batch["labels"].where(mask, IGNORE_INDEX)}


def _shared(case: Case, step: int, data_rank: int, data_ranks: int, shares: int | None) -> list[Batch]:
    """Microbatches of a rank; statistics are of all ranks, so `single` sees those of `shares` as one."""
    ranks = range(data_rank, data_rank + 1) if shares is None else range(shares)
    each = [rank_microbatches(case, step, rank, shares or data_ranks) for rank in ranks]
    return [{key: torch.cat([part[key] for part in parts]) for key in parts[0]} for parts in zip(*each, strict=True)]


def _train(
    strategy: str,
    config: Mapping[str, Any],
    sizes: Mapping[str, Any],
    case: Case,
    padded: bool,
    shares: int | None,
    wrapper: Mapping[str, Any] | None = None,
) -> Outcome:
    manager = build_model_manager(_model(case), strategy, config, sizes, wrapper=wrapper, optimizer=case.optimizer)
    losses, norms, eval_losses = [], [], []
    for step in range(case.steps):
        microbatches = _shared(case, step, manager.mesh.data_rank, manager.mesh.data_size, shares)
        if padded:
            microbatches = [_padded(batch) for batch in microbatches]
        num_tokens = count_tokens(microbatches, manager.mesh)
        losses.append(float(manager.forward_backward(microbatches, num_tokens=num_tokens)))
        norms.append(float(manager.clip_grad_norm(case.max_norm)))
        manager.optimizer_step()
        eval_losses.append(float(manager.eval_loss(microbatches, num_tokens=num_tokens)))
    return Outcome(losses, norms, eval_losses, full_weights(manager))


@functools.cache
def _expected(case: Case, padded: bool, shares: int) -> Outcome:
    return pool(1).run(_train, "single", {}, {}, case, padded, shares)[0]


LAYOUTS = [
    ("single", 1, {}, {}, 1),
    ("ddp", 2, {}, {}, 2),
    ("ddp", 2, {"engine": "bucketed"}, {}, 2),
    ("megatron_fsdp", 2, {}, {}, 2),
    ("fsdp2", 4, {"sequence_parallel": True}, {"tp_size": 2}, 2),
    ("fsdp2", 4, {}, {"ep_size": 4, "tp_size": 2}, 2),
    ("fsdp2", 4, {"cp_attention": "ulysses", "activation_checkpointing": "full"}, {"cp_size": 2, "ep_size": 2}, 2),
]


@pytest.mark.parametrize(
    ("strategy", "ranks", "config", "sizes", "shares"), mark_mostly_slow(LAYOUTS, ("ddp", 2, {}, {}, 2)), ids=str
)
@pytest.mark.parametrize(("microbatches", "padded"), mark_mostly_slow([(1, True), (2, False)], 2))
def test_statistics_are_those_of_all_ranks(strategy, ranks, config, sizes, shares, microbatches, padded):
    case = Case(**{**vars(CASE), "microbatches": microbatches})
    found = pool(ranks).run(_train, strategy, config, sizes, case, padded, None)
    assert find_max_difference(found, _expected(case, padded, shares)).worst <= 1e-9


PIPELINES: list[tuple[str, int, dict[str, Any], dict[str, int], int, dict[str, Any]]] = [
    ("fsdp2", 4, {"activation_checkpointing": "full"}, {"pp_size": 2}, 2, {"pp_schedule": "interleaved1f1b"}),
    ("ddp", 4, {"engine": "bucketed"}, {"pp_size": 2}, 2, {"pp_schedule": "zbvzerobubble"}),
    ("fsdp2", 4, {}, {"pp_size": 2, "cp_size": 2}, 1, {}),
    ("fsdp2", 4, {}, {"pp_size": 2, "ep_size": 2}, 2, {"pp_schedule": "gpipe"}),
    # The schedule runs twice in a step, and is filled up.
    ("fsdp2", 2, {}, {"pp_size": 2}, 1, {"pp_batch_size": 8}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "config", "sizes", "shares", "wrapper"), PIPELINES, ids=str)
@pytest.mark.parametrize(("model_type", "padded"), [("mixtral", True), ("qwen3_moe", False)])
def test_every_stage_of_a_pipeline_adds_its_routers(
    model_type, padded, strategy, ranks, config, sizes, shares, wrapper
):
    case = Case(model_type=model_type, tied=None, steps=2, sequences=16)
    size = 4 // shares
    found = pool(ranks).run(
        _train, strategy, config, sizes, case, padded, None, {"pp_microbatch_size": size, **wrapper}
    )
    expected = _expected(Case(**{**vars(case), "microbatches": 4}), padded, shares)
    assert find_max_difference(found, expected).worst <= 1e-9


@pytest.mark.parametrize("model_type", mark_mostly_slow(["mixtral", "qwen2_moe", "gpt_oss", "olmoe"]))
@pytest.mark.parametrize(("padded", "microbatches"), mark_mostly_slow([(False, 2), (True, 1)]))
def test_the_loss_is_that_of_the_models_own_forward(model_type: str, padded: bool, microbatches: int) -> None:
    """Of several microbatches, the mean of what each gives."""
    case = Case(model_type=model_type, tied=None, steps=1, microbatches=microbatches)
    found = pool(1).run(_train, "single", {}, {}, case, padded, 1)[0]
    given = [_padded(batch) if padded else batch for batch in rank_microbatches(case, 0, 0, 1)]
    tokens = [int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in given]
    outputs = [_model(case)(**batch) for batch in given]
    routers = [COEFFICIENT * each.aux_loss.item() for each in outputs]
    assert min(routers) > 0.1
    sums = [(each.loss.item() - mine) * n for each, mine, n in zip(outputs, routers, tokens, strict=True)]
    assert found.losses == [pytest.approx(sum(sums) / sum(tokens) + sum(routers) / microbatches, abs=1e-12)]


def _refused(kind: str) -> str:
    sizes = {"given stages": {"pp_size": 2}, "another loss under cp": {"cp_size": 2}}.get(kind, {})
    given = {"patch_inner_model": False, "patch_causal_lm_model": False} if "pp_size" in sizes else None
    manager = build_empty_manager("fsdp2", sizes=sizes, wrapper=given)
    model = _model(CASE)
    if kind.startswith("another loss"):
        forward = model.forward

        @functools.wraps(forward)
        def other(*args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            if outputs.aux_loss is not None:
                outputs.aux_loss = outputs.aux_loss * 2
            return outputs

        model.forward = other
    microbatches = rank_microbatches(CASE, 0, manager.mesh.data_rank, manager.mesh.data_size)

    def train() -> None:
        manager.parallelize(model)
        manager.forward_backward(microbatches, num_tokens=count_tokens(microbatches, manager.mesh))

    return catch_error(train)


@pytest.mark.parametrize(
    ("kind", "text"),
    mark_mostly_slow(
        [
            ("given stages", "pipelines of given stages (patch_inner_model=false) do not add it"),
            ("another loss", "so its statistics over ranks are not known"),
            ("another loss under cp", "so its statistics over ranks are not known"),
        ]
    ),
)
def test_what_cannot_be_added_is_refused_on_all_ranks(kind: str, text: str) -> None:
    found = pool(2).run(_refused, kind)
    assert all(each.startswith("ModelError: ") and text in each for each in found)


# -- beside an objective


def _columns(case: Case, step: int, data_rank: int, data_ranks: int, *, shares: int | None) -> list[Batch]:
    """Packed microbatches with all columns."""
    batches = [pack_documents(batch) for batch in _shared(case, step, data_rank, data_ranks, shares)]
    return [{**batch, **build_all_columns(batch)} for batch in batches]


def _objective(layout: ObjectiveLayout, case: Case, shares: int | None, coefficient: float = COEFFICIENT) -> Outcome:
    how = layout.strategy, layout.config, layout.sizes
    manager = build_model_manager(_model(case, coefficient), *how, wrapper=layout.wrapper, optimizer=case.optimizer)
    return train_manager(
        manager, case, build_shipped_objective("everything"), functools.partial(_columns, shares=shares)
    )


PACKED = replace(CASE, microbatches=2)


def test_beside_an_objective_it_is_the_mean_of_what_the_models_own_forward_adds() -> None:
    case = replace(PACKED, steps=1)
    with_it, without = (
        pool(1).run(_objective, OBJECTIVES["single"], case, 1, coefficient)[0].losses
        for coefficient in (COEFFICIENT, 0.0)
    )
    inputs = ("input_ids", "position_ids")
    batches = [{name: each[name] for name in inputs} for each in _columns(case, 0, 0, 1, shares=1)]
    own = [_model(case)(**batch, use_cache=False).aux_loss.item() for batch in batches]
    assert with_it[0] - without[0] == pytest.approx(COEFFICIENT * sum(own) / 2, abs=1e-12)
    assert sum(own) > 0.1
    assert with_it[1:] == without[1:]
