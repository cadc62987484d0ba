"""Gradients of a step are summed in the dtype that is asked for, also where a schedule splits backwards in two."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.optim.config import OptimizerConfig
from meshwright.testing import Case
from meshwright_testing import pool
from meshwright_testing.parity import find_max_difference, train_case

SLOW = pytest.mark.slow
SPLITTING = ["ZBVZeroBubble", *(pytest.param(name, marks=SLOW) for name in ("InterleavedZeroBubble", "DualPipeV"))]
MIXED: dict[str, Any] = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
SGD = OptimizerConfig(name="SGD", lr=1.0)
"""So that weights differ by as much as gradients do."""


@pytest.mark.parametrize("schedule", SPLITTING)
@pytest.mark.parametrize(
    ("strategy", "dtype", "config"),
    [
        ("fsdp2", "float32", MIXED),
        ("ddp", "bfloat16", {"reduce_dtype": "float32"}),
        pytest.param("fsdp2", "bfloat16", {"reduce_dtype": "float32"}, marks=SLOW),
        pytest.param("fsdp2", "float32", {**MIXED, "defer_fsdp_grad_sync": False}, marks=SLOW),
        pytest.param("fsdp2", "float32", {**MIXED, "defer_fsdp_grad_sync": "reduce_scatter"}, marks=SLOW),
        pytest.param("ddp", "bfloat16", {"reduce_dtype": "float32", "engine": "bucketed"}, marks=SLOW),
    ],
    ids=str,
)
def test_sums_over_microbatches_are_those_of_one_process(
    strategy: str, dtype: str, config: dict[str, Any], schedule: str
) -> None:
    case = Case(layers=8, steps=1, sequences=16, max_norm=None, optimizer=SGD, dtype=dtype)
    assert _apart(strategy, case, config, schedule) == 0.0


def _apart(strategy: str, case: Case, config: dict[str, Any], schedule: str) -> float:
    """How far weights are from those of the same strategy on one rank, in the same microbatches."""
    alone = pool(1).run(train_case, strategy, config, {}, case.on_one_rank(case.sequences), "cpu")[0]
    wrapper = {"pipeline": {"pp_schedule": schedule}}
    return find_max_difference(
        pool(2).run(train_case, strategy, config, {"pp_size": 2}, case, "cpu", wrapper), alone
    ).weight
