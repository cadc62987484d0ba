"""Configs mean what their values say: from its own data comes an equal one, and equal ones act equally."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from meshwright import ConfigError, MeshSizes, RunConfig, get_strategy, list_strategies
from meshwright.step.tokens import sum_target_loss
from meshwright_ddp import DDPConfig, DistributedDataParallelConfig
from meshwright_fsdp2 import FSDP2Config
from meshwright_run.data.config import DataConfig
from meshwright_run.run_file import CheckpointConfig, EvalConfig, OptimizerConfig, SampleConfig, ScheduleConfig

NEEDED: dict[type[BaseModel], dict[str, Any]] = {
    RunConfig: {"model": {"model_type": "llama"}, "steps": 9, "batch_size": 4}
}
"""Values of the fields without default."""
OWN = [RunConfig, MeshSizes, DataConfig, OptimizerConfig, ScheduleConfig, EvalConfig, SampleConfig, CheckpointConfig]
CONFIGS: list[type[Any]] = [
    *(spec.config_cls for spec in list_strategies().values()),
    DistributedDataParallelConfig,
    *OWN,
]

# Options of each kind of value that JSON does not have, or has in another form.
OPTIONS: list[Any] = [
    FSDP2Config(tp_plan={"lm_head": "colwise"}, mp_policy={"param_dtype": "bfloat16"}, enable_compile=True),
    FSDP2Config(tp_plan="meshwright.plans.mine", offload_policy=CPUOffloadPolicy(), reduce_dtype="float64"),
    DDPConfig(bucket_cap_mb=5),
    RunConfig(**NEEDED[RunConfig], objective={"name": "cross_entropy"}, tp_size=None, on_bad_step="skip"),
    OptimizerConfig(options={"betas": [0.9, 0.95], "limit": float("inf")}, groups=[{"match": ["*norm*"], "lr": 0.5}]),
    CheckpointConfig(every=[500, "1.5h"], keep_best={"count": 2}, on_signal={"signals": ["SIGUSR2"], "grace_s": 60}),
]


@pytest.mark.parametrize("config", [*(cls(**NEEDED.get(cls, {})) for cls in CONFIGS), *OPTIONS], ids=repr)
def test_a_config_comes_back_from_its_dict_and_its_json(config: Any) -> None:
    cls, text = type(config), config.model_dump_json()
    copies = [cls(**config.to_dict()), cls.model_validate_json(text), cls(**json.loads(text))]
    assert copies == [config] * 3
    assert {hash(each) for each in copies} == {hash(config)}


@pytest.mark.parametrize(
    ("name", "as_object", "as_mapping"),
    [
        ("mp_policy", MixedPrecisionPolicy(torch.bfloat16), {"param_dtype": "bfloat16"}),
        ("mp_policy", MixedPrecisionPolicy(cast_forward_inputs=False), {"cast_forward_inputs": False}),
        ("offload_policy", CPUOffloadPolicy(pin_memory=False), {"pin_memory": False}),
    ],
    ids=str,
)
def test_a_policy_is_the_same_as_object_and_as_mapping(name: str, as_object: Any, as_mapping: dict[str, Any]) -> None:
    target = {"_target_": f"torch.distributed.fsdp.{type(as_object).__name__}"}
    given = [FSDP2Config(**{name: each}) for each in (as_object, as_mapping, {**target, **as_mapping})]
    assert given[0] == given[1] == given[2]
    assert len({hash(each) for each in given}) == len({each.model_dump_json() for each in given}) == 1


def _local() -> Callable[..., Any]:
    return lambda logits, labels: logits.sum()


def test_objects_are_kept_in_dicts_and_named_in_json() -> None:
    config_cls = get_strategy("pipeline").config_cls
    config: Any = config_cls(loss_fn=sum_target_loss, dtype=torch.bfloat16)
    assert config.to_dict()["loss_fn"] is sum_target_loss
    named = json.loads(config.model_dump_json())
    assert (named["loss_fn"], named["dtype"]) == ("meshwright.step.tokens.sum_target_loss", "bfloat16")
    assert config_cls(**named) == config
    policy = FSDP2Config(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert policy.to_dict()["mp_policy"] is policy.mp_policy
    assert json.loads(policy.model_dump_json())["mp_policy"] == {
        "_target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "cast_forward_inputs": True,
    }
    unnamed = _local()
    own: Any = config_cls(loss_fn=unnamed)
    assert config_cls(**own.to_dict()) == own
    assert own != config_cls(loss_fn=_local())
    for write in (own.model_dump_json, lambda: own.model_dump(mode="json")):
        with pytest.raises(
            ConfigError, match=r"loss_fn=<function _local.* without an import path. Define it at the top level"
        ):
            write()
