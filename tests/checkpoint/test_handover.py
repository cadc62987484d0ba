"""ddp's hand-over to megatron_fsdp, with the strategy itself."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import MeshwrightError
from meshwright.testing import Case, assert_parity, pool
from meshwright.testing.parity import build_manager

pytest.importorskip("megatron_fsdp")

ZERO3 = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
HSDP = {**ZERO3, "num_distributed_optimizer_instances": 2}


@pytest.mark.parametrize(
    "options",
    [{"outer_dp_sharding_strategy": "optim", "gradient_reduce_div_fusion": False}],
    ids=str,
)
def test_parity_over_instances(options: dict[str, Any]) -> None:
    assert_parity("ddp", Case(microbatches=2), world_size=4, config={**HSDP, **options})


def _built(config: dict[str, Any]) -> Any:
    try:
        manager: Any = build_manager("ddp", config, {}, Case())
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    degrees, options = manager.mesh.degrees, manager.config
    return degrees.dp_replicate, degrees.dp_shard, options.shards_outer, options.gradient_reduce_div_fusion


@pytest.mark.parametrize(
    ("config", "built"),
    [
        (ZERO3, (1, 4, False, True)),
        (HSDP, (2, 2, False, True)),
        ({**HSDP, "outer_dp_sharding_strategy": "optim", "gradient_reduce_div_fusion": False}, (2, 2, True, False)),
    ],
    ids=str,
)
def test_instances_are_handed_over_as_dp_replicate_and_may_shard_optimizer_state(
    config: dict[str, Any], built: tuple[object, ...]
) -> None:
    assert pool(4).run(_built, config) == [built] * 4


@pytest.mark.filterwarnings("ignore:use_custom_fsdp")
def test_the_old_name_hands_over_too() -> None:
    options = {"use_custom_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    assert pool(2).run(_built, options) == [(1, 2, False, True)] * 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"outer_dp_sharding_strategy": "optim"}, "StrategyError: outer_dp_sharding_strategy=optim shards over"),
        ({"num_distributed_optimizer_instances": 3}, "MeshError: num_distributed_optimizer_instances=3 does not di"),
    ],
    ids=str,
)
def test_what_cannot_be_sharded_over_instances_is_refused_on_all_ranks(options: dict[str, Any], told: str) -> None:
    first, *others = pool(4).run(_built, {**ZERO3, **options})
    assert first.startswith(told)
    assert set(others) == {first}
