"""What fsdp2 communicates in a step, to the byte, against a formula of the model's parameters.

FSDP shards a parameter along its first dim, padded to a multiple of the number of shards; [Note: bytes of a collective]
in `meshwright.tracing.collectives` counts the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.training import prepare_training_step
from torch import nn

from meshwright import open_world
from meshwright.testing import Case
from meshwright.tracing.collectives import CollectiveTrace, record_collectives
from meshwright_fsdp2.sharding import BFloat16ReduceScatter
from meshwright_testing import pool
from meshwright_testing.models import build_case_model
from meshwright_testing.parity import build_manager, train_steps

slow = pytest.mark.slow
LAST_BLOCK = 2
WIDTH = 8
"""Bytes of an element: cases are in float64."""


def _step(config: Mapping[str, Any], sizes: Mapping[str, Any], case: Case) -> CollectiveTrace:
    """Collectives of a whole second step, when torch has settled its order."""
    manager = build_manager("fsdp2", config, sizes, case)
    train_steps(manager, case, range(1))
    groups = {axis: manager.mesh.group(axis) for axis in ("dp_shard", "dp_replicate")}
    return record_collectives(prepare_training_step(manager, case, 1), groups)


def _padded(case: Case, shards: int, chosen: Callable[[str], bool] = lambda name: True) -> int:
    """Elements of the case's parameters of chosen names, each padded along dim 0 to a multiple of `shards`."""
    model: nn.Module = build_case_model(case.model_type, tied=case.tied, seed=0, dtype=torch.float64)
    shapes = {name: p.shape for name, p in model.named_parameters() if chosen(name)}
    return sum(math.ceil(shape[0] / shards) * shards * shape[1:].numel() for shape in shapes.values())


def _is_freed(name: str, reshard: bool | None) -> bool:
    """Whether the parameter's unit is freed after forward and gathered again for backward."""
    in_block = "layers." in name
    by_default = in_block and f"layers.{LAST_BLOCK}." not in name
    # The root's own backward starts right after its forward, but the strategy does what it is reported.
    return by_default if reshard is None else reshard


def _trains(name: str, case: Case) -> bool:
    return not any(fnmatchcase(name, pattern) for pattern in case.frozen)


TIED = Case(tied=True)
ACCUMULATED = Case(microbatches=3)


@pytest.mark.parametrize(
    ("ranks", "reshard", "case"),
    [
        (2, None, ACCUMULATED),
        pytest.param(3, None, Case(), marks=slow),
        pytest.param(2, True, TIED, marks=slow),
        pytest.param(3, False, ACCUMULATED, marks=slow),
    ],
    ids=str,
)
def test_gathers_parameters_for_forward_and_freed_ones_again_for_backward(
    ranks: int, reshard: bool | None, case: Case
) -> None:
    freed = _padded(case, ranks, lambda name: _is_freed(name, reshard))
    times = 1 if reshard is False else case.microbatches
    expected = times * (_padded(case, ranks) + freed) * WIDTH
    for traffic in pool(ranks).run(_step, {"reshard_after_forward": reshard}, {}, case):
        assert traffic.filter("all_gather").nbytes == expected
        assert {each.group for each in traffic.filter("all_gather")} == {"dp_shard"}


@slow
def test_parameters_that_stay_gathered_are_cast_once_a_step() -> None:
    case = replace(ACCUMULATED, dtype="float32")
    config = {"mp_policy": {"param_dtype": "bfloat16"}, "reshard_after_forward": False}
    for traffic in pool(2).run(_step, config, {}, case):
        gathered = traffic.filter("all_gather")
        assert {each.dtype for each in gathered} == {torch.bfloat16}
        assert gathered.nbytes == _padded(case, 2) * 2


@pytest.mark.parametrize(("ranks", "defer", "times"), [(2, True, 1), pytest.param(3, False, 3, marks=slow)])
def test_gradients_travel_once_a_step_or_once_a_microbatch_and_the_rest_is_a_few_numbers(
    ranks: int, defer: bool, times: int
) -> None:
    for traffic in pool(ranks).run(_step, {"defer_fsdp_grad_sync": defer}, {}, ACCUMULATED):
        assert traffic.filter("reduce_scatter").nbytes == times * _padded(ACCUMULATED, ranks) * WIDTH
        rest = [each for each in traffic if each.kind not in ("all_gather", "reduce_scatter")]
        # Checks of the three microbatches, which parameters have a gradient (a number for each), and the loss.
        parameters = sum(1 for _ in build_case_model("llama", tied=False, seed=0, dtype=torch.float64).parameters())
        assert sum(each.nbytes for each in rest) < 8 * parameters + 3 * 200


