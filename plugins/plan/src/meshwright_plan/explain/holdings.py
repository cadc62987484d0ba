"""Along which axes of the mesh parameters, gradients and optimizer state are divided, seen on planned ranks.

[Note: seen, not told] A rank and its neighbour along an axis hold different pieces exactly where the strategy divides
along that axis. So a small model is laid out on a planned world for rank 0 and for the last rank along each axis, and
their pieces are compared. The strategy is not asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from meshwright.plugin import ROOT_AXES, Degrees, MeshwrightError, Sharded, with_values

from ..planned import planned_mesh
from ..trace import Job, NoValues

FEW = 2
"""Blocks of the small model in each stage."""
_NEARLY = 0.12
"""How much more than its share a rank may hold: padding, and what is too small to be divided."""


@dataclass(frozen=True)
class Held:
    """The part of something that a rank holds.

    Attributes:
        bytes: of the part.
        of_bytes: of the whole; 0: unknown.
        axes: along which it is divided.
        copies: axes along which ranks hold the same.
    """

    bytes: int
    of_bytes: int
    axes: tuple[str, ...]
    copies: tuple[str, ...]

    def part(self, degrees: Degrees) -> Fraction | None:
        """Return 1, or one over the degrees of the axes, if the bytes are about that part; None otherwise."""
        if not self.of_bytes:
            return None
        share = self.bytes / self.of_bytes
        for part in (Fraction(1, math.prod(getattr(degrees, axis) for axis in self.axes)), Fraction(1)):
            if part * (1 - Fraction(1, 100)) <= share <= part * (1 + _NEARLY):
                return part
        return None


@dataclass(frozen=True)
class Division:
    """Axes along which parameters and optimizer state are divided, and bytes of the state per trained element."""

    parameters: tuple[str, ...]
    optimizer: tuple[str, ...]
    optimizer_bytes: float


def division(job: Job) -> Division:
    """Lay the job out on some planned ranks, and compare what they hold; see [Note: seen, not told].

    Raises:
        MeshwrightError: as training does.
    """
    blocks, make = FEW * job.degrees.pp, job.with_layers
    if make is not None and job.layers > blocks:
        try:
            return _compared(replace(job, model=lambda: make(blocks), layers=blocks))
        except MeshwrightError:
            # A schedule may want more blocks.
            pass
    return _compared(job)


def _compared(job: Job) -> Division:
    axes = [axis for axis in ROOT_AXES if getattr(job.degrees, axis) > 1]
    parameters, optimizer, optimizer_bytes = _seen(job, 0)
    others = {axis: _seen(job, _last_along(axis, job.degrees)) for axis in axes}
    return Division(
        tuple(axis for axis in axes if others[axis][0] != parameters),
        tuple(axis for axis in axes if others[axis][1] != optimizer),
        optimizer_bytes,
    )


def _last_along(axis: str, degrees: Degrees) -> int:
    rank = 0
    for each in ROOT_AXES:
        rank = rank * getattr(degrees, each) + (getattr(degrees, axis) - 1 if each == axis else 0)
    return rank


def _seen(job: Job, rank: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Rectangles of parameters and of optimizer state that a rank holds after a step, and bytes of an element of it."""
    with planned_mesh(job, rank) as mesh:
        with with_values():
            model = job.model()
            vocabulary = getattr(getattr(model, "config", None), "vocab_size", None) or 2
            ids = torch.arange(job.rows * job.length).view(job.rows, job.length) % vocabulary
            batches = [{"input_ids": ids, "labels": ids.clone()}]
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
        return (
            _rectangles(state.model),
            {name: _rectangles(values) for name, values in optimizer.items()},
            size / elements if elements else 0.0,
        )


def _rectangles(values: Mapping[str, Sharded]) -> dict[str, Any]:
    return {name: sorted((piece.offsets, piece.sizes) for piece in value.pieces) for name, value in values.items()}


def whole_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of parameters, counting each once."""
    return sum(each.numel() * each.element_size() for each in {id(each): each for each in parameters}.values())
