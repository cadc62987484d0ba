"""What run.py asks of ranks; here, since workers import their tasks by module and name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor


def prepare(environment: Mapping[str, str]) -> None:
    """Set variables of this rank, for the tasks that follow; "{rank}" and "{size}" stand for its own."""
    for name, value in environment.items():
        os.environ[name] = value.format(rank=os.environ["RANK"], size=os.environ["WORLD_SIZE"])


def try_collectives(device: str) -> tuple[str, dict[str, str]]:
    """Each collective that strategies use, with numbers that show whether it is right.

    Returns:
        The backend for the device, and "ok" or what was wrong for each collective.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.full((2,), rank + 1.0, dtype=torch.float64, device=device)
    everybody = torch.arange(1.0, size + 1, dtype=torch.float64).repeat_interleave(2)
    total = size * (size + 1) / 2

    def reduced() -> Tensor:
        dist.all_reduce(found := mine.clone())
        return found

    def gathered() -> Tensor:
        dist.all_gather_into_tensor(found := mine.new_empty(2 * size), mine)
        return found

    def scattered() -> Tensor:
        dist.reduce_scatter_tensor(found := mine.new_empty(2), everybody.to(device))
        return found

    def sent() -> Tensor:
        dist.broadcast(found := mine.clone(), 0)
        return found

    tried = {
        "all_reduce": (reduced, [total] * 2),
        "all_gather": (gathered, everybody.tolist()),
        "reduce_scatter": (scattered, [(rank + 1.0) * size] * 2),
        "broadcast": (sent, [1.0] * 2),
    }
    # Such as "cpu:gloo,cuda:nccl".
    backends = dict(pair.split(":") for pair in str(dist.distributed_c10d.get_backend_config()).split(","))
    return backends[device], {name: _outcome(*each) for name, each in tried.items()}


def _outcome(work: Callable[[], Tensor], wanted: list[float]) -> str:
    try:
        return "ok" if work().tolist() == wanted else "wrong numbers"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-500:]}"
