"""Norms of gradients by block: those of one process under every layout, and nothing of a step changes by asking."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.adapter_cases import LAYOUTS as OF_ADAPTERS
from support.adapter_cases import adapter_case
from support.tiers import mostly_slow

from meshwright import Loop, StrategyError, StrategyManager, count_tokens, fit
from meshwright.model.layout import in_order
from meshwright.tensors.norms import squares_by_part
from meshwright.testing import Case, pool
from meshwright.testing.case import share
from meshwright.testing.parity import build_manager, train_steps
from meshwright.testing.tasks import FoundNorms, norms_reference, train_by_block
from meshwright.tracing.collectives import Traffic, measure_collectives

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

ZERO = {"engine": "bucketed", "use_distributed_optimizer": True}
INTERLEAVED = {"pipeline": {"pp_schedule": "interleaved1f1b"}}
LAYOUTS: Mapping[str, tuple[int, str, Mapping[str, Any], Mapping[str, int], Mapping[str, Any] | None]] = {
    "ddp": (2, "ddp", {}, {}, None),
    "ddp-bucketed": (2, "ddp", {"engine": "bucketed"}, {}, None),
    "ddp-zero1": (2, "ddp", ZERO, {}, None),
    "fsdp2-wide": (2, "fsdp2", {"reduce_dtype": "float64"}, {}, None),
    "tp-sequence": (2, "fsdp2", {"sequence_parallel": True}, {"tp_size": 2}, None),
    "pp-single": (2, "single", {}, {"pp_size": 2}, None),
    "pp-interleaved": (2, "fsdp2", {}, {"pp_size": 2}, INTERLEAVED),
    "pp-zero1": (4, "ddp", ZERO, {"pp_size": 2, "dp_size": 2}, None),
}
CASES = {
    "tied": Case(layers=4, tied=True, steps=2, sequences=24, microbatches=2),
    "frozen": Case(layers=4, frozen=("*embed_tokens*", "*layers.1.*"), steps=2),
    "unused": Case(model_type="routed", layers=4, route="steps", steps=2),
}


def _found(layout: str, case: Case, *, asks: bool = True) -> list[FoundNorms]:
    ranks, strategy, config, sizes, wrapper = {**LAYOUTS, **OF_ADAPTERS}[layout]
    return pool(ranks).run(train_by_block, strategy, config, sizes, case, "cpu", wrapper, asks)


def _assert_alike(found: list[FoundNorms], case: Case) -> None:
    expected = norms_reference(case)
    for rank in found:
        assert rank.apart(expected) <= 1e-9
        assert rank.apart_from_total() <= 1e-12


@pytest.mark.parametrize(
    ("layout", "case"),
    mostly_slow(
        [
            *((layout, "tied") for layout in LAYOUTS),
            *((layout, "frozen") for layout in ("ddp-zero1", "pp-interleaved")),
            *((layout, "unused") for layout in ("ddp-bucketed", "fsdp2-wide")),
        ],
        ("fsdp2-wide", "unused"),
    ),
)
def test_norms_by_block_are_those_of_one_process(layout: str, case: str) -> None:
    _assert_alike(_found(layout, CASES[case]), CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_norms_of_an_adapter_are_those_of_what_trains(layout: str) -> None:
    pytest.importorskip("peft")
    case = adapter_case("embedding", steps=2)
    found = _found(layout, case)
    _assert_alike(found, case)
    blocks = [f"base_model.model.model.layers.{number}" for number in range(4)]
    assert list(found[0].by_block[0]) == ["embedding", *blocks]


def test_names_are_those_of_blocks_in_the_order_in_which_they_run() -> None:
    (first, _) = norms_reference(CASES["frozen"]).by_block
    assert list(first) == ["model.layers.0", "model.layers.2", "model.layers.3", "head", "other"]
    (first, _) = norms_reference(CASES["tied"]).by_block
    assert list(first) == ["embedding", *(f"model.layers.{number}" for number in range(4)), "other"]
    assert in_order(["other", "b.1", "head", "a.0", "embedding", "b.1"]) == ["embedding", "b.1", "a.0", "head", "other"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "ddp-zero1", "fsdp2-wide", "tp-sequence", "pp-interleaved"])
def test_asking_changes_no_bit_of_what_is_trained(layout: str) -> None:
    asked, plain = _found(layout, CASES["tied"]), _found(layout, CASES["tied"], asks=False)
    for mine, other in zip(asked, plain, strict=True):
        assert mine.outcome.losses == other.outcome.losses
        assert mine.outcome.norms == other.outcome.norms
        for name, weight in other.outcome.weights.items():
            assert torch.equal(mine.outcome.weights[name], weight), name


def _traffic(strategy: str, sizes: Mapping[str, int]) -> Traffic:
    """Of asking for them a second time, behind a step's gradients."""
    manager = build_manager(strategy, {}, sizes, CASES["tied"])
    train_steps(manager, CASES["tied"], range(1))
    microbatches = share(CASES["tied"], 1, manager.mesh.data_rank, manager.mesh.data_size)
    manager.forward_backward(microbatches, num_tokens=count_tokens(microbatches, manager.mesh))
    manager.gradient_norms()
    return measure_collectives(manager.gradient_norms)


