"""The collectives of the bucketed engine: reduce one bucket of gradients, gather updated parameters.

[Note: sharding group] The sharding group is the W ranks that shard the optimizer state: all data-parallel ranks, or
those of one instance of the distributed optimizer. With several instances, a rank's shard is reduced within its
instance first, then over the ranks that own the same shard in the other instances.

[Note: order of gathers] Ranks may call modules in different orders (experts chosen by the data), but must issue the
same collectives in the same order. So gathers start in forward order, and buckets that no module has requested are
gathered at the end of forward. A module's forward pre-hook waits for the buckets of its own parameters. For modules
that are never called, the nearest enclosing module that is called waits; the first forward determines it.
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
    """The ranks over which gradients are summed: the sharding group, and the owners of the same shard elsewhere."""

    shard: dist.ProcessGroup
    inter_instance: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.shard)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.shard)

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which gradients are summed."""
        return self.size * (dist.get_world_size(self.inter_instance) if self.inter_instance is not None else 1)


def build_groups(mesh: Mesh, num_instances: int) -> DataParallelGroups:
    """Split the ranks of `dp_replicate` into instances of neighboring ranks. Collective."""
    ranks = mesh.degrees.dp_replicate
    if ranks % num_instances:
        raise MeshError(
            f"num_distributed_optimizer_instances={num_instances} does not divide the {ranks} ranks of dp_replicate. "
            f"Use a divisor."
        )
    if num_instances == 1:
        return DataParallelGroups(mesh.group("dp_replicate"))
    ranks_by_replica = mesh.device_mesh.mesh.transpose(0, ROOT_AXES.index("dp_replicate"))
    instance_mesh = DeviceMesh(
        mesh.device.type,
        ranks_by_replica.reshape(num_instances, ranks // num_instances, -1),
        mesh_dim_names=("instance", "shard", "others"),
    )
    return DataParallelGroups(instance_mesh["shard"].get_group(), instance_mesh["instance"].get_group())


class BucketReduction:
    """Reduce one bucket of gradients, 1-D, in place.

    Args:
        average: use an averaging collective. Gradients stay sums, since they are multiplied by the number of ranks
            first.
        scatter: reduce-scatter, so that only this rank's shard of the bucket has the result.
        sum_in_fp32: send shards to their owners unreduced, and sum them there in at least float32.
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
        self.is_averaging = average
        self._op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._groups = groups
        self._reduce_scatters = scatter
        self._sums_in_fp32 = sum_in_fp32
        size = gradients.numel() // groups.size if scatter else gradients.numel()
        rank = groups.rank if scatter else 0
        self._local_shard = gradients[rank * size : (rank + 1) * size]
        self._result = self._local_shard
        self._recv_buffer: Tensor | None = None
        self._work: Any = None
        # Runs both collectives of [Note: sharding group], so that the compute stream does not wait between them.
        is_cuda = gradients.device.type == "cuda"
        self._side_stream = torch.cuda.Stream() if groups.inter_instance is not None and is_cuda else None
        self._has_started_inter_instance = False

    def start(self, *, force_all_reduce: bool = False) -> None:
        """Issue the collective. Do not touch the bucket until `wait`. `force_all_reduce` overrides `scatter`."""
        if self.is_averaging and self._groups.num_ranks > 1:
            self.gradients.mul_(self._groups.num_ranks)
        self._has_started_inter_instance = False
        if self._side_stream is None:
            self._issue(force_all_reduce)
            return
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            self._issue(force_all_reduce)
            self.start_inter_instance()

    def start_inter_instance(self) -> None:
        """Wait for the first collective and issue the one over instances, if there are several."""
        if self._work is None or self._has_started_inter_instance:
            return
        self._has_started_inter_instance = True
        self._work.wait()
        if self._recv_buffer is not None:
            dtype = torch.promote_types(self._local_shard.dtype, torch.float32)
            self._local_shard.copy_(self._recv_buffer.view(self._groups.size, -1).sum(0, dtype=dtype))
            self._recv_buffer = None
        if self._groups.inter_instance is not None:
            self._work = dist.all_reduce(self._result, op=self._op, group=self._groups.inter_instance, async_op=True)

    def wait(self) -> None:
        """Wait until the result can be used (on CUDA: by work queued after this call)."""
        self.start_inter_instance()
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _issue(self, force_all_reduce: bool) -> None:
        group = self._groups.shard
        self._result = self._local_shard
        if force_all_reduce or not self._reduce_scatters:
            self._result = self.gradients
            self._work = dist.all_reduce(self.gradients, op=self._op, group=group, async_op=True)
        elif self._sums_in_fp32:
            self._recv_buffer = torch.empty_like(self.gradients)
            self._work = dist.all_to_all_single(self._recv_buffer, self.gradients, group=group, async_op=True)
        else:
            self._work = reduce_scatter_single(
                self._local_shard, self.gradients, op=self._op, group=group, async_op=True
            )


class BucketAllGather:
    """Gather one bucket of parameters in place, after each rank has updated its own shard."""

    def __init__(self, values: Tensor, group: dist.ProcessGroup) -> None:
        size = values.numel() // dist.get_world_size(group)
        self._param_data = values
        self._local_shard = values.narrow(0, dist.get_rank(group) * size, size)
        self._group = group
        self._work: Any = None
        self.is_stale = False

    def start(self) -> None:
        if self.is_stale and self._work is None:
            self._work = all_gather_single(self._param_data, self._local_shard, group=self._group, async_op=True)

    def wait(self) -> None:
        """Wait for a collective in flight (on CUDA: on the current stream)."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self.is_stale = False


class ParamGatherScheduler:
    """Gather all buckets of a model in the given order; see [Note: order of gathers].

    Args:
        overlap: gather during forward, each bucket while modules of the previous one run. False: right after each
            update.
        align: start all gathers together at the start of a step, before a pipeline stage gets its first microbatch.
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
        self._bucket_gathers = gathers
        self._overlap = overlap
        self._align = align
        self._buckets_by_module: dict[nn.Module, set[int]] = {}
        self._called_modules: set[nn.Module] = set()
        self._is_recording_calls = True
        self._num_started = len(gathers)
        if overlap:
            for module in model.modules():
                own = module.parameters(recurse=False)
                self._buckets_by_module[module] = {
                    bucket_by_parameter[parameter] for parameter in own if parameter in bucket_by_parameter
                }
                module.register_forward_pre_hook(self._forward_pre_hook)

    def mark_stale(self) -> None:
        """Mark all buckets stale, after each rank has updated its own shards."""
        for gather in self._bucket_gathers:
            # A gather is still in flight if the last forward exited with an error.
            gather.wait()
            gather.is_stale = True
        self._num_started = 0
        if not self._overlap:
            self.gather_all()

    def gather_all(self) -> None:
        self._start_up_to(len(self._bucket_gathers))
        for gather in self._bucket_gathers:
            gather.wait()

    def begin_step(self) -> None:
        if self._align:
            self._start_up_to(len(self._bucket_gathers))

    def after_forward(self) -> None:
        self.gather_all()
        if self._overlap and self._is_recording_calls:
            self._is_recording_calls = False
            self._assign_uncalled_modules(self._model, self._model, frozenset())
            self._called_modules.clear()

    def _forward_pre_hook(self, module: nn.Module, args: Any) -> None:
        if self._is_recording_calls:
            self._called_modules.add(module)
        for index in sorted(self._buckets_by_module[module]):
            if self._bucket_gathers[index].is_stale:
                self._start_up_to(index + 1)
                self._bucket_gathers[index].wait()
                # The next bucket is transferred while this module and its neighbors run.
                self._start_up_to(index + 2)

    def _start_up_to(self, count: int) -> None:
        while self._num_started < min(count, len(self._bucket_gathers)):
            self._bucket_gathers[self._num_started].start()
            self._num_started += 1

    def _assign_uncalled_modules(self, module: nn.Module, nearest: nn.Module, seen: frozenset[nn.Module]) -> None:
        if module in self._called_modules:
            nearest = module
        else:
            self._buckets_by_module[nearest] |= self._buckets_by_module[module]
        for child in module.children():
            if child not in seen:
                self._assign_uncalled_modules(child, nearest, seen | {module})
