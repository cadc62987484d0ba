"""Averages of weights: those of one process computed by hand, under every strategy, in checkpoints and in exports."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.step.agreement import count_tokens
from meshwright.strategy.contract import StrategyManager
from meshwright.testing import Case, pool
from meshwright.testing.case import share
from meshwright.testing.parity import build_manager, full_weights, train_steps
from meshwright.train.ema import EMA
from meshwright.train.optimizer_config import EMAConfig
from meshwright.train.run_file import OptimizerConfig, ScheduleConfig

EXACT = 1e-12
CASE = Case(
    sequences=4,
    steps=5,
    # Sums in another order move weights by 1e-15 where a step does not divide by a root of almost nothing.
    optimizer=OptimizerConfig(name="SGD", lr=0.5, weight_decay=0.1, options={"momentum": 0.9}),
    schedule=ScheduleConfig(name="linear", warmup_steps=1),
)
TIED = replace(CASE, tied=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "decay": {"decay": 0.8},
    "every": {"decay": 0.8, "every": 2},
    "start": {"decay": 0.8, "start": 2},
    "warmup": {"decay": 0.3, "warmup": True},
    "all": {"decay": 0.25, "every": 2, "start": 1, "warmup": True},
}

Layout = tuple[int, str, dict[str, Any], dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "ddp": (2, "ddp", {}, {}),
    "ddp, bucketed": (2, "ddp", {"engine": "bucketed"}, {}),
    "ddp, distributed optimizer": (2, "ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}),
    "ddp, gathers to come": (
        2,
        "ddp",
        {
            "engine": "bucketed",
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
        {},
    ),
    "fsdp2": (2, "fsdp2", {}, {}),
    "fsdp2, kept whole": (2, "fsdp2", {"reshard_after_forward": False}, {}),
    "fsdp2, hybrid": (4, "fsdp2", {}, {"dp_replicate_size": 2}),
    "fsdp2, tp and shards": (4, "fsdp2", {}, {"tp_size": 2}),
    "fsdp2, cp": (2, "fsdp2", {}, {"cp_size": 2}),
    "fsdp2, three ranks": (3, "fsdp2", {}, {}),
    "megatron_fsdp": (2, "megatron_fsdp", {}, {}),
    "megatron_fsdp, gathers overlap": (2, "megatron_fsdp", {"overlap_param_gather": True}, {}),
    "megatron_fsdp, ZeRO 0": (2, "megatron_fsdp", {"zero_dp_strategy": 0}, {}),
    "megatron_fsdp, tp": (4, "megatron_fsdp", {}, {"tp_size": 2}),
    "pipeline over ddp": (2, "ddp", {}, {"pp_size": 2}),
    "pipeline over fsdp2": (4, "fsdp2", {}, {"pp_size": 2}),
    "pipeline over ddp, distributed optimizer": (
        4,
        "ddp",
        {"engine": "bucketed", "use_distributed_optimizer": True},
        {"pp_size": 2},
    ),
}
DAILY = ["ddp, gathers to come", "fsdp2", "megatron_fsdp", "pipeline over ddp"]


def averaged(manager: StrategyManager, ema: EMA) -> dict[str, Tensor]:
    with ema.in_place():
        return full_weights(manager)


def evaluated(manager: StrategyManager, case: Case) -> float:
    microbatches = share(case, 50, manager.mesh.data_rank, manager.mesh.data_size)
    return float(manager.eval_loss(microbatches, num_tokens=count_tokens(microbatches, manager.mesh)))


def trained(
    strategy: str, config: dict[str, Any], sizes: dict[str, Any], case: Case, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], float, float, bool]:
    """The task of one rank: the average after all steps; how the averaged and the last weights are evaluated; and
    whether training goes on as if nothing had been evaluated."""
    manager = build_manager(strategy, config, sizes, case)
    ema = EMA(manager, EMAConfig(**settings))
    train_steps(manager, case, range(case.steps - 1))
    weights = full_weights(manager)
    with ema.in_place():
        evaluated(manager, case)
    same = all(torch.equal(weights[name], each) for name, each in full_weights(manager).items())
    train_steps(manager, case, range(case.steps - 1, case.steps))
    last = evaluated(manager, case)
    with ema.in_place():
        of_average = evaluated(manager, case)
    return averaged(manager, ema), of_average, last, same and last == evaluated(manager, case)


def by_hand(case: Case, settings: dict[str, Any]) -> tuple[dict[str, Tensor], float, float]:
    """The same of one process, without what is tested: weights after each step, and an average of them."""
    manager = build_manager("single", {}, {}, case)
    config = EMAConfig(**settings)
    average, updates = {name: each.clone() for name, each in full_weights(manager).items()}, 0
    for step in range(case.steps):
        train_steps(manager, case, range(step, step + 1))
        weights = full_weights(manager)
        if step + 1 <= config.start:
            average = {name: each.clone() for name, each in weights.items()}
        elif (step + 1 - config.start) % config.every == 0:
            decay = min(config.decay, (1 + updates) / (10 + updates)) if config.warmup else config.decay
            average = {name: decay * each + (1 - decay) * weights[name] for name, each in average.items()}
            updates += 1
    last = evaluated(manager, case)
    with torch.no_grad():
        for part in manager.model_parts:
            for name, parameter in part.named_parameters():
                parameter.copy_(average[name])
    return average, evaluated(manager, case), last


@functools.lru_cache
def expected(case: Case, setting: str) -> tuple[dict[str, Tensor], float, float]:
    (found,) = pool(1).run(by_hand, case.undivided(), SETTINGS[setting])
    hand: tuple[dict[str, Tensor], float, float] = found
    return hand


def worst(found: dict[str, Tensor], average: dict[str, Tensor]) -> float:
    assert found.keys() == average.keys()
    return max(float((found[name] - each).abs().max()) for name, each in average.items())


def check_layout(layout: Layout, case: Case, setting: str) -> None:
    ranks, *rest = layout
    case = replace(case, sequences=12) if ranks == 3 else case
    average, of_average, last = expected(case, setting)
    for found, loss, loss_of_weights, is_left in pool(ranks).run(trained, *rest, case, SETTINGS[setting]):
        assert worst(found, average) <= EXACT
        assert abs(loss - of_average) <= EXACT
        assert abs(loss_of_weights - last) <= EXACT
        assert abs(of_average - last) > 1e-6
        assert is_left


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_option_of_an_average_acts_as_by_hand(setting: str) -> None:
    check_layout((1, "single", {}, {}), CASE, setting)


def few_and_all(daily: list[str]) -> list[Any]:
    return [pytest.param(each, id=each, marks=() if each in daily else pytest.mark.zoo) for each in LAYOUTS]


@pytest.mark.parametrize("layout", few_and_all(DAILY))
def test_the_average_is_that_of_one_process_by_hand(layout: str) -> None:
    check_layout(LAYOUTS[layout], TIED if "pipeline" in layout else CASE, "all")
