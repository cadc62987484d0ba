"""Rank, world and launcher of this process from environment variables. Imports no torch."""

from __future__ import annotations

import multiprocessing
import os
from typing import Literal, TypeAlias

StoreHost: TypeAlias = Literal["first rank", "launcher"]
"""The process that hosts the rendezvous store."""


def is_launched() -> bool:
    """Return whether this process is a rank that a launcher or `meshwright_run.launch.local.launch` started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_launched_externally() -> bool:
    """Return whether this process is a rank that torchrun or another launcher started, not `local.launch`."""
    return is_launched() and multiprocessing.parent_process() is None


def is_launched_by_torchrun() -> bool:
    """Return whether torchrun's agent started this rank, and so may restart it."""
    return "TORCHELASTIC_RUN_ID" in os.environ and is_launched_externally()


def get_rank_variable() -> str:
    """Return the variable RANK unparsed; "0" outside of a world."""
    return os.environ.get("RANK", "0")


def get_world_size() -> int:
    """Return the number of ranks; 1 outside of a world."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_single_node() -> bool:
    """Return whether all ranks of this process's world are on this node."""
    size = os.environ.get("WORLD_SIZE", "1")
    return not is_launched() or size == "1" or os.environ.get("LOCAL_WORLD_SIZE") == size


def get_store_host() -> StoreHost | None:
    """Return which process hosts the store; None: this process, or a launcher on this node."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return "first rank" if get_rank_variable() != "0" else None
    return "launcher" if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE") else None
