"""float16 needs a loss that is scaled, which nothing here does: it is refused wherever it would be trained in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from meshwright import ConfigError, Mesh, MeshSizes, ModelError, open_world, resolve
from meshwright.base.validation import validated
from meshwright.strategy.registry import get_strategy
from meshwright.testing.models import tiny_model


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("fsdp2", {"autocast_dtype": "float16"}),
        ("fsdp2", {"autocast_dtype": torch.float16}),
        ("fsdp2", {"mp_policy": {"param_dtype": "torch.float16"}}),
        ("fsdp2", {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)}),
        ("megatron_fsdp", {"main_grads_dtype": "float16"}),
        ("pipeline", {"dtype": torch.float16}),
    ],
    ids=str,
)
def test_options_that_would_train_in_float16_are_refused(strategy: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="float16 would need a loss that is scaled"):
        validated(get_strategy(strategy).config_cls, options, where="options")


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2", "megatron_fsdp"])
def test_models_that_would_be_trained_in_float16_are_refused(strategy: str) -> None:
    with open_world("cpu") as world:
        stack, degrees = resolve(strategy, MeshSizes(), world.size)
        manager = stack.build(Mesh(degrees, world))
        with pytest.raises(ModelError, match=r"is to be trained in float16: .* Load the model in bfloat16 or float32"):
            manager.parallelize(tiny_model(dtype=torch.float16))
