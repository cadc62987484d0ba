"""Our own data-parallel engine, after Megatron-Core's DistributedDataParallel, for any model.

Gradients accumulate in flat buffers, cut into buckets. With `overlap_grad_reduce` a bucket is reduced as soon as
backward has yielded all of its gradients.

[Note: when a bucket is ready] The first step only counts how often each parameter gets a gradient in the last
microbatch. From the second on, a bucket is dispatched when all its parameters have been counted as often, and at the
end of the step otherwise. A parameter without a gradient in the first step may get one later, so its bucket waits for
the end of each.

[Note: delayed weights] With `delay_wgrad_compute` the backward of a microbatch computes no gradients of the weights of
linear layers. They follow when the next forward begins, when `no_sync` is left, or with `finish_grad_sync`.

[Note: order of reductions] Ranks may use different parameters (experts chosen by the data), but must issue the same
collectives in the same order; so a bucket waits for those before it, as in torch's DDP.
Source: the semantics of Megatron-Core's DistributedDataParallel; Li et al. 2020, arXiv:2006.15704, for the order.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.base.errors import MeshError, MeshwrightError, ModelError, StrategyError
from meshwright.manager.start import check_reduce_dtype
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.sizes import ROOT_AXES
from meshwright.model.weight_gradients import WeightGradients

from .bucket_ranges import default_bucket_size
from .buffers import BucketSizes, Buffer, make_buffers
from .config import DistributedDataParallelConfig
from .gradient_checks import GradientChecks
from .optimizer import Shards
from .parameter_gather import BucketGather, ParameterGather
from .reduction import Groups, Reduction, Scaling


@dataclass(eq=False)
class Slot:
    """Where a parameter's gradient goes: `gradient` is its place in the buffer, `local` where microbatches add up."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor
    local: Tensor


@dataclass(eq=False)
class Bucket:
    """See [Note: bucket] in `layout`.

    Attributes:
        slots: in registration order.
        reduction: its collective.
        counts: how often each parameter got a gradient in this step's last microbatch.
        reference: the counts of the first step; None during it.
        missing: parameters whose counts have not reached the reference.
    """

    slots: list[Slot]
    reduction: Reduction
    counts: Counter[Slot] = field(default_factory=Counter)
    reference: Counter[Slot] | None = None
    missing: int = 0
    is_dispatched: bool = False

    def begin(self) -> None:
        """Begin a step."""
        self.reduction.wait()
        self.is_dispatched = False
        self.counts.clear()
        self.missing = len(self.slots)

    def count(self, slot: Slot) -> None:
        self.counts[slot] += 1
        if self.reference is not None and self.counts[slot] == self.reference[slot]:
            self.missing -= 1

    @property
    def is_ready(self) -> bool:
        """See [Note: when a bucket is ready]."""
        return self.missing == 0


