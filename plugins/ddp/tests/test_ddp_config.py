"""The options of ddp: the references' fields and defaults, what goes together, and handing over to megatron_fsdp."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright import ConfigError, MeshSizes, StrategyError, resolve
from meshwright_ddp import DDPConfig, DDPManager, DistributedDataParallelConfig
from meshwright_ddp.bucketed import BucketedDataParallel

REFERENCE = {
    "grad_reduce_in_fp32": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "align_param_gather": False,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "check_for_nan_in_grad": False,
    "check_for_large_grads": False,
    "bucket_size": None,
    "pad_buckets_for_high_nccl_busbw": False,
    "reduce_scatter_with_fp32_accumulation": False,
    "average_in_collective": False,
    "fp8_param_gather": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "use_megatron_fsdp": False,
    "use_custom_fsdp": False,
    "data_parallel_sharding_strategy": "no_shard",
    "gradient_reduce_div_fusion": True,
    "suggested_communication_unit_size": None,
    "preserve_fp32_weights": True,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "outer_dp_sharding_strategy": "no_shard",
    "disable_symmetric_registration": False,
    "delay_wgrad_compute": False,
}


def test_fields_and_defaults_are_those_of_the_references() -> None:
    # Of later versions of the reference.
    later = {"num_buckets": None, "param_name_patterns_for_fp32_local_accumulation": ()}
    assert DistributedDataParallelConfig().to_dict() == {
        **REFERENCE,
        **later,
        "reduce_dtype": None,
        "loss_chunk_rows": None,
    }
    config = DDPConfig().to_dict()
    assert (config["activation_checkpointing"], config["backend"]) == (False, "nccl")
    assert REFERENCE.items() <= config.items()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_distributed_optimizer": True}, "use_distributed_optimizer=True is an option of the bucketed engine"),
        ({"bucket_size": 5}, "engine=torch. Set engine=bucketed, or leave bucket_size out"),
        ({"engine": "bucketed", "bucket_cap_mb": 3}, "bucket_cap_mb=3 is an option of the torch engine"),
        ({"engine": "bucketed", "static_graph": True}, "Set engine=torch, or leave static_graph out"),
        ({"engine": "megatron"}, "'torch' or 'bucketed'"),
        ({"comm_hook": "fp16_compres"}, "Did you mean 'fp16_compress'?"),
        ({"comm_hook": "fp16_compress", "reduce_dtype": "float64"}, "rounds what reduce_dtype=float64 would sum"),
        ({"comm_hook": "fp16_compress", "comm_hook_options": {"a": 1}}, "Set comm_hook=power_sgd"),
        ({"activation_checkpointing": 1}, "Input should be a valid boolean"),
    ],
)
def test_options_of_the_other_engine_and_bad_values_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        resolve("ddp", MeshSizes(), 1, config=options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overlap_param_gather": True}, "Set use_distributed_optimizer=true"),
        ({"overlap_param_gather": True, "use_distributed_optimizer": True}, "Set overlap_grad_reduce=true"),
        ({"align_param_gather": True}, "Set overlap_param_gather=true"),
        ({"pad_buckets_for_high_nccl_busbw": True}, "Set use_distributed_optimizer=true"),
        ({"num_distributed_optimizer_instances": 2}, "Set use_distributed_optimizer=true"),
        ({"reduce_scatter_with_fp32_accumulation": True}, "Set use_distributed_optimizer=true"),
        ({"bucket_size": 5}, "Set overlap_grad_reduce=true"),
        ({"num_buckets": 5}, "Set overlap_grad_reduce=true"),
        ({"num_buckets": 5, "bucket_size": 5, "overlap_grad_reduce": True}, "both say how large buckets are"),
        ({"num_buckets": 0}, "greater than or equal to 1"),
        (
            {
                "reduce_scatter_with_fp32_accumulation": True,
                "use_distributed_optimizer": True,
                "average_in_collective": True,
            },
            "the pieces are summed outside",
        ),
        (
            {
                "reduce_scatter_with_fp32_accumulation": True,
                "use_distributed_optimizer": True,
                "num_distributed_optimizer_instances": 2,
            },
            "do not go together",
        ),
        (
            {"param_name_patterns_for_fp32_local_accumulation": ["all"], "grad_reduce_in_fp32": True},
            "accumulate in it, too",
        ),
        ({"grad_reduce_in_fp32": True, "reduce_dtype": "float64"}, "Leave one out"),
        ({"fp8_param_gather": True}, "needs parameters in fp8, which Transformer Engine brings"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "mxfp8, which Transformer Engine brings"),
        ({"nccl_ub": True}, "Megatron's allocator"),
        ({"disable_symmetric_registration": True}, "nccl_ub"),
        ({"data_parallel_sharding_strategy": "optim"}, "Set use_megatron_fsdp=true"),
        ({"gradient_reduce_div_fusion": False}, "Set use_megatron_fsdp=true"),
        ({"suggested_communication_unit_size": 5}, "Set use_megatron_fsdp=true"),
        ({"preserve_fp32_weights": False}, "Set use_megatron_fsdp=true"),
        ({"keep_fp8_transpose_cache": True}, "Set use_megatron_fsdp=true"),
        ({"fsdp_double_buffer": True}, "Set use_megatron_fsdp=true"),
        ({"outer_dp_sharding_strategy": "optim"}, "Set use_megatron_fsdp=true"),
    ],
)
def test_what_does_not_go_together_or_is_missing_is_refused_with_the_remedy(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve("ddp", MeshSizes(), 1, config={"engine": "bucketed", **options})


def test_use_custom_fsdp_is_an_old_name_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="Set use_megatron_fsdp=true"):
        assert DDPConfig(use_custom_fsdp=True).hands_over


# -- the reference's class


def test_the_references_class_is_taken_for_the_bucketed_engine() -> None:
    theirs = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    stack, _ = resolve("ddp", MeshSizes(), 1, config=theirs)
    assert stack.inner.config == DDPConfig(engine="bucketed", **theirs.to_dict())
    with pytest.raises(ConfigError, match="takes a DDPConfig, not a MeshSizes"):
        resolve("ddp", MeshSizes(), 1, config=MeshSizes())


def test_direct_calls_refuse_what_another_manager_does() -> None:
    for config in (DDPConfig(use_megatron_fsdp=True), DistributedDataParallelConfig(use_megatron_fsdp=True)):
        with pytest.raises(StrategyError, match="which another manager runs"):
            DDPManager(config, None)  # type: ignore[arg-type]
        with pytest.raises(StrategyError, match="which another manager runs"):
            BucketedDataParallel(torch.nn.Linear(2, 2), config, None)  # type: ignore[arg-type]
