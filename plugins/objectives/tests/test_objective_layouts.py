"""An objective is the same sum in every layout: losses, further sums, norms, and what is trained."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.objective_layouts import (
    LAYOUTS,
    SHIPPED,
    ObjectiveLayout,
    SequenceCountObjective,
    build_case,
    build_pair_microbatches,
    build_shipped_objective,
    combined_objective,
    train_manager,
    train_with_objective,
)

from meshwright.testing import Case, Outcome
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE
from meshwright_testing.parity import find_max_difference


@functools.cache
def _expected(case: Case, objective: Any = combined_objective) -> Outcome:
    return pool(1).run(train_with_objective, LAYOUTS["single"], case, objective)[0]


def _worst(name: str, case: Case, objective: Any = combined_objective, **options: Any) -> float:
    layout = LAYOUTS[name]
    found = pool(layout.ranks).run(functools.partial(train_with_objective, **options), layout, case, objective)
    return find_max_difference(found, _expected(case, objective)).worst


SLOW = pytest.mark.slow
OTHERS = [name for name in LAYOUTS if name != "single"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "fsdp2" else SLOW) for name in OTHERS])
def test_everything_at_once_is_as_on_one_rank(name: str) -> None:
    """Packed rows, unequal numbers of them, some without labels, two microbatches, evaluation behind each step."""
    assert _worst(name, build_case(LAYOUTS[name], steps=2)) <= TOLERANCE


def _tied(name: str) -> Case:
    return build_case(LAYOUTS[name], tied=True, steps=2)


CHUNKS, COUNTING = {"loss_chunk_rows": 5}, SequenceCountObjective()
RECOMPUTED = {"tp": "selective", "pp-interleaved": "full", "cp": {"offload": "cpu"}}


@SLOW
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"config": CHUNKS}) for name in ("single", "fsdp2", "tp-sequence", "cp", "pp-interleaved")),
        # An objective that counts for itself is announced.
        *((name, {"objective": COUNTING, "announces": True}) for name in ("ddp-zero1", "tp", "cp-ulysses", "pp")),
        *((name, {"config": CHUNKS | {"activation_checkpointing": mode}}) for name, mode in RECOMPUTED.items()),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.get("config", value)),
)
def test_options_of_the_loss_and_of_activations_with_tied_weights(name: str, options: dict[str, Any]) -> None:
    assert _worst(name, _tied(name), **options) <= TOLERANCE


@SLOW
def test_what_is_counted_changes_what_is_trained() -> None:
    case = _tied("single")
    counted, plain = _expected(case, COUNTING), _expected(case)
    assert counted.losses[0] > 2 * plain.losses[0]
    assert counted.losses[1:6] == pytest.approx(plain.losses[1:6], rel=1e-12)


# -- the objectives that ship


def _by_pairs(layout: ObjectiveLayout) -> ObjectiveLayout:
    return replace(layout, wrapper={**layout.wrapper, "pp_microbatch_size": 2}) if "pp_size" in layout.sizes else layout


def _in_turns(layout: ObjectiveLayout, case: Case, names: Sequence[str]) -> list[Outcome]:
    """The task of one rank: a step with each objective, one behind the other, with what the one before has trained."""
    manager, objectives = layout.build(case), {name: build_shipped_objective(name) for name in names}
    return [
        train_manager(manager, replace(case, steps=1), objectives[name], build_pair_microbatches)
        for index, name in enumerate(names)
    ]


EVERY = ("everything", *SHIPPED)


@SLOW
@pytest.mark.parametrize("name", ["ddp-zero1", "tp-sequence", "cp", "pp-interleaved", "megatron_fsdp"])
def test_all_objectives_in_turns(name: str) -> None:
    """Pairs in unequal numbers, some without labels; each step is one of another objective."""
    layout = _by_pairs(LAYOUTS[name])
    case = build_case(layout, sequences=16)
    (expected,) = pool(1).run(_in_turns, LAYOUTS["single"], case, EVERY)
    for found in pool(layout.ranks).run(_in_turns, layout, case, EVERY):
        for objective, mine, single in zip(EVERY, found, expected, strict=True):
            assert find_max_difference([mine], single).worst <= TOLERANCE, objective