class BucketedDataParallel(nn.Module):
    """A model whose gradients are summed over `dp_replicate` in buckets.

    In a loop of your own: forward and backward (under `no_sync` for all microbatches but the last), `finish_grad_sync`,
    which sets the gradients, the optimizer's step and its `zero_grad`. Divide each rank's loss by the tokens of the
    global batch: gradients are summed.

    Args:
        module: on the mesh's device, equal on all ranks.
        config: options; see `DistributedDataParallelConfig`.
        gradient_dtype: in which gradients accumulate and are reduced; None: what the config says.

    Attributes:
        shards: what this rank's optimizer steps; None without the distributed optimizer.

    Raises:
        StrategyError, MeshError, ModelError: on all ranks alike, before the model is touched.
    """

    shards: Shards | None = None

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig,
        mesh: Mesh,
        *,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config.check_not_handed_over()
        check_reduce_dtype(module, config.reduce_dtype)
        self.config = config
        self._mesh = mesh
        if gradient_dtype is None and config.gradient_dtype is not None:
            gradient_dtype = getattr(torch, config.gradient_dtype)
        ranks = mesh.degrees.dp_replicate
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        check_gradient_dtype(parameters, config)
        groups = make_groups(mesh, config.num_distributed_optimizer_instances)
        self.module = module
        # [Note: the gradient rule] wants sums, so an average in the collective is made up for before.
        self._scaling = Scaling(ranks, average=True) if config.average_in_collective else Scaling()
        sizes = BucketSizes(
            bucket_size=bucket_size(config, sum(p.numel() for p in parameters.values()), ranks),
            dp_size=groups.size,
            distributed_optimizer=config.use_distributed_optimizer,
            pad_for_high_busbw=config.pad_buckets_for_high_nccl_busbw,
        )
        self.buffers = make_buffers(parameters, sizes, gradient_dtype)
        self._checks = GradientChecks(nonfinite=config.check_for_nan_in_grad, large=config.check_for_large_grads)
        self._make_buckets(groups)
        if config.use_distributed_optimizer:
            self.shards = Shards(self.buffers, groups)
        self._delayed = WeightGradients()
        if config.delay_wgrad_compute:
            self._delayed.watch(module)
        self._is_last = True
        self.zero_grad_buffer()
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(_hook(self, bucket, slot))

    def _make_buckets(self, groups: Groups) -> None:
        found: list[tuple[int, Bucket, BucketGather | None]] = []
        for buffer in self.buffers:
            slots = [self._slot(buffer, index) for index in range(len(buffer.parameters))]
            for number, (start, end) in enumerate(buffer.layout.buckets):
                members = [i for i, (_, _, bucket) in enumerate(buffer.layout.param_ranges) if bucket == number]
                reduction = Reduction(
                    buffer.gradients[start:end],
                    groups,
                    self._scaling,
                    scatter=self.config.use_distributed_optimizer,
                    wide=self.config.reduce_scatter_with_fp32_accumulation,
                )
                gather = None if buffer.values is None else BucketGather(buffer.values[start:end], groups.shard)
                found.append((buffer.first[members[0]], Bucket([slots[i] for i in members], reduction), gather))
        # Over all dtypes, in the order in which backward is expected to complete them.
        found.sort(key=lambda each: each[0], reverse=True)
        self.buckets = [bucket for _, bucket, _ in found]
        forward = self.buckets[::-1]
        self.gather = ParameterGather(
            self.module,
            [gather for _, _, gather in reversed(found) if gather is not None],
            {slot.parameter: index for index, bucket in enumerate(forward) for slot in bucket.slots},
            overlap=self.config.overlap_param_gather,
            align=self.config.align_param_gather,
        )

    def _slot(self, buffer: Buffer, index: int) -> Slot:
        name, gradient = buffer.names[index], buffer.gradient(index)
        patterns = self.config.param_name_patterns_for_fp32_local_accumulation
        local = gradient
        if any(pattern == "all" or fnmatchcase(name, pattern) for pattern in patterns):
            local = torch.zeros_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
        return Slot(name, buffer.parameters[index], gradient, local)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._compute_delayed()
        self.gather.begin()
        result = self.module(*args, **kwargs)
        self.gather.after_forward()
        return result

    # -- gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of what runs here accumulate; a later microbatch is the last."""
        self._compute_delayed()
        self._is_last = False
        try:
            yield
            self._compute_delayed()
        finally:
            self._is_last = True

    def zero_grad_buffer(self) -> None:
        """Begin a step: what the buffers hold is void, and nothing has been counted.

        A gradient that comes after `finish_grad_sync` begins one, too.
        """
        if self.config.delay_wgrad_compute:
            self._delayed.collected = []
        self._begin_step()

    def _begin_step(self) -> None:
        self._added: set[Slot] = set()
        self._next = 0
        self._defect: MeshwrightError | None = None
        self._is_finished = False
        for bucket in self.buckets:
            bucket.begin()

    def finish_grad_sync(self, *, force_all_reduce: bool = False, allow_unused: bool = False) -> None:
        """Reduce what has not been reduced, and set the gradients of what is trained: shards, or parameters.

        A parameter that no rank has used in this step gets None. Does nothing where the step is finished. Collective.

        Args:
            force_all_reduce: reduce whole buckets to every rank also with the distributed optimizer.
            allow_unused: parameters may have no gradient in this step, since backward is known to have ended.

        Raises:
            StrategyError: with overlap, a bucket is not ready (on all ranks).
            TrainingError: `check_for_nan_in_grad` has found something (on all ranks).
        """
        self._compute_delayed()
        if self._is_finished:
            return
        if self.config.overlap_grad_reduce and not allow_unused:
            self._mesh.world.raise_together(self._unfinished())
        while self._next < len(self.buckets):
            self._dispatch(force_all_reduce=force_all_reduce)
        used = self._settle()
        for bucket in self.buckets:
            bucket.reduction.proceed()
        for bucket in self.buckets:
            bucket.reduction.wait()
            if bucket.reference is None and bucket.counts:
                bucket.reference = Counter(bucket.counts)
        self._set_gradients(used)
        self._is_finished = True

    def take_gradient(self, bucket: Bucket, slot: Slot) -> None:
        """Add what backward has left in a parameter's `.grad`; dispatch buckets that are ready with it."""
        parameter = slot.parameter
        gradient = parameter.grad
        if gradient is None:
            return
        if self._is_finished:
            self._begin_step()
        # The first gradient of a step needs no zeros to be added to.
        if slot in self._added:
            slot.local.add_(gradient)
        else:
            slot.local.copy_(gradient)
            self._added.add(slot)
        parameter.grad = None
        if not (self._is_last and self.config.overlap_grad_reduce):
            return
        bucket.count(slot)
        if bucket.is_dispatched:
            self._defect = self._defect or StrategyError(
                f"{slot.name} got another gradient after its bucket had been reduced: it gets more of them than "
                f"in the first step. Set overlap_grad_reduce=false."
            )
        while self._next < len(self.buckets) and self.buckets[self._next].is_ready:
            self._dispatch()

    def _compute_delayed(self) -> None:
        """See [Note: delayed weights]."""
        if self._delayed.collected:
            collected, self._delayed.collected = self._delayed.collected, []
            for work in collected:
                work()

    def _dispatch(self, *, force_all_reduce: bool = False) -> None:
        """Issue the next bucket's collective; see [Note: order of reductions]."""
        bucket = self.buckets[self._next]
        if self.config.reduce_scatter_with_fp32_accumulation and self._next:
            # One bucket's pieces are held at a time.
            self.buckets[self._next - 1].reduction.wait()
        for slot in bucket.slots:
            if slot not in self._added:
                slot.gradient.zero_()
            elif slot.local is not slot.gradient:
                slot.gradient.copy_(slot.local)
        self._checks.look(self._next, [s.name for s in bucket.slots], [s.gradient for s in bucket.slots])
        bucket.reduction.start(force_all_reduce=force_all_reduce)
        bucket.is_dispatched = True
        self._next += 1

    def _unfinished(self) -> StrategyError | None:
        for index, bucket in enumerate(self.buckets):
            if bucket.reference is not None and not bucket.is_dispatched:
                ready = sum(bucket.counts[slot] > 0 for slot in bucket.slots)
                return StrategyError(
                    f"bucket {index} cannot be finished: {ready} of {len(bucket.slots)} parameters have their "
                    f"gradient. Call finish_grad_sync after the last microbatch's backward, outside of no_sync; with "
                    f"allow_unused=True if the others are unused in this step."
                )
        return None

    def _settle(self) -> list[int]:
        """Agree on which parameters were used, and raise what any rank has found wrong."""
        defect = self._defect or self._checks.verdict()
        flags = [int(slot in self._added) for bucket in self.buckets for slot in bucket.slots]
        *used, failed = self._mesh.world.reduce_ints([*flags, int(defect is not None)], dist.ReduceOp.MAX)
        if failed:
            self.zero_grad_buffer()
            self._mesh.world.raise_any(defect)
        return used

    def _set_gradients(self, used: list[int]) -> None:
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        is_used = {slot.parameter: bool(flag) for slot, flag in zip(slots, used, strict=True)}
        if self.shards is not None:
            for shard in self.shards:
                shard.set_gradient(is_used[shard.parameter])
            return
        for slot in slots:
            slot.parameter.grad = slot.gradient.to(slot.parameter.dtype) if is_used[slot.parameter] else None

    # -- parameters

    def shards_were_stepped(self) -> None:
        """After the optimizer's step with the distributed optimizer: let every rank have the new values. Collective."""
        if self.shards is not None:
            self.shards.write()
            self.gather.parameters_changed()


