"""What the environment says of this process: its rank, its world, and who has started it. Imports no torch."""

from __future__ import annotations

import multiprocessing
import os
from typing import Literal, TypeAlias

Host: TypeAlias = Literal["first rank", "launcher"]
"""The process that hosts the rendezvous store."""


def started_by_launcher() -> bool:
    """Return whether this process is a rank of a launched world, also of `meshwright_run.launch.local.launch`."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_elsewhere() -> bool:
    """Return whether this process is a rank that torchrun or another launcher started, not `local.launch`."""
    return started_by_launcher() and multiprocessing.parent_process() is None


def started_by_torchrun() -> bool:
    """Return whether torchrun's agent started this rank, and so may restart it."""
    return "TORCHELASTIC_RUN_ID" in os.environ and started_elsewhere()


def rank() -> str:
    """Return RANK as it is, which may be no number; "0" outside of a world."""
    return os.environ.get("RANK", "0")


def world_size() -> int:
    """Return the number of ranks; 1 outside of a world."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_one_machine() -> bool:
    """Return whether all ranks of this process's world are on its machine."""
    size = os.environ.get("WORLD_SIZE", "1")
    return not started_by_launcher() or size == "1" or os.environ.get("LOCAL_WORLD_SIZE") == size


def host_of_store() -> Host | None:
    """Return who hosts the store; None: this process, or a launcher of this machine."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "first rank" if rank() != "0" else None
    return "launcher" if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE") else None
