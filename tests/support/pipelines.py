"""Managers of pipelines of two ranks, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright import Mesh, MeshSizes, open_world, resolve

PP2 = {"pp_size": 2}


def manager_of(strategy: str, options: Mapping[str, Any]) -> Any:
    own = {name: value for name, value in options.items() if name.startswith(("pp_", "loss_", "patch_"))}
    inner = {name: value for name, value in options.items() if name not in own}
    with open_world() as world:
        sizes = MeshSizes(pp_size=2)
        stack, degrees = resolve(strategy, sizes, world.size, config=inner, wrapper_config={"pipeline": own})
        return stack.build(Mesh(degrees, world))
