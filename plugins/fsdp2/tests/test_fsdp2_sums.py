"""Gradients of microbatches are summed in the dtype that is asked for, also of parameters that some do not use."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright.testing import Case, pool
from meshwright.testing.parity import difference, train_case
from meshwright.train.optimizer_config import OptimizerConfig

MIXED: dict[str, Any] = {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
SGD = OptimizerConfig(name="SGD", lr=1.0)
"""So that weights differ by as much as gradients do."""


@pytest.mark.parametrize("route", ["steps", "ranks", None])
@pytest.mark.parametrize("defer", [True, False])
def test_parameters_that_some_microbatches_do_not_use(defer: bool, route: Any) -> None:
    case = Case("routed", sequences=8, microbatches=4, max_norm=None, optimizer=SGD, dtype="float32", route=route)
    config = {**MIXED, "defer_fsdp_grad_sync": defer}
    alone = pool(1).run(train_case, "fsdp2", config, {}, case.undivided(8), "cpu")[0]
    assert difference(pool(2).run(train_case, "fsdp2", config, {}, case), alone).weight < 1e-6