@slow
def test_gradients_travel_in_the_reduce_dtype_and_parameters_in_their_own() -> None:
    case = replace(Case(), dtype="float32")
    for traffic in pool(2).run(_step, {"reduce_dtype": "float64"}, {}, case):
        gathered, reduced = traffic.filter("all_gather"), traffic.filter("reduce_scatter")
        assert {each.dtype for each in gathered} == {torch.float32}
        assert {each.dtype for each in reduced} == {torch.float64}
        assert reduced.nbytes == _padded(case, 2) * 8


@slow
@pytest.mark.parametrize(("sizes", "ranks"), [({}, 2), ({"dp_replicate_size": 2}, 4)], ids=["shards", "copies"])
def test_gradients_that_travel_in_bfloat16_halve_what_is_scattered(sizes: dict[str, int], ranks: int) -> None:
    case = replace(ACCUMULATED, dtype="float32")
    for traffic in pool(ranks).run(_step, {"reduce_dtype": "bfloat16"}, sizes, case):
        sent = traffic.filter("all_to_all", "dp_shard")
        assert {each.dtype for each in sent} == {torch.bfloat16}
        assert sent.nbytes == _padded(case, 2) * 4 // 2
        assert not traffic.filter("reduce_scatter")
        # Sums of shards, over copies, are not rounded.
        assert traffic.filter("all_reduce", "dp_replicate").nbytes == _padded(case, 2) // 2 * 4 * bool(sizes)


def _halves() -> bool:
    """Whether addends are rounded once each, and summed in float32 in the order of the ranks."""
    world = open_world("cpu")
    given = torch.randn(3 * world.size, generator=torch.Generator().manual_seed(world.rank))
    everybodys = [torch.empty_like(given) for _ in range(world.size)]
    dist.all_gather(everybodys, given)
    part = torch.empty(3)
    BFloat16ReduceScatter()(part, given, dist.group.WORLD, dist.ReduceOp.SUM)
    rounded = [each.bfloat16().float()[3 * world.rank :][:3] for each in everybodys]
    return torch.equal(part, torch.stack(rounded).sum(0))


@slow
def test_messages_of_bfloat16_are_summed_in_float32() -> None:
    assert pool(2).run(_halves) == [True, True]


@slow
def test_frozen_parameters_are_gathered_but_have_no_gradients_to_reduce() -> None:
    case = replace(Case(), frozen=("*proj*", "*embed*", "lm_head*"))
    trainable = _padded(case, 2, lambda name: _trains(name, case)) * WIDTH
    assert trainable < _padded(case, 2) * WIDTH
    for traffic in pool(2).run(_step, {"reshard_after_forward": False}, {}, case):
        assert traffic.filter("all_gather").nbytes == _padded(case, 2) * WIDTH
        assert traffic.filter("reduce_scatter").nbytes == trainable


@slow
@pytest.mark.parametrize(("defer", "scatters", "reductions"), [(True, 1, 1), (False, 3, 3), ("reduce_scatter", 3, 1)])
def test_hsdp_shards_within_and_all_reduces_shards_across(defer: Any, scatters: int, reductions: int) -> None:
    config, sizes = {"defer_fsdp_grad_sync": defer}, {"dp_replicate_size": 2}
    freed = _padded(ACCUMULATED, 2, lambda name: _is_freed(name, None))
    gradients = _padded(ACCUMULATED, 2) * WIDTH
    for traffic in pool(4).run(_step, config, sizes, ACCUMULATED):
        assert traffic.filter("all_gather", "dp_shard").nbytes == 3 * (_padded(ACCUMULATED, 2) + freed) * WIDTH
        assert traffic.filter("reduce_scatter", "dp_shard").nbytes == scatters * gradients
        assert traffic.filter("all_reduce", "dp_replicate").nbytes == reductions * gradients // 2
        for kind in ("all_gather", "reduce_scatter"):
            assert len(traffic.filter(kind, "dp_replicate")) == 0