def _hook(engine: BucketedDataParallel, bucket: Bucket, slot: Slot) -> Callable[[nn.Parameter], None]:
    """What a parameter calls when it has got a gradient.

    It holds nothing alive: Python's garbage collector cannot see through a parameter's hooks, and the engine holds
    process groups.
    """
    engine_reference, bucket_reference, slot_reference = weakref.ref(engine), weakref.ref(bucket), weakref.ref(slot)

    def on_gradient(parameter: nn.Parameter) -> None:
        engine, bucket, slot = engine_reference(), bucket_reference(), slot_reference()
        if engine is not None and bucket is not None and slot is not None:
            engine.take_gradient(bucket, slot)

    return on_gradient


def make_groups(mesh: Mesh, instances: int) -> Groups:
    """The groups of [Note: sharding group] in `reduction`; neighbouring ranks form an instance. Collective.

    Raises:
        MeshError: the ranks cannot be divided so; on all ranks alike.
    """
    ranks = mesh.degrees.dp_replicate
    if ranks % instances:
        raise MeshError(
            f"num_distributed_optimizer_instances={instances} does not divide the {ranks} ranks of dp_replicate. "
            f"Use a divisor."
        )
    if instances == 1:
        return Groups(mesh.group("dp_replicate"))
    axis = ROOT_AXES.index("dp_replicate")
    every = mesh.device_mesh.mesh.transpose(0, axis)
    divided = DeviceMesh(
        mesh.device.type,
        every.reshape(instances, ranks // instances, -1),
        mesh_dim_names=("instance", "shard", "others"),
    )
    return Groups(divided["shard"].get_group(), divided["instance"].get_group())


def bucket_size(config: DistributedDataParallelConfig, numel: int, ranks: int) -> int | None:
    """Elements after which a bucket ends; None: it never does.

    Raises:
        ModelError: more buckets than elements; on all ranks alike.
    """
    if not config.overlap_grad_reduce:
        return None
    if config.num_buckets is None:
        return config.bucket_size or default_bucket_size(ranks)
    if config.num_buckets > numel:
        raise ModelError(f"num_buckets={config.num_buckets}, but the model trains {numel} elements. Use fewer.")
    return numel // config.num_buckets


def check_gradient_dtype(parameters: dict[str, nn.Parameter], config: DistributedDataParallelConfig) -> None:
    """Refuse sums that are coarser than what is summed.

    Raises:
        ModelError: on all ranks alike.
    """
    for name, parameter in parameters.items():
        if config.grad_reduce_in_fp32 and parameter.dtype == torch.float64:
            raise ModelError(
                f"grad_reduce_in_fp32=true is coarser than the gradients of {name} ({parameter.dtype}). "
                f"Set grad_reduce_in_fp32=false."
            )
