"""Workers of Ray Train.

Workers of a TorchTrainer have a process group and torchrun's variables before their loop starts. Workers of other
trainers have neither: they get their ranks from Ray Train, and rank 0 broadcasts its address. This module never imports
Ray.
"""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from ..base.errors import MeshError
from .cluster_environment import ClusterEnvironment, Launcher


def _detect(environment: Mapping[str, str]) -> ClusterEnvironment | None:
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        context = train.get_context()
        rank, size = context.get_world_rank(), context.get_world_size()
    except (RuntimeError, DeprecationWarning):
        # A driver, task or actor of Ray, or a trial of Tune.
        return None
    if size in (None, 1):
        return None

    master = cache(lambda: _broadcast_master_address(rank))
    return ClusterEnvironment(
        RAY_TRAIN.name,
        f"ray.train.get_context() with rank {rank} of {size}",
        (),
        rank=rank,
        world_size=size,
        local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(),
        get_master_address=lambda: master()[0],
        get_master_port=lambda: master()[1],
        # Workers inherit the variables of the launcher that started Ray's processes.
        is_nested_in=lambda outer: True,
    )


RAY_TRAIN = Launcher("Ray Train", (), _detect)


def _broadcast_master_address(rank: int) -> tuple[str, int]:
    """Return the address and a free port of rank 0. Collective over the workers."""
    try:
        collective = importlib.import_module("ray.train.collective")
    except ImportError:
        raise MeshError(
            "this version of Ray Train cannot broadcast the address of rank 0 to the other workers. Use "
            "TorchTrainer, or a newer Ray, or set MASTER_ADDR and MASTER_PORT in the workers."
        ) from None
    mine: Any = None
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            mine = sys.modules["ray"].util.get_node_ip_address(), probe.getsockname()[1]
    address, port = collective.broadcast_from_rank_zero(mine)
    return str(address), int(port)
