"""FLOPs of a model for each token, counted on its trace and not taken from a formula.

[Note: model FLOPs] What the model needs and no layout adds: the products of forward and backward of a row of the run's
length, on one rank, without recomputation; no gradients of frozen weights, and only the experts that are chosen. Of
attention the pairs that act on each other count, as it is traced: about half of all where it is causal (a mask is taken
for the causal one), which formulas such as 6 N + 12 L H S count whole. Its backward has four products of each pair:
fused kernels have a fifth, in which they compute the scores again. Norms, activations, the table of the embedding and
the optimizer have no products.
Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B; Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.plugin import (
    BatchError,
    Given,
    MeshSizes,
    MeshwrightError,
    Objective,
    Observer,
    arithmetic,
    is_attention,
    is_meta,
    name_of,
    resolve,
)

from .depth import DEPTHS
from .planned import tracing
from .trace import Job, NoValues


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs for each target of a row without masks, or None and why they are not known; see [Note: model FLOPs]."""

    per_token: float | None
    why_not: str = ""


def model_flops(job: Job, objective: Objective | None = None) -> ModelFlops:
    """Return what the model of a job needs for each token, whatever its layout.

    Args:
        objective: of the run, which is counted as the token loss: what it adds is no product.
    """
    if objective is not None and not _counts_tokens(Given(objective)):
        return ModelFlops(None, f"the {Given(objective).name} counts something else than tokens")
    try:
        stack, degrees = resolve("single", MeshSizes(), 1, config={"loss_chunk_rows": 0})
        alone = replace(job, stack=stack, degrees=degrees, rows=1, microbatches=1)
        return ModelFlops(_of_row(alone) / max(1, job.length - 1))
    except MeshwrightError as error:
        return ModelFlops(None, str(error))


def _counts_tokens(given: Given) -> bool:
    """Return whether an objective is divided by the number of targets, as far as a few rows tell."""
    ids = torch.ones((given.rows, 4), dtype=torch.int64)
    try:
        return given.count([{"input_ids": ids, "labels": ids}]) in (None, given.rows * 3)
    except BatchError:
        return False


def _of_row(job: Job) -> int:
    of = functools.cache(lambda blocks: _traced(job.at_depth(blocks)))
    for first, second, check in DEPTHS:
        if job.with_layers is None or job.layers <= first + second + check:
            break
        growth = (of(second) - of(first)) / (second - first)
        if of(second) + growth * (check - second) == of(check):
            return int(of(check)) + round(growth * (job.layers - check))
    return _traced(job)


def _traced(job: Job) -> int:
    products = _Products()
    with tracing(job, 0) as mesh:
        model, manager = job.built(mesh)
        batches = [job.batch(model)]
        module = manager.parallelize(model, NoValues() if is_meta(model) else None)
        module.register_forward_pre_hook(products.begin)
        with products:
            manager.forward_backward(batches, num_tokens=manager.announce(batches))
    return products.flops


class _Products(Observer):
    """Sum of products from the first forward on that a backward follows: the model may be tried before."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self._has_begun = 0, False

    def begin(self, *_: Any) -> None:
        """Hook called before each forward."""
        self._has_begun = self._has_begun or torch.is_grad_enabled()

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if not self._has_begun:
            return
        found = arithmetic(operation, args, kwargs, result)
        if found and is_attention(operation) and "backward" in name_of(operation):
            found = found * 4 // 5
        self.flops += found
