"""Every optimizer under every strategy: at parity with one process, or refused by name on all ranks.

What is refused is read from docs/reference/optimizers.md.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.managers import build_model_manager
from torch import nn

from meshwright.base.errors import MeshwrightError
from meshwright.launch.open_world import open_world
from meshwright.optim.shard_check import check_optimizer
from meshwright.tensors.state import DTENSOR_LAYOUT
from meshwright_testing.case import TOLERANCE, Case, Outcome
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import find_max_difference, full_weights, train_steps
from meshwright_testing.workers import pool

CASE = Case(sequences=4, steps=3)


class Sign(torch.optim.Optimizer):
    """An optimizer of a user's own that treats every element alike."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    def trust(self, parameter: torch.Tensor, change: torch.Tensor) -> torch.Tensor | float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    change = torch.tanh(100 * momentum.mul_(group["beta"]).add_(parameter.grad))
                    parameter.add_(change * self.trust(parameter, change), alpha=-group["lr"])


class LAMB(Sign):
    """One that looks at whole parameters; arXiv:1904.00962."""

    def trust(self, parameter: torch.Tensor, change: torch.Tensor) -> torch.Tensor | float:
        return torch.linalg.vector_norm(parameter) / (torch.linalg.vector_norm(change) + 1e-6)


class Demanding(Sign):
    """One whose class takes more than settings."""

    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


OWN = {"Sign": Sign, "LAMB": LAMB}
NAMES = sorted(
    {name for name, each in vars(torch.optim).items() if isinstance(each, type)} - {"Optimizer"} | OWN.keys()
)
FEW = ["Adafactor", "LAMB", "LBFGS", "Muon", "Rprop"]
SETTINGS: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 0.5},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Muon": {"lr": 1e-2, "weight_decay": 0.1},
}

LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "`single`": ("single", {}, {}),
    "`ddp`": ("ddp", {}, {}),
    "`ddp`, `engine: bucketed`": ("ddp", {"engine": "bucketed"}, {}),
    "`ddp`, `use_distributed_optimizer`": ("ddp", {"engine": "bucketed", "use_distributed_optimizer": True}, {}),
    "`fsdp2`": ("fsdp2", {}, {}),
    "`fsdp2`, `tp_size: 2`": ("fsdp2", {}, {"tp_size": 2}),
    "`megatron_fsdp`": ("megatron_fsdp", {}, {}),
    "`megatron_fsdp`, `zero_dp_strategy: 0`": ("megatron_fsdp", {"zero_dp_strategy": 0}, {}),
    "`ddp`, `pp_size: 2`": ("ddp", {}, {"pp_size": 2}),
    "`fsdp2`, `pp_size: 2`": ("fsdp2", {}, {"pp_size": 2}),
}
DAILY = ["`ddp`, `use_distributed_optimizer`", "`fsdp2`", "`megatron_fsdp`", "`fsdp2`, `pp_size: 2`"]


def refused(layout: str) -> set[str]:
    """What the table says."""
    text = (Path(__file__).parents[2] / "docs" / "reference" / "optimizers.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    (names,) = [row[3] for row in rows if row[1] == layout]
    return set(names.split(", "))


def made(name: str, named: Any) -> torch.optim.Optimizer:
    """As a factory of a user's own makes it."""
    cls: Any = OWN.get(name) or getattr(torch.optim, name)
    made_of: torch.optim.Optimizer = cls([each for _, each in named], **{"lr": 1e-2, **SETTINGS.get(name, {})})
    return made_of


def trained(name: str, strategy: str, config: dict[str, Any], sizes: dict[str, Any]) -> Outcome | str:
    model = build_case_model(CASE.model_type, tied=False, seed=0, dtype=torch.float64, layers=None)
    for key, parameter in model.named_parameters():
        # Muon is for matrices.
        parameter.requires_grad_(name != "Muon" or "proj" in key)
    manager = build_model_manager(model, strategy, config, sizes)
    try:
        manager.build_optimizer(lambda named: made(name, named))
    except MeshwrightError as error:
        return str(error)
    losses, norms, eval_losses = train_steps(manager, CASE, range(CASE.steps))
    return Outcome(losses, norms, eval_losses, full_weights(manager))


def all_trained(names: list[str], *layout: Any) -> dict[str, Outcome | str]:
    """The task of one rank."""
    # Muon rounds to bfloat16, which would hide what a layout does wrong.
    with patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        return {name: trained(name, *layout) for name in names}


@functools.lru_cache
def expected(name: str) -> Outcome | str:
    return pool(1).run(all_trained, [name], *LAYOUTS["`single`"])[0][name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        *(pytest.param(layout, FEW, id=f"{layout}-few") for layout in DAILY),
        *(pytest.param(layout, NAMES, id=f"{layout}-all", marks=pytest.mark.zoo) for layout in LAYOUTS),
    ],
)
def test_an_optimizer_reaches_parity_or_is_refused_by_name(layout: str, names: list[str]) -> None:
    outcomes = pool(1 if layout == "`single`" else 2).run(all_trained, names, *LAYOUTS[layout], timeout_s=400)
    wrong = {}
    for name in names:
        found = [outcome[name] for outcome in outcomes]
        if name in refused(layout):
            if len(set(map(str, found))) > 1 or not isinstance(found[0], str) or name not in found[0]:
                wrong[name] = found[0] if isinstance(found[0], str) else "accepted"
            continue
        reported = [outcome for outcome in found if isinstance(outcome, Outcome)]
        if len(reported) < len(found):
            wrong[name] = str(found[0])
        elif not (apart := find_max_difference(reported, expected(name)).worst) <= TOLERANCE:  # type: ignore[arg-type]
            wrong[name] = f"differs by {apart}"
    assert not wrong


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_tried_is_taken_with_a_warning_where_parameters_are_divided() -> None:
    assert pool(2).run(reported_untried, "ddp", {}) == [[], []]
    for reported in pool(2).run(reported_untried, "ddp", LAYOUTS[DAILY[0]][1]):
        assert len(reported) == 1
        assert "Demanding could not be tried" in reported[0]


def reported_untried(strategy: str, config: dict[str, Any]) -> list[str]:
    model = build_case_model(CASE.model_type, tied=False, seed=0, dtype=torch.float64, layers=None)
    manager = build_model_manager(model, strategy, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager.build_optimizer(lambda named: Demanding([p for _, p in named], model))
    return sorted({str(each.message) for each in caught if "could not be tried" in str(each.message)})


@pytest.mark.parametrize(
    ("name", "settings"),
    [("AdamW", {"differentiable": True}), ("Adam", {"betas": (0.9, 0.9, 0.9)}), ("SparseAdam", {}), ("LBFGS", {})],
)
def test_an_optimizer_that_could_not_step_is_refused_by_name(name: str, settings: dict[str, Any]) -> None:
    optimizer = getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))], **settings)
    # A world that is left by an error ends no group.
    with closing(open_world("cpu")) as world, pytest.raises(MeshwrightError, match=name):
        check_optimizer(optimizer, DTENSOR_LAYOUT, world)
