"""The options of megatron_fsdp: names and defaults, and what is refused with which text before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright import ConfigError, MeshSizes, resolve
from meshwright_megatron_fsdp import MegatronFSDPConfig

OFF = (
    "sequence_parallel init_fsdp_with_meta_device grad_reduce_in_fp32 preserve_fp32_weights average_in_collective "
    "disable_bucketing calculate_per_token_loss keep_fp8_transpose_cache nccl_ub fsdp_double_buffer "
    "activation_checkpointing"
)
REFERENCE = (
    dict.fromkeys(OFF.split(), False)
    | dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "check_for_nan_in_grad"), True)
    | {"tp_plan": None, "megatron_fsdp_unit_modules": None, "zero_dp_strategy": 3, "backend": "nccl"}
)


def test_fields_and_defaults_are_those_of_the_reference_and_then_the_packages() -> None:
    fields = MegatronFSDPConfig().to_dict()
    assert {name: fields.pop(name) for name in REFERENCE} == REFERENCE
    nothing = (
        "reduce_dtype loss_chunk_rows data_parallel_sharding_strategy suggested_communication_unit_size "
        "main_params_dtype main_grads_dtype grad_comm_dtype"
    )
    assert fields == {
        **dict.fromkeys(nothing.split()),
        "cp_attention": "allgather",
        "outer_dp_sharding_strategy": 0,
        "gradient_reduce_div_fusion": True,
        "report_nan_in_param_grad": False,
        "disable_symmetric_registration": False,
    }
    assert all(field.description for field in MegatronFSDPConfig.model_fields.values())


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"zero_dp_strategy": 4}, "zero_dp_strategy: Input should be 0, 1, 2 or 3"),
        ({"zero_dp_strategy": True}, "must be one of 0, 1, 2, 3"),
        ({"zero_dp_strategy": "3"}, "zero_dp_strategy: Input should be 0, 1, 2 or 3"),
        ({"outer_dp_sharding_strategy": True, "zero_dp_strategy": 3}, "must be one of 0, 1, 'no_shard', 'optim'"),
        ({"zero_dp_strategy": 1, "data_parallel_sharding_strategy": "optim_grads"}, "which is 2, differ"),
        ({"outer_dp_sharding_strategy": 1, "zero_dp_strategy": 2}, "needs ZeRO 3, not 2"),
        ({"outer_dp_sharding_strategy": 2}, "outer_dp_sharding_strategy"),
        ({"overlap_grad_reduce": False}, "Set zero_dp_strategy=1, or overlap_grad_reduce=true"),
        ({"overlap_param_gather": False}, "parameters are gathered for each use"),
        ({"overlap_param_gather": False, "zero_dp_strategy": 0}, "nothing is gathered"),
        ({"suggested_communication_unit_size": 9, "zero_dp_strategy": 0}, "which ZeRO 0 does not do"),
        ({"suggested_communication_unit_size": 0}, "greater than or equal to 1"),
        ({"disable_symmetric_registration": True}, "acts only with nccl_ub"),
        ({"main_params_dtype": "float32", "preserve_fp32_weights": True}, "say the same thing"),
        ({"main_grads_dtype": "float32", "grad_reduce_in_fp32": True}, "say the same thing"),
        ({"reduce_dtype": "float64", "grad_reduce_in_fp32": True}, "say the same thing"),
        ({"main_params_dtype": "int8"}, "must be one of float64, float32, bfloat16;"),
        ({"keep_fp8_transpose_cache": True}, "float8 parameters of TransformerEngine"),
        ({"megatron_fsdp_unit_modules": []}, "must name a class at least"),
        ({"activation_checkpointing": 1}, "Input should be a valid boolean"),
        ({"nvfsdp_unit_modules": ["x"]}, "Did you mean 'megatron_fsdp_unit_modules'"),
    ],
    ids=str,
)
def test_what_is_refused(options: dict[str, Any], reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        resolve("megatron_fsdp", MeshSizes(), 1, config=options)


def test_stages_go_by_number_or_by_megatron_cores_name() -> None:
    for stage, name in enumerate(("no_shard", "optim", "optim_grads")):
        for number in ({}, {"zero_dp_strategy": stage}, {"zero_dp_strategy": 3}):
            assert MegatronFSDPConfig(data_parallel_sharding_strategy=name, **number).zero_stage == stage


def test_dtypes_are_taken_by_name_or_as_they_are() -> None:
    for given in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert MegatronFSDPConfig(grad_comm_dtype=given).grad_comm_dtype == "bfloat16"
