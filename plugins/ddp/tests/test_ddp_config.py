"""The options of ddp: the references' fields and defaults, what goes together, and handing over to megatron_fsdp."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright import ConfigError, MeshSizes, StrategyError, resolve
from meshwright_ddp import DDPConfig, DDPManager, DistributedDataParallelConfig
from meshwright_ddp.bucketed_ddp import BucketedDataParallel

OFF = (
    "grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer "
    "check_for_nan_in_grad check_for_large_grads pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation "
    "average_in_collective fp8_param_gather reuse_grad_buf_for_mxfp8_param_ag use_megatron_fsdp use_custom_fsdp "
    "keep_fp8_transpose_cache nccl_ub fsdp_double_buffer disable_symmetric_registration delay_wgrad_compute"
)
REFERENCE = dict.fromkeys(OFF.split(), False) | {
    "num_distributed_optimizer_instances": 1,
    "bucket_size": None,
    "data_parallel_sharding_strategy": "no_shard",
    "gradient_reduce_div_fusion": True,
    "suggested_communication_unit_size": None,
    "preserve_fp32_weights": True,
    "outer_dp_sharding_strategy": "no_shard",
}
LATER = {"num_buckets": None, "param_name_patterns_for_fp32_local_accumulation": ()}
"""Options of later versions of the reference."""


def test_fields_and_defaults_are_those_of_the_references() -> None:
    ours = {"reduce_dtype": None, "loss_chunk_rows": None}
    assert DistributedDataParallelConfig().to_dict() == {**REFERENCE, **LATER, **ours}
    config = DDPConfig().to_dict()
    assert (config["activation_checkpointing"], config["backend"]) == (False, "nccl")
    assert REFERENCE.items() <= config.items()


ZERO1 = {"use_distributed_optimizer": True}
OF_MEGATRON_FSDP = {
    **dict.fromkeys(("gradient_reduce_div_fusion", "preserve_fp32_weights"), False),
    **dict.fromkeys(("keep_fp8_transpose_cache", "fsdp_double_buffer"), True),
    **dict.fromkeys(("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"), "optim"),
    "suggested_communication_unit_size": 5,
}
FP32_SUMS = {"reduce_scatter_with_fp32_accumulation": True}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"engine": "torch", **ZERO1}, "use_distributed_optimizer=True is an option of the bucketed engine"),
        ({"engine": "torch", "bucket_size": 5}, "engine=torch. Set engine=bucketed, or leave bucket_size out"),
        ({"bucket_cap_mb": 3}, "bucket_cap_mb=3 is an option of the torch engine"),
        ({"static_graph": True}, "Set engine=torch, or leave static_graph out"),
        ({"engine": "megatron"}, "'torch' or 'bucketed'"),
        ({"bucket_cap": 5}, "Did you mean 'bucket_cap_mb'"),
        ({"engine": "torch", "comm_hook": "fp16_compres"}, r"Did you mean 'fp16_compress'\?"),
        (
            {"engine": "torch", "comm_hook": "fp16_compress", "reduce_dtype": "float64"},
            "rounds what reduce_dtype=float64",
        ),
        ({"engine": "torch", "comm_hook": "fp16_compress", "comm_hook_options": {"a": 1}}, "Set comm_hook=power_sgd"),
        ({"activation_checkpointing": 1}, "Input should be a valid boolean"),
        # Options that need another one.
        ({"overlap_param_gather": True}, "Set use_distributed_optimizer=true"),
        ({"overlap_param_gather": True, **ZERO1}, "Set overlap_grad_reduce=true"),
        ({"align_param_gather": True}, "Set overlap_param_gather=true"),
        ({"pad_buckets_for_high_nccl_busbw": True}, "Set use_distributed_optimizer=true"),
        ({"num_distributed_optimizer_instances": 2}, "Set use_distributed_optimizer=true"),
        (FP32_SUMS, "Set use_distributed_optimizer=true"),
        ({"bucket_size": 5}, "Set overlap_grad_reduce=true"),
        ({"num_buckets": 5}, "Set overlap_grad_reduce=true"),
        # Options that exclude each other.
        ({"num_buckets": 5, "bucket_size": 5, "overlap_grad_reduce": True}, "both say how large buckets are"),
        ({"num_buckets": 0}, "greater than or equal to 1"),
        ({**FP32_SUMS, **ZERO1, "average_in_collective": True}, "the pieces are summed outside"),
        ({**FP32_SUMS, **ZERO1, "num_distributed_optimizer_instances": 2}, "do not go together"),
        (
            {"param_name_patterns_for_fp32_local_accumulation": ["all"], "grad_reduce_in_fp32": True},
            "accumulate in it, too",
        ),
        ({"grad_reduce_in_fp32": True, "reduce_dtype": "float64"}, "Leave one out"),
        # Options that are missing here, or are megatron_fsdp's.
        ({"fp8_param_gather": True}, "needs parameters in fp8, which Transformer Engine brings"),
        ({"reuse_grad_buf_for_mxfp8_param_ag": True}, "mxfp8, which Transformer Engine brings"),
        ({"nccl_ub": True}, "Megatron's allocator"),
        ({"disable_symmetric_registration": True}, "nccl_ub"),
        *(({name: value}, "Set use_megatron_fsdp=true") for name, value in OF_MEGATRON_FSDP.items()),
    ],
)
def test_what_does_not_go_together_or_is_missing_is_refused_with_the_remedy(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve("ddp", MeshSizes(), 1, config={"engine": "bucketed", **options})


def test_use_custom_fsdp_is_an_old_name_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="Set use_megatron_fsdp=true"):
        assert DDPConfig(use_custom_fsdp=True).delegates_to_megatron_fsdp


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
