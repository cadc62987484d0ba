"""Open the world of a process: join its launcher, choose its device, and connect it to its peers."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ..base.errors import MeshError
from ..base.processes import prefer_expandable_segments
from ..mesh.world import World, get_existing_world, start_world
from .environment import is_launched
from .join import get_local_rank, join_launcher
from .slurm import count_step_devices
from .store import CONNECT_TIMEOUT_S, connect_store, create_world_store, restrict_to_loopback, wait_until_connected


def open_world(
    device: str | torch.device | None = None, *, store: dist.Store | None = None, timeout_s: float = 600.0
) -> World:
    """Use the existing process group, or start one.

    To start one, the process joins the launcher that has started it (see docs/reference/launchers.md). Without a
    launcher, the world has one rank.

    Args:
        device: "cpu", "cuda" or "cuda:1"; None: the accelerator if there is one. Without an index, each rank of a node
            gets the device of its LOCAL_RANK.
        store: store to start the group with, instead of the one that the environment describes.
        timeout_s: time that a collective may wait for peers [s].

    Raises:
        MeshError: there is no such device, the existing group does not support it, or launchers contradict each other.
        RankError: the rendezvous store cannot be reached.
    """
    join_launcher(has_store=store is not None)
    prefer_expandable_segments()
    resolved = find_device(device)
    if dist.is_initialized():
        return get_existing_world(resolved)
    restrict_to_loopback()
    if not is_launched():
        return start_world(resolved, store=dist.HashStore(), rank=0, size=1, timeout_s=timeout_s)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = create_world_store(store or connect_store(max(timeout_s, CONNECT_TIMEOUT_S)), rank, size)
    ranks_here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    world = start_world(
        resolved,
        store=store,
        rank=rank,
        size=size,
        timeout_s=timeout_s,
        shares_device=ranks_here > max(devices, count_step_devices()),
    )
    wait_until_connected(store, size)
    return world


def find_device(device: str | torch.device | None) -> torch.device:
    """Return the device of this rank; see `open_world`.

    Raises:
        MeshError: there is no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    try:
        chosen = torch.device(device) if device is not None else (accelerator or torch.device("cpu"))
    except RuntimeError:
        raise MeshError(f"device {device!r} is not a device name. Use 'cpu', 'cuda' or 'cuda:0'.") from None
    if chosen.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != chosen.type:
        have = accelerator.type if accelerator else "cpu"
        message = f"device {str(device)!r} is not available here. Available: {have}. Set device={have}."
        raise MeshError(f"{message}{describe_missing_driver(' ')}")
    count = torch.accelerator.device_count()
    index = chosen.index if chosen.index is not None else get_local_rank(count) % count
    if index >= count:
        raise MeshError(f"device index {index} does not exist: this node has {count} {chosen.type} devices.")
    return torch.device(chosen.type, index)


def describe_missing_driver(prefix: str = "") -> str:
    """Return `prefix` and the reason why a GPU build of torch finds no GPU; "" if it finds one, or for a CPU build."""
    built = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else ""
    )
    if not built or torch.accelerator.is_available():
        return ""
    return f"{prefix}torch {torch.__version__} is built for {built}, but finds no GPU with a driver."
