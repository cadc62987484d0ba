"""What any strategy has saved, every other loads, and trains on as if nothing had happened."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import load_checkpoint, save_checkpoint
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE, Outcome
from meshwright_testing.parity import build_manager, find_max_difference, full_weights, run_reference, train_steps

STEPS, SAVED_AT = 5, 2
# Tied, accumulating, clipped, with weight decay: a wrong step counter or group changes the numbers.
CASE = Case(tied=True, steps=STEPS, microbatches=2, sequences=16, ragged=True)


@dataclass(frozen=True)
class Layout:
    """A strategy on a mesh."""

    strategy: str = "fsdp2"
    ranks: int = 4
    config: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


DENSE = {
    "single": Layout("single", 1),
    "ddp": Layout("ddp", 2),
    "ddp-zero1": Layout("ddp", 4, {"engine": "bucketed", "use_distributed_optimizer": True}),
    "fsdp2": Layout(),
    "fsdp2-tp2": Layout(sizes={"tp_size": 2}),
    "fsdp2-hsdp": Layout(sizes={"dp_replicate_size": 2}),
    "fsdp2-cp2": Layout(sizes={"cp_size": 2}),
    "fsdp2-3": Layout(ranks=3),
    "megatron-z1": Layout("megatron_fsdp", 4, {"zero_dp_strategy": 1}),
    "megatron-z3": Layout("megatron_fsdp", 4, {"zero_dp_strategy": 3}),
    "pipeline": Layout(sizes={"pp_size": 2}),
    "pp2": Layout(ranks=2, sizes={"pp_size": 2}),
    "fsdp2-2": Layout(ranks=2),
}
EXPERTS = {
    "single": DENSE["single"],
    "fsdp2-hsdp": DENSE["fsdp2-hsdp"],
    "ep4": Layout(sizes={"ep_size": 4}),
    "ep2-shard2": Layout(sizes={"ep_size": 2}),
    "ep2-hsdp": Layout(sizes={"ep_size": 2, "dp_replicate_size": 2}),
    "tp2-ep4": Layout(sizes={"ep_size": 4, "tp_size": 2}),
    "pp2-ep2": Layout(sizes={"ep_size": 2, "pp_size": 2}),
}
MODELS = {CASE.model_type: DENSE, "mixtral": EXPERTS}
FAST = {("fsdp2-2", "ddp"), ("ddp", "pp2"), ("pp2", "fsdp2-2")}


def _pairs() -> Iterator[Any]:
    """Few pairs are fast; in the slow ones each layout is source and target once; all others are for the zoo."""
    for model_type, layouts in MODELS.items():
        names = list(layouts)
        following = set(itertools.pairwise([*names, names[0]]))
        for pair in itertools.product(names, names):
            marks = [] if pair in FAST else [pytest.mark.slow if pair in following else pytest.mark.zoo]
            yield pytest.param(model_type, *pair, marks=marks)


def _case(layout: Layout, model_type: str) -> Case:
    # Three ranks divide batches otherwise; the global batch is the same.
    case = replace(CASE, model_type=model_type)
    return case if layout.ranks != 3 else replace(case, shares=(6, 4, 6))


def _save(layout: Layout, directory: str, case: Case) -> None:
    manager = build_manager(layout.strategy, layout.config, layout.sizes, case)
    train_steps(manager, case, range(SAVED_AT))
    save_checkpoint(manager, directory, step=SAVED_AT, extra={"tokens": 7})


def _resume(layout: Layout, directory: str, case: Case) -> tuple[int, Any, Outcome]:
    manager = build_manager(layout.strategy, layout.config, layout.sizes, case, seed=9)
    # A step first, so that there is state to replace.
    train_steps(manager, case, range(50, 51))
    manifest = load_checkpoint(manager, directory)
    losses, norms, eval_losses = train_steps(manager, case, range(SAVED_AT, STEPS))
    return manifest.step, manifest.extra["tokens"], Outcome(losses, norms, eval_losses, full_weights(manager))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("checkpoints")

    @functools.cache
    def save(model_type: str, name: str) -> Path:
        layout, place = MODELS[model_type][name], root / f"{name}-{model_type}"
        pool(layout.ranks).run(_save, layout, str(place), _case(layout, model_type))
        return place

    return save


@pytest.mark.parametrize(("model_type", "source", "target"), list(_pairs()))
def test_any_layout_resumes_from_what_any_other_has_saved(
    model_type: str, source: str, target: str, saved: Any
) -> None:
    whole = run_reference(_case(DENSE["single"], model_type))
    expected = Outcome(whole.losses[SAVED_AT:], whole.norms[SAVED_AT:], [], whole.weights)
    layout = MODELS[model_type][target]
    found = pool(layout.ranks).run(_resume, layout, str(saved(model_type, source)), _case(layout, model_type))
    assert {(step, tokens) for step, tokens, _ in found} == {(SAVED_AT, 7)}
    assert find_max_difference([outcome for _, _, outcome in found], expected).worst <= TOLERANCE
