"""Along which axes of the mesh parameters, gradients and optimizer state are divided, seen on planned ranks.

[Note: seen, not told] A rank and its neighbour along an axis have other pieces of the whole exactly where the strategy
divides it along that axis. So a small model is laid out on a planned world for rank 0 and for the last one along each
axis, and their pieces are compared: no strategy is asked, and none can say what it does not do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import nn

from ...base.errors import MeshwrightError
from ...mesh.sizes import ROOT_AXES, Degrees
from ...plan.planned import planned_mesh
from ...plan.trace import Job, NoValues
from ...strategy.contract import Batch
from ...tensors.ops import with_values
from ...tensors.pieces import Sharded

FEW = 2
"""Blocks of the small model, for each stage."""
_NEARLY = 0.12
"""By how much more a rank may hold than its share: padding, and what is too small to be divided."""


@dataclass(frozen=True)
class Held:
    """Which part of something a rank has.

    Attributes:
        bytes: that it takes.
        of_bytes: that the whole takes; 0: not known.
        axes: along which it is divided.
        copies: axes along which ranks have the same.
    """

    bytes: int
    of_bytes: int
    axes: tuple[str, ...]
    copies: tuple[str, ...]

    def part(self, degrees: Degrees) -> Fraction | None:
        """1, or one over the degrees of the axes, where that is what it takes; None where it is not."""
        if not self.of_bytes:
            return None
        share = self.bytes / self.of_bytes
        for part in (Fraction(1, math.prod(getattr(degrees, axis) for axis in self.axes)), Fraction(1)):
            if part * (1 - Fraction(1, 100)) <= share <= part * (1 + _NEARLY):
                return part
        return None


@dataclass(frozen=True)
class Division:
    """What is divided, and how much optimizer state there is.

    Attributes:
        parameters, optimizer: axes along which ranks have other pieces.
        optimizer_bytes: of the whole state, of each element that is trained.
    """

    parameters: tuple[str, ...]
    optimizer: tuple[str, ...]
    optimizer_bytes: float


def division(job: Job) -> Division:
    """Lay the job out on some planned ranks, and compare what they hold; see [Note: seen, not told].

    Raises:
        MeshwrightError: as training does.
    """
    small = _small(job)
    try:
        return _compared(small)
    except MeshwrightError:
        # A schedule may want more blocks.
        if small is job:
            raise
        return _compared(job)


def _small(job: Job) -> Job:
    blocks = FEW * job.degrees.pp
    if job.with_layers is None or job.layers <= blocks:
        return job
    make = job.with_layers
    return replace(job, model=lambda: make(blocks), layers=blocks)


def _compared(job: Job) -> Division:
    axes = [axis for axis in ROOT_AXES if getattr(job.degrees, axis) > 1]
    first = _seen(job, 0)
    others = {axis: _seen(job, _last_along(axis, job.degrees)) for axis in axes}
    return Division(
        parameters=tuple(axis for axis in axes if others[axis].parameters != first.parameters),
        optimizer=tuple(axis for axis in axes if others[axis].optimizer != first.optimizer),
        optimizer_bytes=first.optimizer_bytes,
    )


@dataclass(frozen=True)
class _Seen:
    """Rectangles that a rank has, by name; and of the state of these names, bytes of an element."""

    parameters: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    optimizer_bytes: float


def _last_along(axis: str, degrees: Degrees) -> int:
    rank = 0
    for each in ROOT_AXES:
        rank = rank * getattr(degrees, each) + (getattr(degrees, axis) - 1 if each == axis else 0)
    return rank


def _seen(job: Job, rank: int) -> _Seen:
    """What a rank has after a step."""
    with planned_mesh(job, rank) as mesh:
        with with_values():
            model = job.model()
            batches = [_batch(job, model)]
            manager = job.stack.build(mesh)
        manager.parallelize(model, NoValues())
        del model
        manager.build_optimizer(job.optimizer)
        manager.forward_backward(batches, num_tokens=manager.announce(batches))
        manager.clip_grad_norm(job.max_grad_norm, job.grad_norm_type)
        manager.optimizer_step()
        state = manager.sharded_state()
        optimizer = state.optimizer.tensors if state.optimizer is not None else {}
        elements = sum(math.prod(state.model[name].shape) for name in optimizer if name in state.model)
        size = sum(
            math.prod(each.shape) * each.dtype.itemsize for values in optimizer.values() for each in values.values()
        )
        return _Seen(
            _rectangles(state.model),
            {name: _rectangles(values) for name, values in optimizer.items()},
            size / elements if elements else 0.0,
        )


def _rectangles(values: Mapping[str, Sharded]) -> dict[str, Any]:
    return {name: sorted((piece.offsets, piece.sizes) for piece in value.pieces) for name, value in values.items()}


def _batch(job: Job, model: nn.Module) -> Batch:
    import torch

    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 2
    ids = torch.arange(job.rows * job.length).view(job.rows, job.length) % vocabulary
    return {"input_ids": ids, "labels": ids.clone()}


def whole_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """What parameters take, each once."""
    return sum(each.numel() * each.element_size() for each in {id(each): each for each in parameters}.values())
