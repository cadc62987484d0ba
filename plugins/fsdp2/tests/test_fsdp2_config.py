"""The options of fsdp2: names and defaults, what is accepted in which form, and what is refused with which text."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from meshwright import ConfigError, MeshSizes, resolve
from meshwright_fsdp2 import FSDP2Config
from meshwright_fsdp2.unit_options import build_mixed_precision_policy, build_offload_policy

CPU = torch.device("cpu")
MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, True)
MIXED_NAMES = {"param_dtype": "bfloat16", "reduce_dtype": "torch.float32", "output_dtype": torch.float32}
TARGET = "torch.distributed.fsdp.MixedPrecisionPolicy"


def test_fields_and_defaults_are_those_of_the_reference_and_some_of_our_own() -> None:
    off = (
        "sequence_parallel patch_is_packed_sequence activation_checkpointing enable_async_tensor_parallel "
        "enable_compile enable_fsdp2_prefetch"
    )
    nothing = "tp_plan mp_policy offload_policy autocast_dtype reshard_after_forward reduce_dtype loss_chunk_rows"
    assert FSDP2Config().to_dict() == {
        **dict.fromkeys(off.split(), False),
        **dict.fromkeys(nothing.split()),
        "defer_fsdp_grad_sync": True,
        "backend": "nccl",
        "fsdp2_backward_prefetch_depth": 2,
        "fsdp2_forward_prefetch_depth": 1,
        "cp_attention": "allgather",
    }
    assert all(field.description for field in FSDP2Config.model_fields.values())


@pytest.mark.parametrize("policy", [MIXED, MIXED_NAMES, {"_target_": TARGET, **MIXED_NAMES}])
def test_mixed_precision_is_taken_as_object_mapping_or_target(policy: Any) -> None:
    assert build_mixed_precision_policy(FSDP2Config(mp_policy=policy)) == MIXED


def test_to_dict_keeps_policy_objects() -> None:
    offloading = CPUOffloadPolicy(pin_memory=False)
    kept = FSDP2Config(mp_policy=MIXED, offload_policy=offloading).to_dict()
    assert kept["mp_policy"] is MIXED
    assert kept["offload_policy"] is offloading
    assert FSDP2Config(**kept | {"enable_fsdp2_prefetch": True}).to_dict()["mp_policy"] is MIXED


def test_the_base_options_reduce_dtype_joins_the_policy() -> None:
    assert build_mixed_precision_policy(FSDP2Config(reduce_dtype="float64")).reduce_dtype is torch.float64
    config = FSDP2Config(reduce_dtype="float32", mp_policy={"param_dtype": "bfloat16", "reduce_dtype": "float32"})
    assert build_mixed_precision_policy(config) == MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def test_offload_policy_forms() -> None:
    assert build_offload_policy(FSDP2Config(), CPU) == OffloadPolicy()
    for policy in (CPUOffloadPolicy(pin_memory=False), {"pin_memory": False}):
        assert build_offload_policy(FSDP2Config(offload_policy=policy), CPU) == CPUOffloadPolicy(pin_memory=False)
    assert build_offload_policy(FSDP2Config(offload_policy={}), torch.device("cuda")) == CPUOffloadPolicy()


def test_async_tensor_parallelism_sets_what_it_needs_and_says_so() -> None:
    with pytest.warns(UserWarning, match="needs sequence_parallel=true and enable_compile=true, and has set so"):
        config = FSDP2Config(enable_async_tensor_parallel=True)
    assert (config.sequence_parallel, config.enable_compile) == (True, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FSDP2Config(**config.to_dict()) == config
    with pytest.warns(UserWarning, match="needs enable_compile=true, and has set so"):
        assert FSDP2Config(enable_async_tensor_parallel=True, sequence_parallel=True) == config


def test_dtypes_and_whole_numbers_are_taken_as_what_they_are() -> None:
    for given in ("bfloat16", "torch.bfloat16", torch.bfloat16):
        assert FSDP2Config(autocast_dtype=given).autocast_dtype == "bfloat16"
    for value in (True, False, None, 2, 4):
        assert FSDP2Config(reshard_after_forward=value).reshard_after_forward is value


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reshard_after_forward": 1}, "for 1, use false"),
        ({"reshard_after_forward": 0}, "at least 2"),
        ({"reshard_after_forward": "2"}, "at least 2"),
        ({"reshard_after_forward": 2.0}, "at least 2"),
        ({"activation_checkpointing": "some"}, "'full' or 'selective'"),
        ({"activation_checkpointing": 1}, "Input should be a valid boolean"),
        ({"defer_fsdp_grad_sync": "all_reduce"}, "reduce_scatter"),
        ({"autocast_dtype": "float8"}, "'bfloat16'"),
        ({"autocast_dtype": torch.float64}, "'bfloat16'"),
        ({"fsdp2_forward_prefetch_depth": 2}, "Set enable_fsdp2_prefetch=true"),
        ({"fsdp2_backward_prefetch_depth": 3}, "Set enable_fsdp2_prefetch=true"),
        ({"enable_fsdp2_prefetch": True, "fsdp2_forward_prefetch_depth": 0}, "greater than or equal to 1"),
        ({"mp_policy": "bfloat16"}, "must be a MixedPrecisionPolicy"),
        ({"mp_policy": CPUOffloadPolicy()}, "must be a MixedPrecisionPolicy"),
        ({"mp_policy": {"param_dtpye": "bfloat16"}}, "Did you mean 'param_dtype'"),
        ({"mp_policy": {"param_dtype": "int64"}}, "param_dtype='int64' is not one of"),
        ({"mp_policy": {"cast_forward_inputs": "yes"}}, "must be true or false"),
        ({"mp_policy": {"_target_": "os.system", "command": "true"}}, "not on the allow-list"),
        ({"mp_policy": {"_target_": 3}}, "no import path"),
        ({"offload_policy": True}, "must be a CPUOffloadPolicy"),
        ({"offload_policy": {"pin": True}}, "Allowed: pin_memory"),
        ({"reduce_dtype": "float64", "mp_policy": MIXED}, "reduce_dtype=float64 and mp_policy.reduce_dtype=float32"),
        ({"mp_plicy": None}, "Did you mean 'mp_policy'"),
        ({"reduce_dtype": "float8"}, "reduce_dtype"),
        ({"tp_plan": 3}, "tp_plan"),
    ],
)
def test_a_wrong_value_is_reported_with_what_is_allowed(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolve("fsdp2", MeshSizes(), 1, config=options)


def test_a_target_of_another_class_is_refused_when_the_policy_is_made() -> None:
    config = FSDP2Config(mp_policy={"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1})
    with pytest.raises(ConfigError, match="is no MixedPrecisionPolicy"):
        build_mixed_precision_policy(config)
