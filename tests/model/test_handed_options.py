"""ddp with use_megatron_fsdp: every option is handed over as it stands, and trains as it says."""

from __future__ import annotations

from typing import Any

import pytest
from support.tiers import mostly_slow

from meshwright import MeshwrightError
from meshwright.testing import Case, assert_parity
from meshwright_testing import pool
from meshwright_testing.parity import build_manager, train_steps

HALF = Case(dtype="bfloat16", steps=3)


def _handed_over(config: dict[str, Any], sizes: Any = None) -> Any:
    try:
        manager = build_manager("ddp", {"use_megatron_fsdp": True, **config}, sizes or {}, Case())
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return manager.config.model_dump(), manager.mesh.degrees.dp_shard


@pytest.mark.parametrize(
    ("sharding", "config", "expected"),
    mostly_slow(
        [
            ("optim", {}, {"zero_dp_strategy": 1, "overlap_grad_reduce": False, "overlap_param_gather": False}),
            (
                "optim_grads_params",
                {"preserve_fp32_weights": False},
                {"zero_dp_strategy": 3, "overlap_grad_reduce": True},
            ),
            (
                "optim_grads",
                {"check_for_nan_in_grad": True, "overlap_param_gather": True, "activation_checkpointing": "full"},
                {"zero_dp_strategy": 2},
            ),
            (
                "optim_grads_params",
                {"suggested_communication_unit_size": 10, "fsdp_double_buffer": True, "average_in_collective": True},
                {},
            ),
        ]
    ),
    ids=str,
)
def test_every_option_is_handed_over_as_it_stands_defaults_too(
    sharding: str, config: dict[str, Any], expected: dict[str, Any]
) -> None:
    # What differs between the defaults of the two.
    ours = {"preserve_fp32_weights": True, "check_for_nan_in_grad": False}
    given = {"data_parallel_sharding_strategy": sharding, "use_distributed_optimizer": sharding == "optim_grads"}
    for theirs, dp_shard in pool(2).run(_handed_over, given | config):
        assert dp_shard == 2
        assert (ours | config | expected).items() <= theirs.items()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"bucket_size": 5}, "bucket_size=5 is no option of megatron_fsdp"),
        ({"use_distributed_optimizer": True}, "Set data_parallel_sharding_strategy to optim or more"),
        ({"keep_fp8_transpose_cache": True}, "float8 parameters"),
        ({"nccl_ub": True}, "nccl_ub=true"),
        ({"disable_symmetric_registration": True}, "acts only with nccl_ub"),
    ],
    ids=str,
)
def test_what_the_other_strategy_cannot_do_is_refused_on_all_ranks(config: dict[str, Any], told: str) -> None:
    first, second = pool(2).run(_handed_over, config)
    assert first == second
    assert told in first


@pytest.mark.parametrize("sharding", mostly_slow(["no_shard", "optim", "optim_grads_params"]))
def test_parity_of_what_is_handed_over(sharding: str) -> None:
    config = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": sharding}
    assert_parity("ddp", Case(microbatches=2, sequences=8), world_size=2, config=config)


def _losses(strategy: str, config: dict[str, Any]) -> list[float]:
    return train_steps(build_manager(strategy, config, {}, HALF), HALF, range(HALF.steps))[0]


@pytest.mark.slow
def test_preserve_fp32_weights_means_what_the_first_class_says() -> None:
    ours = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    found = [pool(2).run(_losses, "ddp", ours | each)[0] for each in ({}, {"preserve_fp32_weights": False})]
    told = [
        pool(2).run(_losses, "megatron_fsdp", {"preserve_fp32_weights": value, "check_for_nan_in_grad": False})[0]
        for value in (True, False)
    ]
    assert found == told
    assert found[0] != found[1]


@pytest.mark.slow
def test_a_stage_of_a_pipeline_is_not_handed_over() -> None:
    assert all("cannot train one stage of a pipeline" in text for text in pool(2).run(_handed_over, {}, {"pp_size": 2}))
