"""An objective is the same sum in every layout: losses, further sums, norms, and what is trained."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.objective_layouts import (
    LAYOUTS,
    SHIPPED,
    Counting,
    Layout,
    case_of,
    everything,
    pairs_of,
    shipped,
    trained,
    trained_by,
)

from meshwright import ConfigError
from meshwright.testing import Case, Outcome
from meshwright_testing import pool
from meshwright_testing.case import TOLERANCE
from meshwright_testing.parity import difference


@functools.cache
def _expected(case: Case, objective: Any = everything) -> Outcome:
    return pool(1).run(trained, LAYOUTS["single"], case, objective)[0]


def _worst(name: str, case: Case, objective: Any = everything, **options: Any) -> float:
    layout = LAYOUTS[name]
    found = pool(layout.ranks).run(functools.partial(trained, **options), layout, case, objective)
    return difference(found, _expected(case, objective)).worst


SLOW = pytest.mark.slow
OTHERS = [name for name in LAYOUTS if name != "single"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "fsdp2" else SLOW) for name in OTHERS])
def test_everything_at_once_is_as_on_one_rank(name: str) -> None:
    """Packed rows, unequal numbers of them, some without labels, two microbatches, evaluation behind each step."""
    assert _worst(name, case_of(LAYOUTS[name], steps=2)) <= TOLERANCE


@pytest.mark.zoo
@pytest.mark.parametrize("name", OTHERS)
def test_everything_at_once_for_four_steps(name: str) -> None:
    assert _worst(name, case_of(LAYOUTS[name])) <= TOLERANCE


def _tied(name: str) -> Case:
    return case_of(LAYOUTS[name], tied=True, steps=2)


CHUNKS = {"loss_chunk_rows": 5}


@SLOW
@pytest.mark.parametrize("name", ["single", "fsdp2", "tp-sequence", "cp", "pp-interleaved"])
def test_in_chunks_of_rows_and_with_tied_weights(name: str) -> None:
    assert _worst(name, _tied(name), config=CHUNKS) <= TOLERANCE


@SLOW
@pytest.mark.parametrize("name", ["ddp-zero1", "tp", "cp-ulysses", "pp"])
def test_an_objective_that_counts_for_itself_is_announced(name: str) -> None:
    assert _worst(name, _tied(name), COUNTING, announced=True) <= TOLERANCE


COUNTING = Counting()


@SLOW
def test_what_is_counted_changes_what_is_trained() -> None:
    case = _tied("single")
    counted, plain = _expected(case, COUNTING), _expected(case)
    assert counted.losses[0] > 2 * plain.losses[0]
    assert counted.losses[1:6] == pytest.approx(plain.losses[1:6], rel=1e-12)


@SLOW
@pytest.mark.parametrize(
    ("name", "mode"), [("tp", "selective"), ("pp-interleaved", "full"), ("cp", {"offload": "cpu"})], ids=str
)
def test_with_activations_that_are_computed_again_or_are_in_host_memory(name: str, mode: Any) -> None:
    assert (
        _worst(name, case_of(LAYOUTS[name], steps=2), config={**CHUNKS, "activation_checkpointing": mode}) <= TOLERANCE
    )


def _within_a_budget(layout: Layout, case: Case) -> tuple[Outcome, float, float]:
    """What became of it, the least budget that can be met [GB], and the one that was."""

    def options(budget: float) -> dict[str, Any]:
        return {"activation_checkpointing": {"budget_gb": budget}}

    with pytest.raises(ConfigError, match="cannot be met") as caught:
        trained(layout, case, everything, config=options(1e-9))
    (least,) = map(float, re.findall(r"to at least ([0-9.]+)", str(caught.value)))
    return trained(layout, case, everything, config=options(1.2 * least)), least, 1.2 * least


@SLOW
@pytest.mark.parametrize("name", ["fsdp2", "pp-interleaved"])
def test_within_a_budget_of_activations(name: str) -> None:
    layout, case = LAYOUTS[name], case_of(LAYOUTS[name], steps=2)
    for outcome, least, budget in pool(layout.ranks).run(_within_a_budget, layout, case):
        assert 0 < least < budget
        assert difference([outcome], _expected(case)).worst <= TOLERANCE


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["fsdp2", "cp"])
def test_with_compiled_blocks(name: str) -> None:
    """Compiled code rounds otherwise, also without an objective."""
    layout, case = LAYOUTS[name], case_of(LAYOUTS[name], steps=1)
    for found in pool(2).run(functools.partial(trained, config={"enable_compile": True}), layout, case, everything):
        assert found.losses == pytest.approx(_expected(case).losses, rel=1e-7)
        assert found.norms == pytest.approx(_expected(case).norms, rel=1e-7)


HALF = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}


@SLOW
def test_bfloat16_on_two_ranks_is_near_bfloat16_on_one() -> None:
    case = case_of(LAYOUTS["fsdp2"], dtype="float32", steps=2)
    one, two = (
        pool(ranks).run(functools.partial(trained, config=HALF), Layout(ranks, "fsdp2"), case, everything)[0]
        for ranks in (1, 2)
    )
    # But for the count of labels that are the most probable.
    del one.losses[1::6], two.losses[1::6]
    assert two.losses == pytest.approx(one.losses, rel=2e-3)


# -- the objectives that ship


def _by_pairs(layout: Layout) -> Layout:
    return replace(layout, wrapper={**layout.wrapper, "pp_microbatch_size": 2}) if "pp_size" in layout.sizes else layout


def _each(layout: Layout, case: Case, names: Sequence[str]) -> dict[str, Outcome]:
    """The task of one rank: each objective by itself, from the same weights on."""
    return {name: trained(layout, case, shipped(name), pairs_of) for name in names}


def _in_turns(layout: Layout, case: Case, names: Sequence[str]) -> list[Outcome]:
    """The task of one rank: a step with each objective, one behind the other, with what the one before has trained."""
    manager, objectives = layout.build(case), {name: shipped(name) for name in names}
    return [trained_by(manager, replace(case, steps=1), objectives[name], pairs_of) for index, name in enumerate(names)]


EVERY = ("everything", *SHIPPED)


@SLOW
@pytest.mark.parametrize("name", ["ddp-zero1", "tp-sequence", "cp", "pp-interleaved", "megatron_fsdp"])
def test_all_objectives_in_turns(name: str) -> None:
    """Pairs in unequal numbers, some without labels; each step is one of another objective."""
    layout = _by_pairs(LAYOUTS[name])
    case = case_of(layout, sequences=16)
    (expected,) = pool(1).run(_in_turns, LAYOUTS["single"], case, EVERY)
    for found in pool(layout.ranks).run(_in_turns, layout, case, EVERY):
        for objective, mine, single in zip(EVERY, found, expected, strict=True):
            assert difference([mine], single).worst <= TOLERANCE, objective


@pytest.mark.zoo
@pytest.mark.parametrize("name", OTHERS)
def test_each_objective_for_four_steps(name: str) -> None:
    layout = _by_pairs(LAYOUTS[name])
    case = case_of(layout, sequences=16)
    (expected,) = pool(1).run(_each, LAYOUTS["single"], case, EVERY)
    for found in pool(layout.ranks).run(_each, layout, case, EVERY):
        for objective, single in expected.items():
            assert difference([found[objective]], single).worst <= TOLERANCE, objective
