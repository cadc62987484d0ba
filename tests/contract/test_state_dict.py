"""State by name: taking it changes nothing, and what was saved can be loaded, whatever the optimizer has seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.tiers import mark_mostly_slow

from meshwright import StrategyError
from meshwright.testing import Case
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, full_weights, run_reference, train_steps

LAYOUTS = [("ddp", 2, {}), ("fsdp2", 4, {"dp_replicate_size": 2})]
CASE = Case(tied=True)


def _reloaded(strategy: str, sizes: dict[str, int], case: Case, before: int) -> tuple[list[float], list[float], bool]:
    """Train `before` steps, move the full state into another manager, and continue with both: their losses, and whether
    the state stayed as it was taken."""
    first = build_manager(strategy, {}, sizes, case)
    losses = train_steps(first, case, range(before))[0]
    first.state_dict()
    state = first.state_dict(full=True)
    taken = {name: value.clone() for name, value in state["model"].items()}
    own = losses + train_steps(first, case, range(before, case.steps))[0]
    is_copy = all(torch.equal(value, taken[name]) for name, value in state["model"].items())
    second = build_manager(strategy, {}, sizes, case, seed=9)
    train_steps(second, case, range(50, 51))
    second.load_state_dict(state, full=True)
    return own, losses + train_steps(second, case, range(before, case.steps))[0], is_copy


@pytest.mark.parametrize(("strategy", "ranks", "sizes"), mark_mostly_slow(LAYOUTS, "ddp"))
@pytest.mark.parametrize("before", mark_mostly_slow([0, 2], 2))
@pytest.mark.parametrize(
    "case",
    mark_mostly_slow(
        [
            pytest.param(CASE, id="adamw"),
            pytest.param(replace(CASE, optimizer=OptimizerConfig(name="SGD", lr=0.1)), id="sgd-without-state"),
            pytest.param(Case(model_type="routed", route="steps"), id="parameters-that-never-had-a-gradient"),
            pytest.param(Case(frozen=("*embed_tokens*",)), id="frozen"),
        ],
        "adamw",
    ),
)
def test_full_state_continues_where_it_was_taken_and_taking_it_changes_nothing(
    strategy: str, ranks: int, sizes: dict[str, int], before: int, case: Case
) -> None:
    if strategy == "ddp" and case.model_type == "routed":
        pytest.skip("ddp refuses parameters without gradient unless reported")
    for *losses, is_copy in pool(ranks).run(_reloaded, strategy, sizes, case, before):
        assert losses == [pytest.approx(run_reference(case).losses, abs=1e-9)] * 2
        assert is_copy


def _refusals(strategy: str) -> list[str]:
    manager = build_manager(strategy, {}, {}, Case())
    train_steps(manager, Case(), range(1))
    before = full_weights(manager)
    state = manager.state_dict(full=True)
    first = manager.mesh.rank == 0

    def changed(change: Any) -> dict[str, Any]:
        if not first:
            return {"model": {}, "optimizer": {}}
        model, optimizer = dict(state["model"]), {**state["optimizer"], "state": dict(state["optimizer"]["state"])}
        change(model, optimizer)
        return {"model": model, "optimizer": optimizer}

    name = next(iter(before))
    texts = []
    for change in (
        lambda model, optimizer: model.pop(name),
        lambda model, optimizer: model.update(other=torch.zeros(1)),
        lambda model, optimizer: model.update({name: torch.zeros(3)}),
        lambda model, optimizer: optimizer["state"].update(other={}),
        lambda model, optimizer: optimizer.update(param_groups=optimizer["param_groups"][:1]),
    ):
        with pytest.raises(StrategyError) as caught:
            manager.load_state_dict(changed(change), full=True)
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("strategy", mark_mostly_slow(["ddp", "fsdp2"], "fsdp2"))
def test_state_of_another_model_is_refused_on_all_ranks(strategy: str) -> None:
    first, second = pool(2).run(_refusals, strategy)
    assert first == second
    expected = ["lacks", "does not have: other", "has shape (3,)", "does not have: other", "meets 0 groups"]
    for text, words in zip(first, expected, strict=True):
        assert words in text
