"""The optimizer in front of the stages': torch's Optimizer to schedules and scripts, before and after loading."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from meshwright import StrategyError, load_checkpoint, save_checkpoint
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case
from meshwright.training.loop.step import record_stepped_groups
from meshwright_pipeline.state.stateful_manager import FrozenStageOptimizer
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing import pool
from meshwright_testing.parity import build_manager_and_optimizer, full_weights, train_steps

PP2, SLOW = {"pp_size": 2}, pytest.mark.slow
TWO_STAGES = {"pipeline": {"pp_schedule": "zbv"}}
CASE = Case(layers=5, steps=6, optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1))


def _built(case: Case = CASE, seed: int = 0) -> tuple[StrategyManager, Any]:
    manager, optimizer = build_manager_and_optimizer("single", {}, PP2, case, seed=seed, wrapper_config=TWO_STAGES)
    return manager, optimizer


def _steps(manager: StrategyManager, schedule: LambdaLR, steps: range) -> list[tuple[float, set[float]]]:
    """Loss of each step, and the rates that optimizers stepped with."""
    found = []
    for step in steps:
        with record_stepped_groups() as groups:
            (loss,) = train_steps(manager, CASE, range(step, step + 1))[0]
        found.append((loss, {group["lr"] for group in groups}))
        schedule.step()
    return found


def _resumed(root: str, way: str) -> tuple[Any, Any]:
    manager, optimizer = _built()
    schedule = LambdaLR(optimizer, lambda step: 1 - step / 6)
    _steps(manager, schedule, range(3))
    save_checkpoint(manager, root, step=3, scheduler=schedule)
    state, groups, rates = copy.deepcopy((manager.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    expected = _steps(manager, schedule, range(3, 6))
    manager, optimizer = _built(seed=1)
    schedule = LambdaLR(optimizer, lambda step: 1 - step / 6)
    _steps(manager, schedule, range(1))
    if way == "checkpoint":
        load_checkpoint(manager, root, scheduler=schedule)
    else:
        manager.load_state_dict(state)
        if way == "state of the optimizer":
            optimizer.load_state_dict(groups)
        schedule.load_state_dict(rates)
    return expected, _steps(manager, schedule, range(3, 6))


WAYS = ["checkpoint", *(pytest.param(f"state of the {each}", marks=SLOW) for each in ("manager", "optimizer"))]


@pytest.mark.parametrize("way", WAYS)
def test_rates_reach_every_stage_after_loading(way: str, tmp_path: Path) -> None:
    for expected, found in pool(2).run(_resumed, str(tmp_path / "x"), way):
        assert found == expected
        assert [rate for _, rates in found for rate in rates] == pytest.approx([5e-3, 1e-2 / 3, 1e-2 / 6])


def _as_an_optimizer() -> None:
    manager, optimizer = _built()
    train_steps(manager, CASE, range(1))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    inner = [stage.manager.optimizer for stage in manager._stages.values()]
    state = optimizer.state_dict()
    assert len(optimizer.param_groups) == sum(len(each.param_groups) for each in inner)
    assert set(state["state"]) == set(range(len(parameters)))
    assert all(optimizer.state[p] is each.state[p] for each in inner for p in each.state)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    assert {group["lr"] for each in inner for group in each.param_groups} == {0.5}
    optimizer.load_state_dict(state)
    assert {group["lr"] for each in inner for group in each.param_groups} == {1e-2}
    again = optimizer.state_dict()
    for number, values in state["state"].items():
        assert all(torch.equal(again["state"][number][key], value) for key, value in values.items())
    for wrong, text in (
        (lambda: setattr(optimizer, "param_groups", [{"params": parameters}]), "cannot be replaced"),
        (lambda: setattr(optimizer, "state", {parameters[0]: {}}), "load_state_dict"),
        (lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}), "belong to stages of this"),
    ):
        with pytest.raises(StrategyError, match=text):
            wrong()


def test_it_is_an_optimizer_of_torch() -> None:
    pool(2).run(_as_an_optimizer)


def _added() -> tuple[list[int], bool]:
    """Norms are added after the optimizer was made; afterwards they train."""
    manager, _ = _built()
    optimizer = manager.build_optimizer(
        lambda named: torch.optim.SGD([p for name, p in named if "norm" not in name], lr=0.1)
    )
    named = [(name, p) for part in manager.model_parts for name, p in part.named_parameters() if "norm" in name]
    before = {name: weight for name, weight in full_weights(manager).items() if "norm" in name}
    optimizer.add_param_group({"params": [p for _, p in named], "lr": 0.2})
    train_steps(manager, CASE, range(1))
    after = full_weights(manager)
    counts = [len(stage.manager.optimizer.param_groups[-1]["params"]) for stage in manager._stages.values()]
    return [len(named) - sum(counts), len(optimizer.param_groups)], not any(
        torch.equal(before[name], after[name]) for name in before
    )


def test_a_group_can_be_added() -> None:
    for (missing, groups), trained in pool(2).run(_added):
        assert (missing, groups) == (0, 4)
        assert trained


FROZEN = Case(layers=4, steps=6, frozen=("*embed*", "*layers.0.*", "*layers.1.*"))


def _frozen(root: str) -> tuple[bool, list[Any]]:
    found = []
    for resumed in (False, True):
        manager, optimizer = build_manager_and_optimizer("single", {}, PP2, FROZEN)
        schedule = LambdaLR(optimizer, lambda step: 1 - step / 6)
        if resumed:
            load_checkpoint(manager, root, scheduler=schedule)
        for step in range(2 * resumed, 4):
            found.append(schedule.get_last_lr()[0])
            train_steps(manager, FROZEN, range(step, step + 1))
            schedule.step()
            if step == 1:
                save_checkpoint(manager, root, step=2, scheduler=schedule)
    return isinstance(optimizer, FrozenStageOptimizer), found


def test_a_rank_with_frozen_stages_knows_the_rate_of_the_others(tmp_path: Path) -> None:
    (first, rates), (last, others) = pool(2).run(_frozen, str(tmp_path / "x"))
    assert (first, last) == (True, False)
    expected = [1e-2 * (1 - step / 6) for step in (0, 1, 2, 3, 2, 3)]
    assert rates == pytest.approx(expected)
    assert others == pytest.approx(expected)
