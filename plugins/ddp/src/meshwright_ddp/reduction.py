"""The collective that sums one bucket of gradients over ranks.

[Note: sharding group] The sharding group is the W ranks that share the optimizer's state: all data-parallel ranks, or
those of one instance of the distributed optimizer. With several instances, what a rank owns is reduced within its
instance first, then over the ranks that own the same part in the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.plugin import ROOT_AXES, Mesh, MeshError, reduce_scatter_single


@dataclass(frozen=True)
class Groups:
    """The ranks over which gradients are summed; see [Note: sharding group].

    Attributes:
        shard: the sharding group.
        across: the ranks that own the same part in other instances; None with one instance.
    """

    shard: dist.ProcessGroup
    across: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This rank's place in the sharding group."""
        return dist.get_rank(self.shard)

    @property
    def size(self) -> int:
        """W, the ranks that share a bucket."""
        return dist.get_world_size(self.shard)

    @property
    def ranks(self) -> int:
        """All ranks over which gradients are summed."""
        return self.size * (dist.get_world_size(self.across) if self.across is not None else 1)


def make_groups(mesh: Mesh, instances: int) -> Groups:
    """Divide the ranks of `dp_replicate` into instances of neighbouring ranks. Collective.

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
    every = mesh.device_mesh.mesh.transpose(0, ROOT_AXES.index("dp_replicate"))
    divided = DeviceMesh(
        mesh.device.type,
        every.reshape(instances, ranks // instances, -1),
        mesh_dim_names=("instance", "shard", "others"),
    )
    return Groups(divided["shard"].get_group(), divided["instance"].get_group())


class Reduction:
    """Reduces one bucket.

    Args:
        gradients: the bucket, 1-D, in place; with `scatter` only the part that this rank owns holds the result.
        groups: over which ranks.
        average: let the collective average; gradients stay sums, since they are multiplied by the ranks before.
        scatter: reduce to owned parts (W divides the bucket), not to everything on every rank.
        wide: send parts to their owners as they are and sum them there in float32 at least.
    """

    def __init__(
        self,
        gradients: Tensor,
        groups: Groups,
        *,
        average: bool = False,
        scatter: bool = False,
        wide: bool = False,
    ) -> None:
        self.gradients = gradients
        self.averages = average
        self._op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        self._groups = groups
        self._scatter = scatter
        self._wide = wide
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
        """Issue the collective; the bucket must not be touched until `wait`.

        Args:
            force_all_reduce: reduce the whole bucket to every rank of the sharding group also with `scatter`.
        """
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
