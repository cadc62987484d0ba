"""Whole tensors of two replays, one pair after the other: the first that differs, and what differs most."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .gradients import load, saved


@dataclass(frozen=True)
class Apart:
    """How far two tensors are apart.

    Attributes:
        name: of both.
        absolute: the largest difference of two elements.
        relative: that, as a part of the largest element of both.
        why: where they cannot be compared.
    """

    name: str
    absolute: float
    relative: float
    why: str = ""


@dataclass(frozen=True)
class Differences:
    """Of tensors in the order of the model.

    Attributes:
        count: how many were compared.
        first: the first beyond the tolerance; None: all are within.
        largest: the one that is furthest apart.
        beyond: how many are beyond the tolerance.
    """

    count: int
    first: Apart | None
    largest: Apart | None
    beyond: int

    def as_values(self) -> dict[str, Any]:
        return asdict(self)


def apart(name: str, one: Tensor, other: Tensor) -> Apart:
    """How far two tensors are apart, in float64. What is equal or not a number in both is not."""
    if one.shape != other.shape:
        return Apart(name, torch.inf, torch.inf, f"shape {tuple(one.shape)} against {tuple(other.shape)}")
    if not one.numel():
        return Apart(name, 0.0, 0.0)
    a, b = one.double(), other.double()
    between = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).nan_to_num(nan=torch.inf)
    most, scale = float(between.max()), float(torch.maximum(a.abs(), b.abs()).nan_to_num(nan=0.0).max())
    return Apart(name, most, most / scale if most and math.isfinite(most) else most)


def differences(one: Path, other: Path, tolerance: float) -> Differences:
    """Compare what two replays have saved, by name.

    Args:
        tolerance: of relative differences.
    """
    theirs = dict(saved(other))
    found = []
    for name, path in saved(one):
        if name in theirs:
            found.append(apart(name, load(path), load(theirs.pop(name))))
        else:
            found.append(Apart(name, torch.inf, torch.inf, "the second run has none of that name"))
    found += [Apart(name, torch.inf, torch.inf, "the first run has none of that name") for name in theirs]
    return summed(found, tolerance)


def summed(found: list[Apart], tolerance: float) -> Differences:
    """What is to be told of them."""
    beyond = [each for each in found if not each.relative <= tolerance]
    largest = max(found, key=lambda each: each.relative, default=None)
    return Differences(len(found), beyond[0] if beyond else None, largest, len(beyond))
