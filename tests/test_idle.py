"""Options along an axis of one rank act on nothing, and the first rank says so; one run file serves one and many."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from meshwright import Mesh, MeshSizes, open_world, resolve
from meshwright.testing import Case, pool
from meshwright.testing.parity import build_manager, train_steps


def _losses_and_warnings(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> tuple[list[float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = build_manager(strategy, config, sizes, Case())
    losses, _, _ = train_steps(manager, Case(), range(2))
    return losses, [str(each.message) for each in caught if "on nothing here" in str(each.message)]


PLAN = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron_fsdp"])
def test_tensor_and_context_options_act_on_nothing_at_one_rank_and_the_first_rank_says_so_once(strategy: str) -> None:
    config = {"sequence_parallel": True, "tp_plan": PLAN, "cp_attention": "ulysses"}
    idle = pool(2).run(_losses_and_warnings, strategy, config, {})
    plain = pool(2).run(_losses_and_warnings, strategy, {}, {})
    assert [losses for losses, _ in idle] == [losses for losses, _ in plain]
    assert [told for _, told in plain] == [[], []]
    tensor, context = idle[0][1]
    assert tensor == f"sequence_parallel=True and tp_plan={PLAN} act on nothing here: tp_size is 1."
    assert context == "cp_attention=ulysses acts on nothing here: cp_size is 1."
    assert idle[1][1] == []


def _async(config: dict[str, Any]) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world = open_world("cpu")
        stack, degrees = resolve("fsdp2", MeshSizes(), world.size, config=config)
        manager = stack.build(Mesh(degrees, world))
    return type(manager).__name__, [str(each.message) for each in caught]


def test_async_tensor_parallelism_acts_on_nothing_at_one_rank() -> None:
    config = {"enable_async_tensor_parallel": True, "sequence_parallel": True, "enable_compile": True}
    ((name, told),) = pool(1).run(_async, config)
    assert name == "FSDP2Manager"
    assert told == ["sequence_parallel=True and enable_async_tensor_parallel=True act on nothing here: tp_size is 1."]
