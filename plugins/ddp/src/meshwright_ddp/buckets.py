"""Flat gradient buffers, and the buckets that are each reduced by one collective.

[Note: bucket] Parameters of one dtype are in one buffer, in reverse registration order, which approximates the order in
which backward produces their gradients. A bucket is a range of the buffer with complete parameters. It ends with the
parameter that brings it to `bucket_size`. With the distributed optimizer, rank r of W owns the r-th of W equal shards
of every bucket, regardless of parameter boundaries. Sizes are in elements.

[Note: when a bucket is ready] The first step only counts the gradients that each parameter gets in the last microbatch.
From the second step on, a bucket is ready when all counts have reached those of the first step. Otherwise it is reduced
at the end of the step.

Source: the semantics of Megatron-Core's buffers for parameters and gradients, as measured on its layouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from meshwright.plugin import ModelError

from .collectives import BucketAllGather, BucketReduction, DataParallelGroups
from .config import DistributedDataParallelConfig

PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128
HIGH_BUSBW_ALIGNMENT = 2**16

MIN_BUCKET_SIZE = 40_000_000
BUCKET_SIZE_PER_RANK = 1_000_000


# -- the layout, without tensors


@dataclass(frozen=True)
class BucketLayout:
    buckets: list[tuple[int, int]]
    unpadded: list[int]
    param_ranges: list[tuple[int, int, int]]
    dp_size: int

    @property
    def numel(self) -> int:
        return self.buckets[-1][1] if self.buckets else 0

    @property
    def param_indices(self) -> list[list[int]]:
        """Indices of the parameters of each bucket, in registration order."""
        members: list[list[int]] = [[] for _ in self.buckets]
        for index, (_, _, bucket) in enumerate(self.param_ranges):
            members[bucket].append(index)
        return members

    def shard_range(self, bucket: int, rank: int) -> tuple[int, int]:
        """Return (start, end) of a rank's shard of a bucket in the buffer; ranks are 0 to W - 1."""
        start, end = self.buckets[bucket]
        size = (end - start) // self.dp_size
        return start + rank * size, start + (rank + 1) * size

    def owned_param_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return (start, end) of a rank's shard within flattened parameter `index`; (0, 0) if it is empty."""
        start, end, bucket = self.param_ranges[index]
        low, high = self.shard_range(bucket, rank)
        low, high = max(low, start), min(high, end)
        return (low - start, high - start) if low < high else (0, 0)


def compute_bucket_layout(
    numels: Sequence[int],
    *,
    bucket_size: int | None,
    dp_size: int,
    use_distributed_optimizer: bool,
    separate_params: Collection[int] = frozenset(),
    pad_for_high_busbw: bool = False,
) -> BucketLayout:
    """Lay out parameters of these sizes, in registration order, in one buffer for W = `dp_size` ranks.

    A bucket ends with the parameter that brings it to `bucket_size` (None: one bucket). With the distributed optimizer,
    parameters are aligned, and buckets are padded so that W divides them, with `pad_for_high_busbw` also to a multiple
    of 2^16. The parameters at the indices `separate_params` get a bucket each.
    """
    layout = BucketLayout([], [], [(0, 0, 0)] * len(numels), dp_size)
    if not use_distributed_optimizer:
        separate_params, start_multiple, end_multiple = (), 1, 1
    else:
        start_multiple = PARAMETER_ALIGNMENT
        end_multiple = math.lcm(dp_size, BUCKET_ALIGNMENT, HIGH_BUSBW_ALIGNMENT if pad_for_high_busbw else 1)
    bucket_start = position = 0
    is_empty = True

    def close(end: int) -> int:
        padded = _round_up(end, end_multiple)
        layout.buckets.append((bucket_start, padded))
        layout.unpadded.append(end - bucket_start)
        return padded

    for index in reversed(range(len(numels))):
        start = _round_up(position, start_multiple)
        if index in separate_params and not is_empty:
            start = bucket_start = close(start)
        position = start + numels[index]
        layout.param_ranges[index] = (start, position, len(layout.buckets))
        is_full = bucket_size is not None and position - bucket_start >= bucket_size
        is_empty = is_full or index in separate_params
        if is_empty:
            position = bucket_start = close(position)
    if not is_empty:
        close(position)
    return layout


def compute_default_bucket_size(dp_size: int) -> int:
    return max(MIN_BUCKET_SIZE, BUCKET_SIZE_PER_RANK * dp_size)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# -- buffers


@dataclass(eq=False)
class ParamAndGradBuffer:
    """The flat tensors of the parameters of one dtype."""

    names: list[str]
    parameters: list[nn.Parameter]
    layout: BucketLayout
    grad_data: Tensor
    param_data: Tensor | None
    model_indices: list[int]

    def grad_view(self, index: int) -> Tensor:
        """Return the gradient of parameter `index`: a view in its shape, in the dtype of `grad_data`."""
        start, end, _ = self.layout.param_ranges[index]
        return self.grad_data[start:end].view(self.parameters[index].shape)


