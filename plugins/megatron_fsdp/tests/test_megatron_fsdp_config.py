"""The options of megatron_fsdp: names and defaults, and what is refused with which text before any rank starts."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from meshwright import ConfigError, MeshSizes, resolve
from meshwright_megatron_fsdp import MegatronFSDPConfig

REFERENCE = {
    "sequence_parallel": False,
    "tp_plan": None,
    "megatron_fsdp_unit_modules": None,
    "zero_dp_strategy": 3,
    "init_fsdp_with_meta_device": False,
    "grad_reduce_in_fp32": False,
    "preserve_fp32_weights": False,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "check_for_nan_in_grad": True,
    "average_in_collective": False,
    "disable_bucketing": False,
    "calculate_per_token_loss": False,
    "keep_fp8_transpose_cache": False,
    "nccl_ub": False,
    "fsdp_double_buffer": False,
    "activation_checkpointing": False,
    "backend": "nccl",
}


def test_fields_and_defaults_are_those_of_the_reference_and_then_the_packages() -> None:
    fields = MegatronFSDPConfig().to_dict()
    assert {name: fields.pop(name) for name in REFERENCE} == REFERENCE
    assert fields == {
        "reduce_dtype": None,
        "loss_chunk_rows": None,
        "cp_attention": "allgather",
        "data_parallel_sharding_strategy": None,
        "outer_dp_sharding_strategy": 0,
        "gradient_reduce_div_fusion": True,
        "suggested_communication_unit_size": None,
        "report_nan_in_param_grad": False,
        "disable_symmetric_registration": False,
        "main_params_dtype": None,
        "main_grads_dtype": None,
        "grad_comm_dtype": None,
    }


def test_every_field_tells_what_it_does() -> None:
    assert all(field.description for field in MegatronFSDPConfig.model_fields.values())


@pytest.mark.parametrize(
    ("options", "told"),
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
def test_what_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve("megatron_fsdp", MeshSizes(), 1, config=options)


@pytest.mark.parametrize(("name", "stage"), [("no_shard", 0), ("optim", 1), ("optim_grads", 2)])
def test_stages_go_by_number_or_by_megatron_cores_name(name: str, stage: int) -> None:
    assert MegatronFSDPConfig(data_parallel_sharding_strategy=name).zero == stage
    assert MegatronFSDPConfig(zero_dp_strategy=stage, data_parallel_sharding_strategy=name).zero == stage
    assert MegatronFSDPConfig(zero_dp_strategy=3, data_parallel_sharding_strategy=name).zero == stage


@pytest.mark.parametrize("given", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtypes_are_taken_by_name_or_as_they_are(given: Any) -> None:
    assert MegatronFSDPConfig(grad_comm_dtype=given).grad_comm_dtype == "bfloat16"


def test_neither_the_config_nor_the_plugin_imports_torch_or_the_package() -> None:
    code = (
        "import sys, meshwright_megatron_fsdp.plugin as p; p.register_strategies(); "
        "sys.exit(bool({'torch', 'megatron_fsdp'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
