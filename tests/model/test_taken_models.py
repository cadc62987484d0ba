"""A model that a manager has is not given to another one, whose hooks would be in each other's way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiers import mostly_slow

import meshwright as mw
from meshwright.launch.open_world import open_world
from meshwright.testing import pool
from meshwright.testing.models import case_model, tiny_model

LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, int]]] = {
    "single": (1, "single", {}, {}),
    "ddp": (2, "ddp", {}, {}),
    # Two managers' buckets over one parameter: its gradient came back as 0.
    "ddp bucketed": (2, "ddp", {"engine": "bucketed"}, {}),
    "fsdp2": (2, "fsdp2", {}, {}),
    "pipeline": (2, "fsdp2", {}, {"pp_size": 2}),
}


def _manager(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> Any:
    with open_world("cpu") as world:
        stack, degrees = mw.resolve(strategy, mw.MeshSizes(**sizes), world.size, config=config)
        return stack.build(mw.Mesh(degrees, world))


def _twice(strategy: str, config: dict[str, Any], sizes: dict[str, int]) -> str:
    model = tiny_model()
    _manager(strategy, config, sizes).parallelize(model)
    try:
        _manager(strategy, config, sizes).parallelize(model)
    except mw.MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


@pytest.mark.parametrize("layout", mostly_slow(LAYOUTS))
def test_a_model_of_another_manager_is_refused_on_every_rank(layout: str) -> None:
    ranks, *arguments = LAYOUTS[layout]
    for text in pool(ranks).run(_twice, *arguments):
        assert text.startswith("ModelError: ")
        assert "has been parallelized by another manager already" in text
        assert "Build the model anew" in text


def _two_models() -> None:
    for seed in range(2):
        # All models of this type have one module for an activation.
        model = case_model("openai-gpt", tied=None, seed=seed, dtype=torch.float64)
        _manager("single", {}, {}).parallelize(model)


def test_models_that_share_modules_without_parameters_have_managers_of_their_own() -> None:
    pool(1).run(_two_models)