@pytest.mark.parametrize(
    ("strategy", "sizes", "calls"),
    mostly_slow(
        [
            ("fsdp2", {}, 1),
            ("ddp", {}, 0),
            ("fsdp2", {"dp_replicate_size": 2}, 0),
            ("fsdp2", {"tp_size": 2}, 1),
            ("fsdp2", {"pp_size": 2}, 1),
        ]
    ),
)
def test_one_vector_is_summed_for_each_set_of_groups(strategy: str, sizes: Mapping[str, int], calls: int) -> None:
    for traffic in pool(2).run(_traffic, strategy, sizes):
        assert [each.kind for each in traffic] == ["all_reduce"] * calls
        # Of six numbers: the embedding, four blocks, and the rest.
        assert traffic.bytes == calls * 6 * 8


def test_what_is_not_finite_stays_in_its_part() -> None:
    parameters = [torch.nn.Parameter(torch.ones(count)) for count in (3, 0, 2, 4, 5)]
    for parameter, value in zip(parameters, (2.0, 1.0, math.nan, 1.0, None), strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    squares = squares_by_part(parameters, [0, 0, 1, 2, 3], 5, [()] * 5)
    assert squares.dtype == torch.float64
    assert squares[[0, 2, 3, 4]].tolist() == pytest.approx([12.0, 4.0, 0.0, 0.0])
    assert math.isnan(squares[1])


def test_norms_of_half_precision_are_taken_in_float32() -> None:
    parameter = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    assert squares_by_part([parameter], [0], 1, [()]).tolist() == pytest.approx([10_000.0])


def test_a_strategy_of_its_own_says_that_it_does_not_tell_them() -> None:
    own = type("Own", (StrategyManager,), dict.fromkeys(StrategyManager.__abstractmethods__))()
    with pytest.raises(StrategyError, match=r"Own does not tell gradient norms by block\. Leave out norms_every"):
        own.gradient_norms()


def _fitted(strategy: str, sizes: Mapping[str, int], case: Case) -> list[dict[str, float]]:
    manager = build_manager(strategy, {}, sizes, case)
    mesh = manager.mesh
    loop = Loop(lambda step: share(case, step, mesh.data_rank, mesh.data_size), steps=4, norms_every=2)
    return [dict(result.norms) for result in fit(manager, loop)]


@pytest.mark.slow
def test_a_loop_tells_them_in_every_nth_step() -> None:
    case = Case(layers=4, tied=True)
    (expected,) = pool(1).run(_fitted, "single", {}, case)
    assert [bool(norms) for norms in expected] == [False, True, False, True]
    for strategy, sizes in (("ddp", {}), ("fsdp2", {"tp_size": 2}), ("fsdp2", {"pp_size": 2})):
        for found in pool(2).run(_fitted, strategy, sizes, case):
            for norms, wanted in zip(found, expected, strict=True):
                assert norms == pytest.approx(wanted, rel=1e-9)
