"""Replicate the model and sum gradients with torch's DistributedDataParallel.

Source: Li et al. 2020, arXiv:2006.15704; torch.nn.parallel.DistributedDataParallel and its communication hooks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.accumulate import WideSums
from meshwright.data_parallel import DataParallelManager
from meshwright.errors import StrategyError
from meshwright.mesh import Mesh

from .config import DDPConfig
from .hooks import sum_hook, wide_sum_hook


class DDPManager(DataParallelManager):
    """Replicated data parallelism; see `DataParallelManager`."""

    config: DDPConfig

    def __init__(self, config: DDPConfig, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._sums = WideSums(getattr(torch, config.reduce_dtype)) if config.reduce_dtype else None

    def shard(self, model: nn.Module) -> nn.Module:
        device = self.mesh.device
        group = self.mesh.group("dp_replicate")
        wrapped = DistributedDataParallel(
            model.to(device),
            device_ids=None if device.type == "cpu" else [device.index],
            process_group=group,
            # `copy_from_first_rank` has made the copies equal.
            init_sync=False,
            bucket_cap_mb=self.config.bucket_cap_mb,
            gradient_as_bucket_view=self.config.gradient_as_bucket_view,
            find_unused_parameters=self.config.find_unused_parameters,
        )
        # DDP averages by default; [Note: the gradient rule] wants the sum.
        hook = sum_hook(group) if self._sums is None else wide_sum_hook(group, self._sums)
        wrapped.register_comm_hook(None, hook)
        self._wrapped = wrapped
        return wrapped

    def sync_gradients(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self._wrapped.no_sync()

    def _check_all_used(self) -> None:
        # Without a gradient, DDP would not have reduced the parameter's bucket, and peers would wait for it: this
        # cannot be told on all ranks first.
        unused = [name for name, p in self.model.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise StrategyError(
                f"trainable parameters got no gradient in this step, among them {unused[0]}. "
                f"Set find_unused_parameters=true, or freeze them."
            )

    def after_backward(self, *, is_last: bool) -> None:
        if is_last and not self.config.find_unused_parameters:
            self._check_all_used()
        # The last microbatch's gradients join the waiting sums in the hook.
        if self._sums is not None and not is_last:
            self._sums.take(self.trainable())
