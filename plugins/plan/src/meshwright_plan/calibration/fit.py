"""Latencies and rates of links from how long collectives took: least squares over the model of `time`.

What is minimized is the sum of squares of log(modelled / measured), so a message of a kilobyte counts as much as one of
a gigabyte. Numbers are sought as logarithms, since all are positive, by Levenberg and Marquardt's method (Marquardt
1963, SIAM J. Appl. Math. 11). Whether a collective takes a ring or a tree follows from the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.plugin import MeshError

from ..config import LinkSpec, NodeSpec
from ..timeline import MESSAGE_KINDS, estimate_collective_seconds

MAX_ITERATIONS = 200
_STEP = 1e-6  # Step of a logarithm to see what depends on it
_MAX_RATIO, _MAX_FACTOR_RATIO = 1e3, 20.0
"""Bounds of numbers and factors by where their search begins: what noisy samples do not tell goes nowhere."""
_TREE_COLLECTIVES = ("all_reduce", "broadcast")
_LINK_FIELDS = ("effective_bandwidth", "ring_step_latency_s", "tree_step_latency_s")


@dataclass(frozen=True)
class CollectiveSample:
    """One measured collective; `seconds` count from when all `ranks` (two for a message) had come to it."""

    kind: str
    bytes: int
    ranks: tuple[int, ...]
    seconds: float


def fit_node(samples: Sequence[CollectiveSample], node: NodeSpec) -> NodeSpec:
    """Return a node whose links give the measured times; `node` gives what samples do not determine."""
    known = [each for each in samples if len(each.ranks) > 1]
    if not known or any(each.seconds <= 0 for each in known):
        raise MeshError(
            f"links cannot be fitted to {len(known)} samples of more than one rank, "
            f"{sum(each.seconds <= 0 for each in known)} of which took no time. Measure on 2 ranks or more."
        )
    names = _list_free_parameters(known, node)
    wanted = torch.tensor([each.seconds for each in known], dtype=torch.float64).log()

    def off(logs: Tensor) -> Tensor:
        made = _build_node(node, names, logs.exp().tolist())
        reported = [estimate_collective_seconds(each.kind, each.bytes, each.ranks, made) for each in known]
        return torch.tensor(reported, dtype=torch.float64).log() - wanted

    start = torch.tensor([_initial_value(name, known, node) for name in names], dtype=torch.float64).log()
    far = (
        torch.tensor([_MAX_FACTOR_RATIO if name.startswith("slowdown_factors.") else _MAX_RATIO for name in names])
        .double()
        .log()
    )
    return _build_node(node, names, _minimize_least_squares(off, start, far).exp().tolist())


def median_relative_error(samples: Sequence[CollectiveSample], node: NodeSpec) -> float:
    """Return the median over samples of how far a node's links are off, as a part of what was measured."""
    parts = [
        abs(estimate_collective_seconds(each.kind, each.bytes, each.ranks, node) / each.seconds - 1) for each in samples
    ]
    return sorted(parts)[len(parts) // 2]


def _list_free_parameters(samples: Sequence[CollectiveSample], node: NodeSpec) -> list[str]:
    """Return the names of the numbers that samples determine: of links, of beginnings, and factors of kinds."""
    kinds = {"send" if each.kind in MESSAGE_KINDS else each.kind for each in samples}
    levels = [_find_level(each, node) for each in samples]
    has_trees = any(kind in _TREE_COLLECTIVES for kind in kinds)
    names = []
    for level in ("intra_node", "inter_node"):
        if level in levels:
            names += [f"{level}.{name}" for name in _LINK_FIELDS if name != "tree_step_latency_s" or has_trees]
    names += ["ring_base_latency_s"] if kinds - {"send"} else []
    names += ["tree_base_latency_s"] if has_trees else []
    # The rate is that of one kind; each other, messages included, has a factor.
    base = "all_gather" if "all_gather" in kinds else min(kinds)
    return names + [f"slowdown_factors.{kind}" for kind in sorted(kinds - {base})]


def _initial_value(name: str, samples: Sequence[CollectiveSample], node: NodeSpec) -> float:
    owner, _, last = name.rpartition(".")
    if owner == "slowdown_factors":
        return node.slowdown_factors.get(last, 1.0)
    here = [each for each in samples if owner in ("", _find_level(each, node))]
    if last == "effective_bandwidth":
        return max(each.bytes / each.seconds for each in here)
    return min(each.seconds for each in here) / 4


def _build_node(node: NodeSpec, names: Sequence[str], values: Sequence[float]) -> NodeSpec:
    given = dict(zip(names, values, strict=True))
    changes: dict[str, object] = {}
    for level in ("intra_node", "inter_node"):
        link: LinkSpec = getattr(node, level)
        rate = given.get(f"{level}.effective_bandwidth", link.effective_bandwidth)
        bandwidth = max(rate, link.bandwidth)
        reported = {
            name: given.get(f"{level}.{name}", getattr(link, name))
            for name in ("ring_step_latency_s", "tree_step_latency_s")
        }
        changes[level] = LinkSpec.model_construct(bandwidth=bandwidth, efficiency=rate / bandwidth, **reported)
    changes |= {name: given.get(name, getattr(node, name)) for name in ("ring_base_latency_s", "tree_base_latency_s")}
    found = {
        name.removeprefix("slowdown_factors."): given[name] for name in names if name.startswith("slowdown_factors.")
    }
    return node.model_copy(update={**changes, "slowdown_factors": {**node.slowdown_factors, **found}})


def _find_level(sample: CollectiveSample, node: NodeSpec) -> str:
    return "intra_node" if len({rank // node.ranks for rank in sample.ranks}) == 1 else "inter_node"


def _minimize_least_squares(residuals: Callable[[Tensor], Tensor], start: Tensor, max_distance: Tensor) -> Tensor:
    """Return the argument that minimizes the sum of squares of `residuals`, no further than `max_distance` from
    `start`."""
    now, residual, damping = start, residuals(start), 1e-2
    for _ in range(MAX_ITERATIONS):
        columns = [(residuals(now + step) - residual) / _STEP for step in torch.eye(len(now), dtype=now.dtype) * _STEP]
        slope = torch.stack(columns, dim=1)
        square = slope.T @ slope
        scale = torch.diag(square.diagonal().clamp(min=1e-9))  # what nothing depends on stays where it is
        step = torch.linalg.solve(square + damping * scale, -slope.T @ residual).clamp(-2, 2)
        step = (now + step).clamp(start - max_distance, start + max_distance) - now
        tried = residuals(now + step)
        if tried.square().sum() < residual.square().sum():
            now, residual, damping = now + step, tried, max(damping / 5, 1e-12)
            if float(step.abs().max()) < 1e-13:
                break
        elif damping > 1e12:
            break
        else:
            damping *= 4
    return now
