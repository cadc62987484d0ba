"""The collectives of the bucketed engine: sum one bucket of gradients over ranks, gather updated parameters.

[Note: sharding group] The sharding group is the W ranks that share the optimizer's state: all data-parallel ranks, or
those of one instance of the distributed optimizer. With several instances, what a rank owns is reduced within its
instance first, then over the ranks that own the same part in the others.

[Note: order of gathers] Ranks may call modules in different orders (experts chosen by the data), but must issue the
same collectives in the same order. So gathers start in the order of forward, and what no module has asked for is
gathered at the end of forward. A module's forward pre-hook waits for the buckets of its own parameters. For modules
that are never called, the nearest enclosing module that is called waits; the first forward shows which that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.plugin import ROOT_AXES, Mesh, MeshError, all_gather_single, reduce_scatter_single


@dataclass(frozen=True)
class DataParallelGroups:
    """The ranks over which gradients are summed: the sharding group, and the owners of the same part elsewhere."""

    shard: dist.ProcessGroup
    across: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.shard)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.shard)

    @property
    def ranks(self) -> int:
        """All ranks over which gradients are summed."""
        return self.size * (dist.get_world_size(self.across) if self.across is not None else 1)


def build_groups(mesh: Mesh, num_instances: int) -> DataParallelGroups:
    """Divide the ranks of `dp_replicate` into instances of neighbouring ranks. Collective."""
    ranks = mesh.degrees.dp_replicate
    if ranks % num_instances:
        raise MeshError(
            f"num_distributed_optimizer_instances={num_instances} does not divide the {ranks} ranks of dp_replicate. "
            f"Use a divisor."
        )
    if num_instances == 1:
        return DataParallelGroups(mesh.group("dp_replicate"))
    every = mesh.device_mesh.mesh.transpose(0, ROOT_AXES.index("dp_replicate"))
    divided = DeviceMesh(
        mesh.device.type,
        every.reshape(num_instances, ranks // num_instances, -1),
        mesh_dim_names=("instance", "shard", "others"),
    )
    return DataParallelGroups(divided["shard"].get_group(), divided["instance"].get_group())


class BucketReduction:
    """Reduces one bucket of gradients, 1-D, in place.

    With `average` the collective averages; gradients stay sums, since they are multiplied by the ranks before. With
    `scatter`, only the part that this rank owns holds the result. `sum_in_fp32` sends parts to their owners as they are and
    sums them there in float32 at least.
    """

    def __init__(
        self,
        gradients: Tensor,
        groups: DataParallelGroups,
        *,
        average: bool = False,
        scatter: bool = False,
        sum_in_fp32: bool = False,
    ) -> None:
        self.gradients = gradients
        self.averages = average
        self._op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._groups = groups
        self._scatter = scatter
        self._wide = sum_in_fp32
        size = gradients.numel() // groups.size if scatter else gradients.numel()
        rank = groups.rank if scatter else 0
        self._own = gradients[rank * size : (rank + 1) * size]
        self._result = self._own
        self._received: Tensor | None = None
        self._work: Any = None
        # Runs both collectives of [Note: sharding group], so that the compute stream need not wait between them.
        is_cuda = gradients.device.type == "cuda"
        self._side = torch.cuda.Stream() if groups.across is not None and is_cuda else None
        self._has_proceeded = False

    def start(self, *, force_all_reduce: bool = False) -> None:
        """Issue the collective; the bucket must not be touched until `wait`. `force_all_reduce` overrules `scatter`."""
        if self.averages and self._groups.ranks > 1:
            self.gradients.mul_(self._groups.ranks)
        self._has_proceeded = False
        if self._side is None:
            self._issue(force_all_reduce)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._issue(force_all_reduce)
            self.proceed()

    def proceed(self) -> None:
        """Wait for the first collective and issue the one over instances, if there are several."""
        if self._work is None or self._has_proceeded:
            return
        self._has_proceeded = True
        self._work.wait()
        if self._received is not None:
            wide = torch.promote_types(self._own.dtype, torch.float32)
            self._own.copy_(self._received.view(self._groups.size, -1).sum(0, dtype=wide))
            self._received = None
        if self._groups.across is not None:
            self._work = dist.all_reduce(self._result, op=self._op, group=self._groups.across, async_op=True)

    def wait(self) -> None:
        """Wait until the result can be used (on CUDA: by what is queued from now on)."""
        self.proceed()
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _issue(self, force_all_reduce: bool) -> None:
        group = self._groups.shard
        self._result = self._own
        if force_all_reduce or not self._scatter:
            self._result = self.gradients
            self._work = dist.all_reduce(self.gradients, op=self._op, group=group, async_op=True)
        elif self._wide:
            self._received = torch.empty_like(self.gradients)
            self._work = dist.all_to_all_single(self._received, self.gradients, group=group, async_op=True)
        else:
            self._work = reduce_scatter_single(self._own, self.gradients, op=self._op, group=group, async_op=True)


class BucketAllGather:
    """Fills one bucket of parameter values from its owners, in place; each rank has updated its own part."""

    def __init__(self, values: Tensor, group: dist.ProcessGroup) -> None:
        size = values.numel() // dist.get_world_size(group)
        self._values = values
        self._own = values.narrow(0, dist.get_rank(group) * size, size)
        self._group = group
        self._work: Any = None
        self.is_stale = False

    def start(self) -> None:
        if self.is_stale and self._work is None:
            self._work = all_gather_single(self._values, self._own, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for a collective that is under way (on CUDA: on the current stream)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.is_stale = False


class ParamGatherScheduler:
    """Gathers all buckets of a model, in the given order; see [Note: order of gathers].

    `overlap`: gather in forward, each bucket while modules of the one before run; else right after each update.
    `align`: start all gathers together when a step begins, before a pipeline stage has its first microbatch.
    """

    def __init__(
        self,
        model: nn.Module,
        gathers: Sequence[BucketAllGather],
        bucket_by_parameter: Mapping[nn.Parameter, int],
        *,
        overlap: bool,
        align: bool,
    ) -> None:
        self._model = model
        self._gathers = gathers
        self._overlap = overlap
        self._align = align
        self._needs: dict[nn.Module, set[int]] = {}
        self._called: set[nn.Module] = set()
        self._is_learning = True
        self._started = len(gathers)
        if overlap:
            for module in model.modules():
                own = module.parameters(recurse=False)
                self._needs[module] = {
                    bucket_by_parameter[parameter] for parameter in own if parameter in bucket_by_parameter
                }
                module.register_forward_pre_hook(self._before)

    def parameters_changed(self) -> None:
        """Mark all buckets stale: each rank has updated what it owns."""
        for gather in self._gathers:
            # Under way where the last forward was left by an error.
            gather.wait()
            gather.is_stale = True
        self._started = 0
        if not self._overlap:
            self.gather_all()

    def gather_all(self) -> None:
        self._start(len(self._gathers))
        for gather in self._gathers:
            gather.wait()

    def begin(self) -> None:
        if self._align:
            self._start(len(self._gathers))

    def after_forward(self) -> None:
        self.gather_all()
        if self._overlap and self._is_learning:
            self._is_learning = False
            self._learn(self._model, self._model, frozenset())
            self._called.clear()

    def _before(self, module: nn.Module, args: Any) -> None:
        if self._is_learning:
            self._called.add(module)
        for index in sorted(self._needs[module]):
            if self._gathers[index].is_stale:
                self._start(index + 1)
                self._gathers[index].wait()
                # The next one travels while this module and its neighbours run.
                self._start(index + 2)

    def _start(self, count: int) -> None:
        while self._started < min(count, len(self._gathers)):
            self._gathers[self._started].start()
            self._started += 1

    def _learn(self, module: nn.Module, nearest: nn.Module, seen: frozenset[nn.Module]) -> None:
        if module in self._called:
            nearest = module
        else:
            self._needs[nearest] |= self._needs[module]
        for child in module.children():
            if child not in seen:
                self._learn(child, nearest, seen | {module})