def build_buffers(
    parameters: Mapping[str, nn.Parameter],
    config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    grad_dtype: torch.dtype | None = None,
) -> list[ParamAndGradBuffer]:
    """Build a buffer for each dtype of the trainable `parameters`, given by name in registration order.

    With the distributed optimizer, parameters move into their buffer and keep identity and values. Gradients are
    reduced in `grad_dtype`; None: the config's, or else the parameters' own.
    """
    if grad_dtype is None and config.grad_dtype is not None:
        grad_dtype = getattr(torch, config.grad_dtype)
    bucket_size = _choose_bucket_size(
        config, sum(parameter.numel() for parameter in parameters.values()), groups.num_ranks
    )
    by_dtype: dict[torch.dtype, list[tuple[int, str, nn.Parameter]]] = {}
    for index, (name, parameter) in enumerate(parameters.items()):
        by_dtype.setdefault(parameter.dtype, []).append((index, name, parameter))
    buffers = []
    for dtype, members in by_dtype.items():
        order, names, params = (list(column) for column in zip(*members, strict=True))
        layout = compute_bucket_layout(
            [parameter.numel() for parameter in params],
            bucket_size=bucket_size,
            dp_size=groups.size,
            use_distributed_optimizer=config.use_distributed_optimizer,
            # Set by code that ties parameters over pipeline stages.
            separate_params={i for i, parameter in enumerate(params) if getattr(parameter, "shared_embedding", False)},
            pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
        )
        gradients = torch.zeros(layout.numel, dtype=grad_dtype or dtype, device=params[0].device)
        values = _move_into_buffer(params, layout) if config.use_distributed_optimizer else None
        buffers.append(ParamAndGradBuffer(names, params, layout, gradients, values, order))
    return buffers


def _choose_bucket_size(config: DistributedDataParallelConfig, numel: int, ranks: int) -> int | None:
    if not config.overlap_grad_reduce:
        return None
    if config.num_buckets is None:
        return config.bucket_size or compute_default_bucket_size(ranks)
    if config.num_buckets > numel:
        raise ModelError(f"num_buckets={config.num_buckets}, but the model trains {numel} elements. Use fewer.")
    return numel // config.num_buckets


def _move_into_buffer(parameters: list[nn.Parameter], layout: BucketLayout) -> Tensor:
    values = torch.zeros(layout.numel, dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, (start, end, _) in zip(parameters, layout.param_ranges, strict=True):
        view = values[start:end].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return values


# -- buckets


@dataclass(eq=False)
class GradSlot:
    """The buffer views for the gradients of one parameter."""

    name: str
    parameter: nn.Parameter
    grad_view: Tensor
    accumulation: Tensor


@dataclass(eq=False)
class Bucket:
    """A bucket and its state in the current step; see [Note: when a bucket is ready]."""

    slots: list[GradSlot]
    reduction: BucketReduction
    param_gather: BucketAllGather | None = None
    num_grads: Counter[GradSlot] = field(default_factory=Counter)
    expected_num_grads: Counter[GradSlot] | None = None
    num_missing: int = 0
    is_dispatched: bool = False

    def begin_step(self) -> None:
        """Start a step. Waits for a collective in flight."""
        self.reduction.wait()
        self.is_dispatched = False
        self.num_grads.clear()
        self.num_missing = len(self.slots)

    def record_grad(self, slot: GradSlot) -> None:
        self.num_grads[slot] += 1
        if self.expected_num_grads is not None and self.num_grads[slot] == self.expected_num_grads[slot]:
            self.num_missing -= 1

    def finish_step(self) -> None:
        """End a step: wait for the collective, after which the buffer has the sums."""
        self.reduction.wait()
        if self.expected_num_grads is None and self.num_grads:
            self.expected_num_grads = Counter(self.num_grads)


def build_buckets(
    buffers: Sequence[ParamAndGradBuffer], config: DistributedDataParallelConfig, groups: DataParallelGroups
) -> list[Bucket]:
    """Build the buckets of all buffers, in the order in which backward is expected to complete them."""
    buckets: list[tuple[int, Bucket]] = []
    for buffer in buffers:
        slots = [_build_slot(buffer, index, config) for index in range(len(buffer.parameters))]
        for (start, end), members in zip(buffer.layout.buckets, buffer.layout.param_indices, strict=True):
            reduction = BucketReduction(
                buffer.grad_data[start:end],
                groups,
                average=config.average_in_collective,
                scatter=config.use_distributed_optimizer,
                sum_in_fp32=config.reduce_scatter_with_fp32_accumulation,
            )
            gather = None if buffer.param_data is None else BucketAllGather(buffer.param_data[start:end], groups.shard)
            buckets.append((buffer.model_indices[members[0]], Bucket([slots[i] for i in members], reduction, gather)))
    return [bucket for _, bucket in sorted(buckets, key=lambda each: each[0], reverse=True)]


def _build_slot(buffer: ParamAndGradBuffer, index: int, config: DistributedDataParallelConfig) -> GradSlot:
    name, gradient = buffer.names[index], buffer.grad_view(index)
    patterns = config.param_name_patterns_for_fp32_local_accumulation
    accumulation = gradient
    if any(pattern == "all" or fnmatchcase(name, pattern) for pattern in patterns):
        accumulation = torch.zeros_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return GradSlot(name, buffer.parameters[index], gradient, accumulation)
