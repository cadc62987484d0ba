"""Count the FLOPs of a model, and the share of the devices' peak FLOP/s that a planned step reaches (MFU).

[Note: model FLOPs] FLOPs of the matrix products in forward and backward for one row of `seq_len` tokens, counted on a
trace of one rank: without recomputation, gradients of frozen weights, or experts that are not chosen. Attention counts
only pairs that are not masked: about half of all pairs if causal, while formulas such as 6 N + 12 L H S count all.
Its backward has four products per pair; the fifth, with which fused kernels recompute the scores, does not count.
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
    BoundObjective,
    MeshSizes,
    MeshwrightError,
    Objective,
    OperationObserver,
    count_flops,
    get_operation_name,
    has_meta_tensors,
    is_attention,
    resolve,
)

from .config import DeviceSpec
from .extrapolation import SAMPLE_DEPTHS
from .planner import tracing_mesh
from .trace import NoWeights, TrainingJob


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs per target token of a row without padding, or None and the reason; see [Note: model FLOPs]."""

    per_token: float | None
    unavailable_reason: str = ""


def count_model_flops(job: TrainingJob, objective: Objective | None = None) -> ModelFlops:
    """Return the FLOPs of a job's model per token, in any layout. Objectives are counted as the token loss."""
    if objective is not None and not _counts_tokens(BoundObjective(objective)):
        return ModelFlops(None, f"the {BoundObjective(objective).name} does not count tokens")
    try:
        stack, degrees = resolve("single", MeshSizes(), 1, config={"loss_chunk_rows": 0})
        alone = replace(job, stack=stack, degrees=degrees, micro_batch_size=1, num_microbatches=1)
        return ModelFlops(_count_row_flops(alone) / max(1, job.seq_len - 1))
    except MeshwrightError as error:
        return ModelFlops(None, str(error))


def estimate_mfu(job: TrainingJob, device: DeviceSpec, plan: Mapping[str, Any]) -> float | None:
    """Return the MFU of a planned step; None if the FLOPs of the model or the peak of the device are unknown."""
    per_token, peak = count_model_flops(job).per_token, device.flops.get(get_main_dtype(plan))
    if per_token is None or peak is None:
        return None
    targets = plan["tokens_per_second_per_device"] * (job.seq_len - 1) / job.seq_len
    return float(per_token * targets / peak)


def get_main_dtype(plan: Mapping[str, Any]) -> str:
    """Return the dtype of most matrix products of a plan's first rank."""
    by_dtype: dict[str, int] = plan["ranks"][0]["flops_by_dtype"]
    return max(by_dtype, key=by_dtype.__getitem__, default="float32")


def _counts_tokens(objective: BoundObjective) -> bool:
    """Return whether an objective is divided by the number of targets, judged by a few rows."""
    ids = torch.ones((objective.group_size, 4), dtype=torch.int64)
    try:
        return objective.count([{"input_ids": ids, "labels": ids}]) in (None, objective.group_size * 3)
    except BatchError:
        return False


def _count_row_flops(job: TrainingJob) -> int:
    flops_of = functools.cache(lambda blocks: _count_traced_flops(job.with_num_layers(blocks)))
    for first, second, check in SAMPLE_DEPTHS:
        if job.build_with_layers is None or job.num_layers <= first + second + check:
            break
        growth = (flops_of(second) - flops_of(first)) / (second - first)
        if flops_of(second) + growth * (check - second) == flops_of(check):
            return int(flops_of(check)) + round(growth * (job.num_layers - check))
    return _count_traced_flops(job)


def _count_traced_flops(job: TrainingJob) -> int:
    products = _FlopCounter()
    with tracing_mesh(job, 0) as mesh:
        model, manager = job.build(mesh)
        batches = [job.make_batch(model)]
        module = manager.parallelize(model, NoWeights() if has_meta_tensors(model) else None)
        module.register_forward_pre_hook(products.start)
        with products:
            manager.forward_backward(batches, num_tokens=manager.begin_step_sync(batches))
    return products.flops


class _FlopCounter(OperationObserver):
    """Sum of FLOPs, from the first forward with gradients on: probes before it do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self._has_started = 0, False

    def start(self, *_: Any) -> None:
        self._has_started = self._has_started or torch.is_grad_enabled()

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if not self._has_started:
            return
        flops = count_flops(operation, args, kwargs, result)
        if flops and is_attention(operation) and "backward" in get_operation_name(operation):
            flops = flops * 4 // 5
        self.flops += flops
