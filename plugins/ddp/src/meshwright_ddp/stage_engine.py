"""The engine `torch` for one stage of a pipeline, which does without torch's DistributedDataParallel.

torch's class does not know the order in which a stage's forwards and backwards follow, so gradients are summed in
buckets after the last backward. Nothing overlaps with backward here; with the bucketed engine it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from meshwright.plugin import DataParallelManager, StrategyError, WideSums

from .buckets import bucket_layout
from .config import DDPConfig

_FOR_TORCH_ALONE = (
    "gradient_as_bucket_view",
    "find_unused_parameters",
    "static_graph",
    "comm_hook",
    "broadcast_buffers",
)


class StageEngine:
    """Sums the gradients of one stage.

    Raises:
        StrategyError: an option that acts within torch's engine alone.
    """

    def __init__(self, manager: DataParallelManager, config: DDPConfig) -> None:
        for name in _FOR_TORCH_ALONE:
            if name in config.changed:
                raise StrategyError(
                    f"{name}={getattr(config, name)!r} acts within torch's DistributedDataParallel, which a "
                    f"pipeline does without. Leave it out, or set engine=bucketed."
                )
        self._manager = manager
        self._group = manager.mesh.group("dp_replicate")
        self._bucket_bytes = int(config.bucket_cap_mb * 2**20)
        self._sums = WideSums(getattr(torch, config.reduce_dtype)) if config.reduce_dtype else None

    def sync_gradients(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return a context for a backward, which reduces nothing."""
        return nullcontext()

    def after_backward(self, *, is_last: bool) -> None:
        """Keep a microbatch's gradients, and reduce after the last."""
        if self._sums is not None:
            self._sums.take(self._manager.trainable())
        if is_last:
            self.reduce()

    def reduce(self) -> None:
        """Sum the step's gradients over ranks, in `reduce_dtype` or else the parameters' dtype. Collective."""
        self._manager.gradients.fill_missing()
        used = [parameter for parameter in self._manager.trainable() if parameter.grad is not None]
        for bucket in self._buckets(used):
            self._sum(bucket)

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for dtype, own in by_dtype.items():
            # The layout reverses them for backward, which has ended here.
            own.reverse()
            layout = bucket_layout(
                [parameter.numel() for parameter in own],
                bucket_size=-(-self._bucket_bytes // dtype.itemsize),
                dp_size=1,
                distributed_optimizer=False,
            )
            for members in layout.members:
                yield [own[index] for index in reversed(members)]

    def _sum(self, parameters: Sequence[nn.Parameter]) -> None:
        dtype = parameters[0].dtype if self._sums is None else self._sums.dtype
        totals = []
        for parameter in parameters:
            total = torch.zeros_like(parameter, dtype=dtype) if self._sums is not None else parameter.grad
            if total is None:
                raise StrategyError("a parameter without gradient cannot be summed.")
            if self._sums is not None:
                self._sums.add_waiting(parameter, total)
            totals.append(total.flatten())
        flat = torch.cat(totals)
        dist.all_reduce(flat, group=self._group)
        for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = total.view_as(parameter).to(parameter.dtype)
