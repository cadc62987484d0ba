"""The router loss goes with any objective, in every layout."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from support.objective_layouts import LAYOUTS, Layout, all_columns_of, packed, shipped, trained_by
from torch import nn

from meshwright import Mesh, MeshSizes, open_world, optimizer_factory, resolve
from meshwright.base.types import Batch
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case, Outcome, pool
from meshwright.testing.case import TOLERANCE, share
from meshwright.testing.models import case_model
from meshwright.testing.parity import difference

COEFFICIENT = 0.3


def _model(case: Case, coefficient: float) -> nn.Module:
    model = case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64)
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = coefficient
    return model


def _manager(layout: Layout, case: Case, coefficient: float) -> StrategyManager:
    world, wrapper = open_world("cpu"), {"pipeline": dict(layout.wrapper)} if layout.wrapper else None
    stack, degrees = resolve(
        layout.strategy, MeshSizes(**layout.sizes), world.size, config=layout.config, wrapper_config=wrapper
    )
    manager = stack.build(Mesh(degrees, world))
    manager.parallelize(_model(case, coefficient))
    manager.build_optimizer(optimizer_factory(case.optimizer))
    return manager


def _batches(case: Case, step: int, data_rank: int, data_ranks: int, *, shares: int | None) -> list[Batch]:
    """Packed microbatches with all columns; statistics are of all ranks, so `single` sees those of `shares` as one."""
    ranks = range(data_rank, data_rank + 1) if shares is None else range(shares)
    each = [share(case, step, rank, data_ranks if shares is None else shares) for rank in ranks]
    found = []
    for parts in zip(*each, strict=True):
        batch = packed({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        found.append({**batch, **all_columns_of(batch)})
    return found


def _train(layout: Layout, case: Case, objective: str, shares: int | None, coefficient: float = COEFFICIENT) -> Outcome:
    manager = _manager(layout, case, coefficient)
    return trained_by(manager, case, shipped(objective), functools.partial(_batches, shares=shares))


@functools.cache
def _expected(case: Case, objective: str, shares: int, coefficient: float = COEFFICIENT) -> Outcome:
    return pool(1).run(_train, LAYOUTS["single"], case, objective, shares, coefficient)[0]


CASE = Case(model_type="mixtral", tied=None, steps=2, sequences=16, microbatches=2)
NAMES = ["single", "fsdp2", "cp", "ep", "pp", "pp-interleaved", "pp-cp", "megatron_fsdp", "tp"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_router_loss_is_added_to_an_objective(name: str) -> None:
    layout, case, shares = LAYOUTS[name], CASE, LAYOUTS[name].data_ranks
    if "pp_size" in layout.sizes:
        # The microbatches of which the statistics are, are the pipeline's.
        layout = replace(layout, wrapper={**layout.wrapper, "pp_microbatch_size": 8 // shares})
    found = pool(layout.ranks).run(_train, layout, case, "everything", None)
    assert difference(found, _expected(case, "everything", shares)).worst <= TOLERANCE


@pytest.mark.zoo
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("objective", ["dpo", "grpo", "cross_entropy"])
def test_the_router_loss_is_added_to_those_that_ship(objective: str, model_type: str, name: str) -> None:
    layout, case, shares = LAYOUTS[name], replace(CASE, model_type=model_type, steps=4), LAYOUTS[name].data_ranks
    if "pp_size" in layout.sizes:
        layout = replace(layout, wrapper={**layout.wrapper, "pp_microbatch_size": 8 // shares})
    found = pool(layout.ranks).run(_train, layout, case, objective, None)
    assert difference(found, _expected(case, objective, shares)).worst <= TOLERANCE


def test_it_is_the_objective_and_the_models_own_router_loss() -> None:
    """The mean over microbatches of what the model's own forward adds, beside the objective's sum."""
    case = replace(CASE, steps=1)
    with_it, without = (_expected(case, "everything", 1, coefficient).losses for coefficient in (COEFFICIENT, 0.0))
    model = _model(case, COEFFICIENT)
    own = [
        float(model(**{name: each[name] for name in ("input_ids", "position_ids")}, use_cache=False).aux_loss)
        for each in _batches(case, 0, 0, 1, shares=1)
    ]
    assert with_it[0] - without[0] == pytest.approx(COEFFICIENT * sum(own) / 2, abs=1e-12)
    assert sum(own) > 0.1
    assert with_it[1:] == without[1:]
