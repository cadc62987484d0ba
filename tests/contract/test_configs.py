"""Configs mean what their values say: from its own data comes an equal one, and equal ones act equally."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from meshwright import ConfigError, MeshSizes, RunConfig, get_strategy, list_strategies
from meshwright.step.tokens import target_loss_sum
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

# What the schema cannot say: names that exist.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "loss_fn": st.sampled_from([None, "torch.nn.functional.cross_entropy"]),
    "pp_schedule": st.sampled_from(["1f1b", "GPipe", "zbv", None]),
    "tp_plan": st.sampled_from([None, {"lm_head": "colwise"}, "meshwright.plans.mine"]),
    "mp_policy": st.sampled_from([None, {"param_dtype": "bfloat16"}, MixedPrecisionPolicy(torch.bfloat16)]),
    "offload_policy": st.sampled_from([None, {"pin_memory": False}, CPUOffloadPolicy()]),
    "options": st.just({"betas": [0.9, 0.95], "limit": float("inf")}),
}
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "null": st.none(),
    "boolean": st.booleans(),
    "string": st.text(min_size=1, max_size=8),
    "object": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
}


def values_of(schema: dict[str, Any], defs: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a JSON schema allows."""
    if "$ref" in schema:
        schema = defs[schema["$ref"].rpartition("/")[2]]
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return st.one_of([values_of(each, defs) for each in schema["anyOf"]])
    kind = schema.get("type", "null")
    if isinstance(kind, list):
        return st.one_of([values_of({"type": each}, defs) for each in kind])
    if kind in ("integer", "number"):
        low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 64))
        if kind == "integer":
            return st.integers(low, int(high))
        return st.floats(low, high, exclude_min=True, exclude_max=True)
    if kind == "array":
        return st.lists(values_of(schema.get("items", {"type": "string"}), defs), max_size=3)
    return SCALARS[kind]


def some_options(cls: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Up to three options of a config, which may not go together."""
    schema = cls.model_json_schema()
    fields = {
        name: VALUES.get(name, values_of(field, schema.get("$defs", {})))
        for name, field in schema["properties"].items()
        if name not in NEEDED.get(cls, {})
    }
    names = st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


def made(cls: type[Any], options: dict[str, Any]) -> Any:
    try:
        return cls(**NEEDED.get(cls, {}) | options)
    except ValidationError:
        assume(False)


@pytest.mark.filterwarnings("ignore:use_custom_fsdp", "ignore:enable_async_tensor_parallel")
@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_every_valid_config_comes_back_from_its_dict_and_its_json(cls: type[Any]) -> None:
    valid: list[Any] = []

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(some_options(cls))
    def check(options: dict[str, Any]) -> None:
        config = made(cls, options)
        valid.append(config)
        text = config.model_dump_json()
        copies = [cls(**config.to_dict()), cls.model_validate_json(text), cls(**json.loads(text))]
        assert copies == [config] * 3
        assert {hash(each) for each in copies} == {hash(config)}

    check()
    assert len(set(map(str, valid))) >= 3


@pytest.mark.parametrize("cls", CONFIGS, ids=lambda cls: cls.__name__)
def test_a_config_whose_defaults_are_written_out_is_accepted_and_equals_the_one_that_leaves_them_out(
    cls: type[Any],
) -> None:
    default = cls(**NEEDED.get(cls, {}))
    assert cls(**default.to_dict()) == default
    assert cls(**json.loads(default.model_dump_json())) == default


def test_configs_that_differ_in_an_option_are_not_equal() -> None:
    assert FSDP2Config(enable_compile=True) != FSDP2Config()
    assert FSDP2Config(mp_policy=MixedPrecisionPolicy(torch.bfloat16)) != FSDP2Config(mp_policy=MixedPrecisionPolicy())
    assert DDPConfig() != DistributedDataParallelConfig()


@pytest.mark.parametrize(
    ("name", "as_object", "as_mapping"),
    [
        ("mp_policy", MixedPrecisionPolicy(torch.bfloat16), {"param_dtype": "bfloat16"}),
        ("mp_policy", MixedPrecisionPolicy(), {}),
        ("mp_policy", MixedPrecisionPolicy(cast_forward_inputs=False), {"cast_forward_inputs": False}),
        ("mp_policy", MixedPrecisionPolicy(reduce_dtype=torch.float32), {"reduce_dtype": torch.float32}),
        ("offload_policy", CPUOffloadPolicy(), {}),
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
    config: Any = config_cls(loss_fn=target_loss_sum, dtype=torch.bfloat16)
    assert config.to_dict()["loss_fn"] is target_loss_sum
    named = json.loads(config.model_dump_json())
    assert (named["loss_fn"], named["dtype"]) == ("meshwright.step.tokens.target_loss_sum", "bfloat16")
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
