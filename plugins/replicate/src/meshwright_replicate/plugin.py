"""Implement the hook `open_state_copies`: copies in the memory of nodes. Imports no torch until it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plugin import hookimpl

if TYPE_CHECKING:
    from meshwright.plugin import World

    from .copier import NodeMemory


@hookimpl
def open_state_copies(world: World) -> NodeMemory:
    from .copier import NodeMemory

    return NodeMemory(world)
