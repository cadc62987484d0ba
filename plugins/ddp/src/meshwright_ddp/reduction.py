"""The collective that sums one bucket of gradients over ranks.

When it begins is `gradient_sync`'s affair.

[Note: sharding group] The W ranks that share the optimizer's state are the sharding group: all data-parallel ranks, or
those of one instance of the distributed optimizer where there are several. Then each instance holds all of the state,
and what a rank owns is reduced within its instance first, then over the ranks that own the same in the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwright.base.errors import MeshError
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.sizes import ROOT_AXES
from meshwright.tensors.collectives import reduce_scatter_single


@dataclass(frozen=True)
class Groups:
    """The ranks over which gradients are summed; see [Note: sharding group].

    Attributes:
        shard: the sharding group.
        across: the ranks that own the same in other instances; None where there is one instance.
    """

    shard: dist.ProcessGroup
    across: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This rank's place among those that share a bucket."""
        return dist.get_rank(self.shard)

    @property
    def size(self) -> int:
        """W, the ranks that share a bucket."""
        return dist.get_world_size(self.shard)

    @property
    def ranks(self) -> int:
        """All ranks over which gradients are summed."""
        return self.size * (dist.get_world_size(self.across) if self.across is not None else 1)


@dataclass(frozen=True)
class Scaling:
    """What becomes of gradients beside their sum: multiplied by `factor` before, averaged by the collective or not."""

    factor: float = 1.0
    average: bool = False

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        """What the collective does: AVG or SUM."""
        return dist.ReduceOp.AVG if self.average else dist.ReduceOp.SUM


def make_groups(mesh: Mesh, instances: int) -> Groups:
    """The groups of [Note: sharding group]; neighbouring ranks form an instance. Collective.

    Args:
        mesh: whose axis `dp_replicate` has the ranks.
        instances: of the distributed optimizer; 1: all ranks are one.

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


class Reduction:
    """Reduces one bucket.

    Args:
        gradients: the bucket, 1-D, in place; with `scatter` only the part that this rank owns holds the result.
        groups: over which ranks.
        scaling: of the sum.
        scatter: reduce to owned parts (W divides the bucket), not to everything on every rank.
        wide: send parts to their owners as they are and sum them there in float32 at least.
    """

    def __init__(
        self, gradients: Tensor, groups: Groups, scaling: Scaling, *, scatter: bool = False, wide: bool = False
    ) -> None:
        self.gradients = gradients
        self._groups = groups
        self._scaling = scaling
        self._scatter = scatter
        self._wide = wide
        size = gradients.numel() // groups.size if scatter else gradients.numel()
        rank = groups.rank if scatter else 0
        self._own = gradients[rank * size : (rank + 1) * size]
        self._result = self._own
        self._received: Tensor | None = None
        self._work: Any = None
        # Carries both collectives of [Note: sharding group], so that the stream that computes need not wait between.
        is_cuda = gradients.device.type == "cuda"
        self._side = torch.cuda.Stream() if groups.across is not None and is_cuda else None
        self._has_proceeded = False

    def start(self, *, force_all_reduce: bool = False) -> None:
        """Scale, and issue the collective; the bucket must not be touched until `wait`.

        Args:
            force_all_reduce: reduce all of the bucket to every rank of the sharding group also with `scatter`.
        """
        if self._scaling.factor != 1.0:
            self.gradients.mul_(self._scaling.factor)
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
            self._work = dist.all_reduce(self._result, op=self._scaling.op, group=self._groups.across, async_op=True)

    def wait(self) -> None:
        """Until the result can be used (on CUDA: by what is queued from now on)."""
        self.proceed()
        if self._work is not None:
            self._work.wait()
            self._work = None

    def _issue(self, force_all_reduce: bool) -> None:
        group, op = self._groups.shard, self._scaling.op
        self._result = self._own
        if force_all_reduce or not self._scatter:
            self._result = self.gradients
            self._work = dist.all_reduce(self.gradients, op=op, group=group, async_op=True)
        elif self._wide:
            self._received = torch.empty_like(self.gradients)
            self._work = dist.all_to_all_single(self._received, self.gradients, group=group, async_op=True)
        else:
            self._work = reduce_scatter_single(self._own, self.gradients, op=op, group=group, async_op=True)
