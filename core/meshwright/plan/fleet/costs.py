"""What a save of a run holds up by and takes to write, and likewise a copy in the memory of another node."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...base.errors import MeshwrightError
from ...model.adapter_base import left_out
from ...tensors.ops import with_values
from ...train.ema import EMA
from ...train.run_sections import PlanConfig
from ..device import Device
from ..planned import tracing
from ..trace import Job, NoValues, batch_of
from .fleet import Copies, Saves

SHARE_OF_LINK = 0.1
"""Which part of the links between nodes copies may take, so that no collective waits for them: assumed."""
FEW = 2
"""Blocks of the model, for each stage, that tells what the optimizer has of a parameter."""
KEPT = ("parameters", "optimizer")


@dataclass(frozen=True)
class Costs:
    """What is saved, and what that takes.

    Attributes:
        state_bytes: of model and optimizer, each value once: of a checkpoint.
        rank_bytes: of what a rank has of them: of a copy of it.
        saves, copies: after each step.
    """

    state_bytes: int
    rank_bytes: int
    saves: Saves
    copies: Copies


def costs(job: Job, device: Device, plan: Mapping[str, Any], asked: PlanConfig, *, asynchronous: bool = True) -> Costs:
    """From what a rank holds, and what disks and links carry.

    Args:
        plan: of the job, see `planned.plan`.
        asked: rates of disks, and of copies to the host.
        asynchronous: whether checkpoints are written while training goes on.

    Raises:
        MeshwrightError: as training does.
    """
    world, per_node = job.degrees.world_size, min(device.node.ranks, job.degrees.world_size)
    whole = state_bytes(job)
    own = max(sum(each["held_by_owner"].get(owner, 0) for owner in KEPT) for each in plan["ranks"])
    between = device.node.between.rate

    def on_disk(size: float) -> float:
        """Of so many bytes of each rank."""
        return max(size * per_node / asked.disk_bandwidth, size * world / asked.disk_bandwidth_total)

    # Of ranks that have the same, each writes a part, and reads all.
    hold, write = whole / world / asked.copy_bandwidth, on_disk(whole / world)
    return Costs(
        whole,
        own,
        Saves(1, hold, write, on_disk(own)) if asynchronous else Saves(1, hold + write, 0.0, on_disk(own)),
        Copies(1, own / asked.copy_bandwidth, own / (between * SHARE_OF_LINK), own / between),
    )


def state_bytes(job: Job) -> int:
    """What a checkpoint of a job holds of model and optimizer.

    What is kept of each element of a parameter is seen on the first rank of a small model after a step.

    Raises:
        MeshwrightError: as training does.
    """
    small = _small(job)
    try:
        kept = _bytes_of_elements(small)
    except MeshwrightError:
        # A schedule may want more blocks.
        if small is job:
            raise
        kept = _bytes_of_elements(job)
    usual = sum(size for _, size in kept.values()) / max(1, sum(count for count, _ in kept.values()))
    each_of = {name: size / count for name, (count, size) in kept.items() if count}
    return round(sum(each.numel() * each_of.get(name, usual) for name, each in _parameters(job.model())))


def _small(job: Job) -> Job:
    blocks = FEW * job.degrees.pp
    if job.with_layers is None or job.layers <= blocks:
        return job
    make = job.with_layers
    return replace(job, model=lambda: make(blocks), layers=blocks)


def _bytes_of_elements(job: Job) -> dict[str, tuple[int, int]]:
    """Elements, and what is kept of them, by name without numbers of blocks."""
    with tracing(job, 0) as mesh:
        with with_values():
            model = job.model()
            batches = [batch_of(job, model)]
            manager = job.stack.build(mesh)
        manager.parallelize(model, NoValues())
        del model
        manager.build_optimizer(job.optimizer)
        if job.ema is not None:
            EMA(manager, job.ema)
        manager.forward_backward(batches, num_tokens=manager.announce(batches))
        manager.clip_grad_norm(job.max_grad_norm, job.grad_norm_type)
        manager.optimizer_step()
        state, skipped = manager.sharded_state(), left_out(manager.model_parts)
    found: dict[str, tuple[int, int]] = {}
    tensors = {} if state.optimizer is None else state.optimizer.tensors
    for name, value in state.model.items():
        count = math.prod(value.shape)
        beside = [*tensors.get(name, {}).values(), *filter(None, [state.averages.get(name)])]
        size = sum(math.prod(each.shape) * each.dtype.itemsize for each in (value, *beside))
        before = found.get(_alike(name), (0, 0))
        found[_alike(name)] = before[0] + count, before[1] + (0 if name in skipped else size)
    return found


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(_alike(name), each) for name, each in model.named_parameters()]


def _alike(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
