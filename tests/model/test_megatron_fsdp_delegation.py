"""ddp with use_megatron_fsdp: every option is handed over as it stands, and trains as it says."""

from __future__ import annotations

from typing import Any

import pytest
from support.checkpoints import catch_error_text
from support.tiers import mark_mostly_slow

from meshwright.testing import Case, assert_parity
from meshwright_testing import pool
from meshwright_testing.parity import build_manager

pytest.importorskip("megatron_fsdp")
pytestmark = pytest.mark.filterwarnings("ignore:use_custom_fsdp")

SHARDING = "data_parallel_sharding_strategy"
ZERO3 = {"use_megatron_fsdp": True, SHARDING: "optim_grads_params"}
HSDP = {**ZERO3, "num_distributed_optimizer_instances": 2}
OUTER = {**HSDP, "outer_dp_sharding_strategy": "optim", "gradient_reduce_div_fusion": False}
OLD_NAME = {"use_custom_fsdp": True, SHARDING: "optim_grads_params"}


def _built(config: dict[str, Any], sizes: dict[str, int]) -> Any:
    found: list[Any] = []
    if error := catch_error_text(lambda: found.append(build_manager("ddp", config, sizes, Case()))):
        return error
    degrees, options = found[0].mesh.degrees, found[0].config
    return degrees.dp_replicate, degrees.dp_shard, options.is_outer_sharded, options.model_dump()


@pytest.mark.parametrize(
    ("ranks", "config", "own", "degrees", "expected"),
    mark_mostly_slow(
        [
            (2, {SHARDING: "optim"}, {}, (1, 2, False), {"zero_dp_strategy": 1, "overlap_grad_reduce": False}),
            (2, {SHARDING: "optim_grads"}, {"check_for_nan_in_grad": True}, (1, 2, False), {"zero_dp_strategy": 2}),
            (2, ZERO3, {"preserve_fp32_weights": False}, (1, 2, False), {"overlap_grad_reduce": True}),
            (2, ZERO3, {"suggested_communication_unit_size": 10, "fsdp_double_buffer": True}, (1, 2, False), {}),
            (2, OLD_NAME, {}, (1, 2, False), {"zero_dp_strategy": 3, "gradient_reduce_div_fusion": True}),
            (4, HSDP, {}, (2, 2, False), {"gradient_reduce_div_fusion": True}),
            (4, OUTER, {}, (2, 2, True), {"gradient_reduce_div_fusion": False}),
        ]
    ),
    ids=str,
)
def test_every_option_is_handed_over_as_it_stands_defaults_too(
    ranks: int, config: dict[str, Any], own: dict[str, Any], degrees: tuple[object, ...], expected: dict[str, Any]
) -> None:
    # What differs between the defaults of the two.
    ours = {"preserve_fp32_weights": True, "check_for_nan_in_grad": False}
    for *found, options in pool(ranks).run(_built, {"use_megatron_fsdp": True, **config, **own}, {}):
        assert tuple(found) == degrees
        assert (ours | own | expected).items() <= options.items()


@pytest.mark.parametrize(
    ("config", "sizes", "reported"),
    [
        ({"bucket_size": 5}, {}, "bucket_size=5 is no option of megatron_fsdp"),
        ({SHARDING: "no_shard", "use_distributed_optimizer": True}, {}, f"Set {SHARDING} to optim or more"),
        ({"keep_fp8_transpose_cache": True}, {}, "float8 parameters"),
        ({"nccl_ub": True}, {}, "nccl_ub=true"),
        ({"disable_symmetric_registration": True}, {}, "acts only with nccl_ub"),
        ({"outer_dp_sharding_strategy": "optim"}, {}, "outer_dp_sharding_strategy=optim shards over"),
        ({"num_distributed_optimizer_instances": 3}, {}, "num_distributed_optimizer_instances=3 does not di"),
        ({}, {"pp_size": 2}, "cannot train one stage of a pipeline"),
    ],
    ids=str,
)
def test_what_the_other_strategy_cannot_do_is_refused_on_all_ranks(
    config: dict[str, Any], sizes: dict[str, int], reported: str
) -> None:
    first, second = pool(2).run(_built, {**ZERO3, **config}, sizes)
    assert first == second
    assert reported in first


@pytest.mark.parametrize(("ranks", "config"), mark_mostly_slow([(2, ZERO3), (4, OUTER)]), ids=str)
def test_parity_of_what_is_handed_over(ranks: int, config: dict[str, Any]) -> None:
    assert_parity("ddp", Case(microbatches=2, sequences=8), world_size=ranks, config=config)
