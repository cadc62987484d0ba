"""ddp's hand-over to megatron_fsdp, with the strategy itself."""

from __future__ import annotations

from typing import Any

import pytest
from support.checkpoints import error_of
from support.tiers import mostly_slow

from meshwright.testing import Case, assert_parity
from meshwright_testing import pool
from meshwright_testing.parity import build_manager

pytest.importorskip("megatron_fsdp")

ZERO3 = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
HSDP = {**ZERO3, "num_distributed_optimizer_instances": 2}
OUTER = {**HSDP, "outer_dp_sharding_strategy": "optim", "gradient_reduce_div_fusion": False}
OLD_NAME = {"use_custom_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}


@pytest.mark.slow
def test_parity_over_instances() -> None:
    assert_parity("ddp", Case(microbatches=2), world_size=4, config=OUTER)


def _built(config: dict[str, Any]) -> Any:
    found: list[Any] = []
    error = error_of(lambda: found.append(build_manager("ddp", config, {}, Case())))
    if error:
        return error
    degrees, options = found[0].mesh.degrees, found[0].config
    return degrees.dp_replicate, degrees.dp_shard, options.shards_outer, options.gradient_reduce_div_fusion


@pytest.mark.filterwarnings("ignore:use_custom_fsdp")
@pytest.mark.parametrize(
    ("ranks", "config", "built"),
    mostly_slow([(2, OLD_NAME, (1, 2, False, True)), (4, HSDP, (2, 2, False, True)), (4, OUTER, (2, 2, True, False))]),
    ids=str,
)
def test_instances_are_handed_over_as_dp_replicate_and_may_shard_optimizer_state(
    ranks: int, config: dict[str, Any], built: tuple[object, ...]
) -> None:
    assert pool(ranks).run(_built, config) == [built] * ranks


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"outer_dp_sharding_strategy": "optim"}, "outer_dp_sharding_strategy=optim shards over"),
        ({"num_distributed_optimizer_instances": 3}, "num_distributed_optimizer_instances=3 does not di"),
    ],
    ids=str,
)
def test_what_cannot_be_sharded_over_instances_is_refused_on_all_ranks(options: dict[str, Any], told: str) -> None:
    first, other = pool(2).run(_built, {**ZERO3, **options})
    assert first.startswith(told)
    assert other == first
