"""The engine `torch`: torch's DistributedDataParallel with hooks that sum; pipeline stages use their own engine.

torch's class does not support the order of forwards and backwards in a stage, so `PipelineStageEngine` reduces
gradients in buckets after the last backward. It does not overlap with backward; the bucketed engine does.
Source: Li et al. 2020, arXiv:2006.15704; torch.nn.parallel.DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.plugin import DataParallelManager, HighPrecisionAccumulator, Mesh, StrategyError

from ._compat import broadcast_buffers_kwargs
from .buckets import compute_bucket_layout
from .comm_hooks import build_compression_hook, build_high_precision_sum_hook, build_sum_hook
from .config import DDPConfig


class TorchEngine:
    """Wrap a full model in torch's DistributedDataParallel."""

    def __init__(self, model: nn.Module, config: DDPConfig, mesh: Mesh) -> None:
        self._model = model
        self._accumulator = (
            HighPrecisionAccumulator(getattr(torch, config.reduce_dtype)) if config.reduce_dtype else None
        )
        self._allows_unused_parameters = config.find_unused_parameters or config.static_graph
        group = mesh.group("dp_replicate")
        # Built first, since its options may be rejected. DDP averages by default; [Note: the gradient rule] needs sums.
        if config.comm_hook is not None:
            state, hook = build_compression_hook(config.comm_hook, config.comm_hook_options, group)
        else:
            state, hook = (
                None,
                build_sum_hook(group)
                if self._accumulator is None
                else build_high_precision_sum_hook(group, self._accumulator),
            )
        self.module = DistributedDataParallel(
            model,
            device_ids=None if mesh.device.type == "cpu" else [mesh.device.index],
            process_group=group,
            # `copy_from_first_rank` has made the replicas equal.
            init_sync=False,
            bucket_cap_mb=config.bucket_cap_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            find_unused_parameters=config.find_unused_parameters,
            static_graph=config.static_graph,
            **broadcast_buffers_kwargs(config.broadcast_buffers),
        )
        self.module.register_comm_hook(state, hook)

    def microbatch_context(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for one microbatch, whose backward reduces only if it is the last."""
        if is_last:
            return nullcontext()
        if self.module.static_graph:
            raise StrategyError(
                "static_graph=true does not go with several microbatches in a step: torch's DistributedDataParallel "
                "fails when the first backward is not followed by a reduction. Give one microbatch, or set "
                "static_graph=false."
            )
        return self.module.no_sync()

    def after_backward(self, *, is_last: bool) -> None:
        """Accumulate gradients in `reduce_dtype`; after the last microbatch, check for unused parameters."""
        if is_last and not self._allows_unused_parameters:
            # DDP has not reduced the bucket of a parameter without gradient, and the other ranks wait for it, so the
            # error cannot be raised on all ranks.
            unused = [name for name, p in self._model.named_parameters() if p.requires_grad and p.grad is None]
            if unused:
                raise StrategyError(
                    f"trainable parameters got no gradient in this step, among them {unused[0]}. "
                    f"Set find_unused_parameters=true, or freeze them."
                )
        # In the last microbatch, the hook adds the gradients to the pending sums.
        if self._accumulator is not None and not is_last:
            self._accumulator.accumulate(parameter for parameter in self._model.parameters() if parameter.requires_grad)


_DDP_WRAPPER_OPTIONS = (
    "gradient_as_bucket_view",
    "find_unused_parameters",
    "static_graph",
    "comm_hook",
    "broadcast_buffers",
)


class PipelineStageEngine:
    """Reduce the gradients of one pipeline stage."""

    def __init__(self, manager: DataParallelManager, config: DDPConfig) -> None:
        for name in _DDP_WRAPPER_OPTIONS:
            if name in config.non_default_options:
                raise StrategyError(
                    f"{name}={getattr(config, name)!r} acts within torch's DistributedDataParallel, which a "
                    f"pipeline does without. Leave it out, or set engine=bucketed."
                )
        self._manager = manager
        self._group = manager.mesh.group("dp_replicate")
        self._bucket_bytes = int(config.bucket_cap_mb * 2**20)
        self._accumulator = (
            HighPrecisionAccumulator(getattr(torch, config.reduce_dtype)) if config.reduce_dtype else None
        )

    def microbatch_context(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def after_backward(self, *, is_last: bool) -> None:
        if self._accumulator is not None:
            self._accumulator.accumulate(self._manager.iter_trainable())
        if is_last:
            self.reduce_gradients()

    def reduce_gradients(self) -> None:
        """Sum the step's gradients over ranks, in `reduce_dtype` or else the parameters' dtype. Collective."""
        self._manager.gradients.fill_missing()
        used = [parameter for parameter in self._manager.iter_trainable() if parameter.grad is not None]
        for bucket in self._split_into_buckets(used):
            self._all_reduce_bucket(bucket)

    def _split_into_buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, members_of_dtype in by_dtype.items():
            # The layout reverses them for backward, which has already ended here.
            members_of_dtype.reverse()
            layout = compute_bucket_layout(
                [parameter.numel() for parameter in members_of_dtype],
                bucket_size=-(-self._bucket_bytes // dtype.itemsize),
                dp_size=1,
                use_distributed_optimizer=False,
            )
            for members in layout.param_indices:
                yield [members_of_dtype[index] for index in reversed(members)]

    def _all_reduce_bucket(self, parameters: Sequence[nn.Parameter]) -> None:
        dtype = parameters[0].dtype if self._accumulator is None else self._accumulator.dtype
        totals = []
        for parameter in parameters:
            total = torch.zeros_like(parameter, dtype=dtype) if self._accumulator is not None else parameter.grad
            if total is None:
                raise StrategyError("a parameter without gradient cannot be summed.")
            if self._accumulator is not None:
                self._accumulator.add_pending(parameter, total)
            totals.append(total.flatten())
        flat = torch.cat(totals)
        dist.all_reduce(flat, group=self._group)
        for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = total.view_as(parameter).to(parameter.dtype)
