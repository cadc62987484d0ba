"""What any strategy has saved, every other loads, and trains on as if nothing had happened."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import load_checkpoint, save_checkpoint
from meshwright.testing import Case, pool
from meshwright.testing.case import TOLERANCE, Outcome
from meshwright.testing.parity import build_manager, difference, full_weights, reference, train_steps

STEPS, SAVED_AT = 5, 2
# Tied, accumulating, clipped, with weight decay: everything that a wrong step counter or group would change.
CASE = Case(tied=True, steps=STEPS, microbatches=2, sequences=16, ragged=True)


@dataclass(frozen=True)
class Layout:
    """A strategy on a mesh."""

    strategy: str
    ranks: int = 4
    config: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


LAYOUTS = {
    "single": Layout("single", 1),
    "ddp": Layout("ddp", 2),
    "ddp-zero1": Layout("ddp", 4, {"engine": "bucketed", "use_distributed_optimizer": True}),
    "fsdp2": Layout("fsdp2"),
    "fsdp2-tp2": Layout("fsdp2", 4, {}, {"tp_size": 2}),
    "fsdp2-hsdp": Layout("fsdp2", 4, {}, {"dp_replicate_size": 2}),
    "fsdp2-cp2": Layout("fsdp2", 4, {}, {"cp_size": 2}),
    "fsdp2-3": Layout("fsdp2", 3),
    "megatron-z1": Layout("megatron_fsdp", 4, {"zero_dp_strategy": 1}),
    "megatron-z3": Layout("megatron_fsdp", 4, {"zero_dp_strategy": 3}),
    "pipeline": Layout("fsdp2", 4, {}, {"pp_size": 2}),
}
# Between these, a model with experts moves.
EXPERTS = "mixtral"
EXPERT_LAYOUTS = {
    "single": LAYOUTS["single"],
    "fsdp2-hsdp": LAYOUTS["fsdp2-hsdp"],
    "ep4": Layout("fsdp2", 4, {}, {"ep_size": 4}),
    "ep2-shard2": Layout("fsdp2", 4, {}, {"ep_size": 2}),
    "ep2-hsdp": Layout("fsdp2", 4, {}, {"ep_size": 2, "dp_replicate_size": 2}),
    "tp2-ep4": Layout("fsdp2", 4, {}, {"ep_size": 4, "tp_size": 2}),
    "pp2-ep2": Layout("fsdp2", 4, {}, {"ep_size": 2, "pp_size": 2}),
}


def _case(layout: Layout, model_type: str = CASE.model_type) -> Case:
    # Three ranks divide other batches; what matters is the global batch, which is the same.
    case = replace(CASE, model_type=model_type)
    return case if layout.ranks != 3 else replace(case, shares=(6, 4, 6))


def _save(layout: Layout, directory: str, case: Case) -> list[float]:
    manager = build_manager(layout.strategy, layout.config, layout.sizes, case)
    losses = train_steps(manager, case, range(SAVED_AT))[0]
    save_checkpoint(manager, directory, step=SAVED_AT, extra={"tokens": 7})
    return losses


def _go_on(layout: Layout, directory: str, case: Case) -> tuple[int, Any, Outcome]:
    manager = build_manager(layout.strategy, layout.config, layout.sizes, case, seed=9)
    # A step of its own first, so that there is state to be replaced.
    train_steps(manager, case, range(50, 51))
    manifest = load_checkpoint(manager, directory)
    losses, norms, eval_losses = train_steps(manager, case, range(SAVED_AT, STEPS))
    return manifest.step, manifest.extra, Outcome(losses, norms, eval_losses, full_weights(manager))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def save(name: str, model_type: str = CASE.model_type) -> Path:
        layout = (LAYOUTS if model_type == CASE.model_type else EXPERT_LAYOUTS)[name]
        place = root / f"{name}-{model_type}"
        pool(layout.ranks).run(_save, layout, str(place), _case(layout, model_type))
        return place

    return save


@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_any_layout_goes_on_from_what_any_other_has_saved(source: str, target: str, saved: Any) -> None:
    _check_goes_on(LAYOUTS[target], saved(source), CASE.model_type)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(EXPERT_LAYOUTS, EXPERT_LAYOUTS)))
def test_experts_go_on_in_any_layout_from_any_other(source: str, target: str, saved: Any) -> None:
    _check_goes_on(EXPERT_LAYOUTS[target], saved(source, EXPERTS), EXPERTS)


def _check_goes_on(layout: Layout, saved: Path, model_type: str) -> None:
    whole = reference(_case(LAYOUTS["single"], model_type))
    expected = Outcome(whole.losses[SAVED_AT:], whole.norms[SAVED_AT:], [], whole.weights)
    found = pool(layout.ranks).run(_go_on, layout, str(saved), _case(layout, model_type))
    assert {(step, extra["tokens"]) for step, extra, _ in found} == {(SAVED_AT, 7)}
    assert difference([outcome for _, _, outcome in found], expected).worst <= TOLERANCE
