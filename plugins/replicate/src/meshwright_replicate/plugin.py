"""Hook `open_state_replication`: replicas in the memory of nodes. Imports no torch until it is called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.plugin import hookimpl

if TYPE_CHECKING:
    from meshwright.plugin import World

    from .replicator import MemoryReplication


@hookimpl
def open_state_replication(world: World) -> MemoryReplication:
    from .replicator import MemoryReplication

    return MemoryReplication(world)
