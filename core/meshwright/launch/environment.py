"""What the environment of this process says: the world of which it is a rank, and who has started it. No torch here."""

from __future__ import annotations

import multiprocessing
import os
from typing import Literal, TypeAlias

Host: TypeAlias = Literal["first rank", "launcher"]
"""Whose process hosts the rendezvous store."""


def started_by_launcher() -> bool:
    """Say whether this process is a rank that torchrun, or `meshwright.launch.local.launch`, started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_elsewhere() -> bool:
    """Say whether this process is a rank that torchrun or another launcher started."""
    return started_by_launcher() and multiprocessing.parent_process() is None


def started_by_torchrun() -> bool:
    """Say whether this process is a rank that an agent of torchrun started, which may begin it anew."""
    return "TORCHELASTIC_RUN_ID" in os.environ and started_elsewhere()


def rank() -> str:
    """Of this process in its world, as the environment has it, which may be no number; "0" outside of one."""
    return os.environ.get("RANK", "0")


def world_size() -> int:
    """How many ranks there are; 1 outside of a world."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_one_machine() -> bool:
    """Whether all ranks of this process's world are on its machine."""
    size = os.environ.get("WORLD_SIZE", "1")
    return not started_by_launcher() or size == "1" or os.environ.get("LOCAL_WORLD_SIZE") == size


def host_of_store() -> Host | None:
    """Who hosts the store; None: this process, or a launcher of this machine."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "first rank" if rank() != "0" else None
    return "launcher" if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE") else None
