"""Fit latencies and bandwidths of links to measured collectives: least squares over the model of `timeline`.

The objective is the sum of squares of log(modelled / measured), so a message of a kilobyte counts as much as one of a
gigabyte. All parameters are positive, so the search is over their logarithms, by the Levenberg-Marquardt algorithm
(Marquardt 1963, SIAM J. Appl. Math. 11). The parameters determine whether a collective uses a ring or a tree.
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
_STEP = 1e-6  # Finite-difference step of a logarithm
_MAX_RATIO, _MAX_FACTOR_RATIO = 1e3, 20.0
"""Largest ratio of a link parameter or a factor to its initial value, which bounds values that samples do not fix."""
_TREE_COLLECTIVES = ("all_reduce", "broadcast")
_LINK_FIELDS = ("effective_bandwidth", "ring_step_latency_s", "tree_step_latency_s")


@dataclass(frozen=True)
class CollectiveSample:
    """A measured collective. `seconds` starts when all `ranks` (two for a message) have called it."""

    kind: str
    bytes: int
    ranks: tuple[int, ...]
    seconds: float


def fit_node(samples: Sequence[CollectiveSample], node: NodeSpec) -> NodeSpec:
    """Return a node whose links fit the measured times; `node` gives values that the samples do not determine."""
    known = [each for each in samples if len(each.ranks) > 1]
    if not known or any(each.seconds <= 0 for each in known):
        raise MeshError(
            f"links cannot be fitted to {len(known)} samples of more than one rank, "
            f"{sum(each.seconds <= 0 for each in known)} of which took no time. Measure on at least 2 ranks."
        )
    names = _list_free_parameters(known, node)
    measured = torch.tensor([each.seconds for each in known], dtype=torch.float64).log()

    def residuals(logs: Tensor) -> Tensor:
        candidate = _build_node(node, names, logs.exp().tolist())
        modelled = [estimate_collective_seconds(each.kind, each.bytes, each.ranks, candidate) for each in known]
        return torch.tensor(modelled, dtype=torch.float64).log() - measured

    start = torch.tensor([_initial_value(name, known, node) for name in names], dtype=torch.float64).log()
    far = (
        torch.tensor([_MAX_FACTOR_RATIO if name.startswith("slowdown_factors.") else _MAX_RATIO for name in names])
        .double()
        .log()
    )
    return _build_node(node, names, _minimize_least_squares(residuals, start, far).exp().tolist())


def median_relative_error(samples: Sequence[CollectiveSample], node: NodeSpec) -> float:
    """Return the median over samples of the relative error of a node's links."""
    parts = [
        abs(estimate_collective_seconds(each.kind, each.bytes, each.ranks, node) / each.seconds - 1) for each in samples
    ]
    return sorted(parts)[len(parts) // 2]


def _list_free_parameters(samples: Sequence[CollectiveSample], node: NodeSpec) -> list[str]:
    """Return the names of the parameters that samples determine: of links, base latencies, and factors of kinds."""
    kinds = {"send" if each.kind in MESSAGE_KINDS else each.kind for each in samples}
    levels = [_find_level(each, node) for each in samples]
    has_trees = any(kind in _TREE_COLLECTIVES for kind in kinds)
    names = []
    for level in ("intra_node", "inter_node"):
        if level in levels:
            names += [f"{level}.{name}" for name in _LINK_FIELDS if name != "tree_step_latency_s" or has_trees]
    names += ["ring_base_latency_s"] if kinds - {"send"} else []
    names += ["tree_base_latency_s"] if has_trees else []
    # One kind determines the bandwidth; each other kind, messages included, has a slowdown factor.
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
        latencies = {
            name: given.get(f"{level}.{name}", getattr(link, name))
            for name in ("ring_step_latency_s", "tree_step_latency_s")
        }
        changes[level] = LinkSpec.model_construct(bandwidth=bandwidth, efficiency=rate / bandwidth, **latencies)
    changes |= {name: given.get(name, getattr(node, name)) for name in ("ring_base_latency_s", "tree_base_latency_s")}
    factors = {
        name.removeprefix("slowdown_factors."): given[name] for name in names if name.startswith("slowdown_factors.")
    }
    return node.model_copy(update={**changes, "slowdown_factors": {**node.slowdown_factors, **factors}})


def _find_level(sample: CollectiveSample, node: NodeSpec) -> str:
    return "intra_node" if len({rank // node.ranks for rank in sample.ranks}) == 1 else "inter_node"


def _minimize_least_squares(residuals: Callable[[Tensor], Tensor], start: Tensor, max_distance: Tensor) -> Tensor:
    """Return the argument within `max_distance` of `start` that minimizes the sum of squares of `residuals`."""
    now, residual, damping = start, residuals(start), 1e-2
    for _ in range(MAX_ITERATIONS):
        columns = [(residuals(now + step) - residual) / _STEP for step in torch.eye(len(now), dtype=now.dtype) * _STEP]
        slope = torch.stack(columns, dim=1)
        square = slope.T @ slope
        scale = torch.diag(square.diagonal().clamp(min=1e-9))  # parameters without effect do not move
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
