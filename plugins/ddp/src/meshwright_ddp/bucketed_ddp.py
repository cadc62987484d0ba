"""The bucketed data-parallel engine, modeled on Megatron-Core's DistributedDataParallel, for any model.

Gradients accumulate in flat buffers that are split into buckets. With `overlap_grad_reduce` a bucket is reduced as soon
as backward has produced all of its gradients.

[Note: delayed weights] With `delay_wgrad_compute` the backward of a microbatch does not compute weight gradients of
linear layers. They are computed when the next forward starts, on exit from `no_sync`, or in `finish_grad_sync`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.plugin import DeferredWeightGradients, GradientReport, Mesh, ModelError, check_reduce_dtype

from .buckets import build_buckets, build_buffers
from .collectives import ParamGatherScheduler, build_groups
from .config import DistributedDataParallelConfig
from .distributed_optimizer import OptimizerShardLayout
from .grad_sync import BucketGradSync


class BucketedDataParallel(nn.Module):
    """A model whose gradients are summed over `dp_replicate` in buckets.

    In a hand-written training loop, call: forward and backward (under `no_sync` for all microbatches except the last);
    `finish_grad_sync`, which sets the gradients; the optimizer's `step` and `zero_grad`. Gradients are summed, so
    divide each rank's loss by the token count of the global batch.

    With the distributed optimizer, parameters are views of `buffers`, and `shards` are what this rank's optimizer
    steps.

    Args:
        grad_dtype: dtype in which gradients are reduced. None: the config's, or else that of each parameter.
    """

    shards: OptimizerShardLayout | None = None

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig,
        mesh: Mesh,
        *,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config.check_not_delegated()
        check_reduce_dtype(module, config.reduce_dtype)
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        for name, parameter in parameters.items():
            if config.grad_reduce_in_fp32 and parameter.dtype == torch.float64:
                raise ModelError(
                    f"grad_reduce_in_fp32=true is coarser than the gradients of {name} ({parameter.dtype}). "
                    f"Set grad_reduce_in_fp32=false."
                )
        groups = build_groups(mesh, config.num_distributed_optimizer_instances)
        self.module = module
        self.config = config
        self.buffers = build_buffers(parameters, config, groups, grad_dtype)
        self.buckets = build_buckets(self.buffers, config, groups)
        forward = self.buckets[::-1]
        self.param_gather = ParamGatherScheduler(
            module,
            [bucket.param_gather for bucket in forward if bucket.param_gather is not None],
            {slot.parameter: index for index, bucket in enumerate(forward) for slot in bucket.slots},
            overlap=config.overlap_param_gather,
            align=config.align_param_gather,
        )
        if config.use_distributed_optimizer:
            self.shards = OptimizerShardLayout(self.buffers, groups)
        self._delayed_wgrads = DeferredWeightGradients()
        if config.delay_wgrad_compute:
            self._delayed_wgrads.collected = []
            self._delayed_wgrads.attach(module)
        self._grad_sync = BucketGradSync(self.buckets, config, mesh.world)
        self._world = mesh.world

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with unsharded parameters. Collective if they still have to be gathered."""
        self._compute_delayed_wgrads()
        self.param_gather.begin_step()
        result = self.module(*args, **kwargs)
        self.param_gather.after_forward()
        return result

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients within the context without reducing them; a later microbatch is the last."""
        self._compute_delayed_wgrads()
        with self._grad_sync.no_sync():
            yield
            self._compute_delayed_wgrads()

    def zero_grad_buffer(self) -> None:
        """Start a step and discard accumulated gradients, like the first gradient after `finish_grad_sync`."""
        if self.config.delay_wgrad_compute:
            self._delayed_wgrads.collected = []
        self._grad_sync.begin_step()

    def start_grad_sync(self) -> None:
        """Start the remaining reductions; all backwards of the step must have ended. Collective."""
        self._compute_delayed_wgrads()
        self._grad_sync.dispatch_all()

    def finish_grad_sync(self, *, force_all_reduce: bool = False, allow_unused: bool = False) -> None:
        """Finish the reduction, and set the gradients of the trained shards or parameters. Collective.

        Gradients are sums over `dp_replicate`, in the shape and dtype of the trained shard or parameter. A parameter
        that no rank has used in this step gets None. Does nothing if the step is already finished.

        Args:
            force_all_reduce: all-reduce full buckets to every rank, even with the distributed optimizer.
            allow_unused: parameters may have no gradient in this step, since backward is known to have ended.
        """
        report = self.finish_grad_reduction(force_all_reduce=force_all_reduce, allow_unused=allow_unused)
        if report is not None:
            report.finalize(self._world)

    def finish_grad_reduction(
        self, *, force_all_reduce: bool = False, allow_unused: bool = False
    ) -> GradientReport | None:
        """Do the part of `finish_grad_sync` before ranks exchange their reports; return None if the step is already
        finished.

        Parameters that no rank has used have zero gradients, and `check_for_nan_in_grad` does not raise yet.
        """
        self._compute_delayed_wgrads()
        if self._grad_sync.is_finished:
            return None
        self._grad_sync.finish(force_all_reduce=force_all_reduce, allow_unused=allow_unused)
        if self.shards is not None:
            for shard in self.shards:
                shard.set_gradient()
            return self._grad_sync.build_report(self.shards.find_optimizer_parameter)
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.grad = slot.grad_view.to(slot.parameter.dtype)
        return self._grad_sync.build_report(lambda parameter: parameter)

    def after_optimizer_step(self) -> None:
        """Distribute the new values to all ranks after the distributed optimizer's step. Collective."""
        if self.shards is not None:
            self.shards.copy_masters_to_model()
            self.param_gather.mark_stale()

    def _compute_delayed_wgrads(self) -> None:
        if self._delayed_wgrads.collected:
            collected, self._delayed_wgrads.collected = self._delayed_wgrads.collected, []
            for work in collected:
                work()
