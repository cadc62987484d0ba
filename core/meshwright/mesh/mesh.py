"""The mesh of all ranks, built from degrees or from a torch DeviceMesh.

Axes, views and degrees are defined in `meshwright.mesh.sizes`, [Note: axis, dim, degree].
Source: torch.distributed.device_mesh.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._compat.torch import flatten_mesh, slice_mesh
from ..base.errors import MeshError
from .sizes import CLAIMABLE_AXES, EXPERT_AXES, ROOT_AXES, STAGE_AXES, VIEWS, Degrees
from .world import World, get_existing_world, use_run_timeout


class Mesh:
    """All ranks of a world along named axes; MeshError if the degrees do not fill the world."""

    def __init__(self, degrees: Degrees, world: World) -> None:
        if degrees.world_size != world.size:
            raise MeshError(
                f"the mesh {degrees} has {degrees.world_size} ranks, but the world has {world.size}. "
                f"Use MeshSizes(...).resolve(world_size)."
            )
        self.degrees, self.world, self.device = degrees, world, world.device
        ranks = torch.arange(world.size)
        with use_run_timeout():
            self.device_mesh = DeviceMesh(
                self.device.type, ranks.view([getattr(degrees, axis) for axis in ROOT_AXES]), mesh_dim_names=ROOT_AXES
            )
            self._views: dict[str | tuple[str, ...], DeviceMesh] = {
                name: flatten_mesh(self.device_mesh, axes, name) for name, axes in VIEWS.items()
            }
        self._stage_mesh: Mesh | None = None
        self._axis_ranks = {axis: self.device_mesh.get_local_rank(axis) for axis in ROOT_AXES}
        if degrees.ep > 1:
            _ = self.expert_mesh

    def __repr__(self) -> str:
        return f"Mesh({self.degrees}, {self.world})"

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def backend(self) -> str:
        """Backend of the process group for tensors of the mesh's device, such as "gloo" or "nccl"."""
        # Example of a config: "cpu:gloo,cuda:nccl".
        pairs = str(dist.distributed_c10d.get_backend_config()).split(",")
        return dict(pair.split(":", 1) for pair in pairs).get(self.device.type, "none")

    def check_backend(self, requested: str) -> None:
        """Raise MeshError on all ranks if another backend is used; "nccl", the default in configs, accepts any."""
        if requested not in ("nccl", self.backend):
            raise MeshError(
                f"backend={requested!r}, but the process group uses {self.backend!r} for {self.device.type}. "
                f"Set backend={self.backend}, or start the process group with {requested!r}."
            )

    @functools.cached_property
    def expert_mesh(self) -> DeviceMesh:
        """The second mesh, with `EXPERT_AXES`. If `ep` is 1, it is built on first use, which is collective."""
        ranks = torch.arange(self.world.size).view([getattr(self.degrees, axis) for axis in EXPERT_AXES])
        with use_run_timeout():
            return DeviceMesh(self.device.type, ranks, mesh_dim_names=EXPERT_AXES)

    def check_expert_mesh(self, device_mesh: DeviceMesh) -> None:
        """Raise MeshError on all ranks if `device_mesh` is not the expert mesh; axes of one rank may be missing."""

        def describe(mesh: DeviceMesh) -> tuple[list[tuple[str, int]], list[int]]:
            sizes = zip(mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.mesh.shape, strict=True)
            return [(name, size) for name, size in sizes if size > 1], mesh.mesh.flatten().tolist()

        if describe(device_mesh) != describe(self.expert_mesh):
            raise MeshError(
                f"the given mesh for experts, {device_mesh}, is not the one that the sizes give: {self.expert_mesh}. "
                "Leave moe_mesh out, or give Mesh.expert_mesh."
            )

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return the submesh along axes, or along views such as `dp_cp`; MeshError for other names."""
        names = (axes,) if isinstance(axes, str) else axes
        for name in names:
            if name not in ROOT_AXES and name not in VIEWS:
                raise MeshError(
                    f"the mesh has no axis or view {name!r}. Axes: {', '.join(ROOT_AXES)}. Views: {', '.join(VIEWS)}."
                )
        if axes not in self._views:
            # Cached: torch takes half a millisecond for each slice.
            self._views[axes] = slice_mesh(self.device_mesh, axes)
        return self._views[axes]

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return this rank's process group along one axis or view."""
        return self[axis].get_group()

    def axis_rank(self, axis: str) -> int:
        """Return this rank's coordinate along one axis or view, starting at 0."""
        return self._axis_ranks[axis] if axis in self._axis_ranks else self[axis].get_local_rank()

    def get_stage_mesh(self) -> Mesh:
        """Return the mesh of this rank's pipeline stage, whose world is the stage's ranks. Collective on first use."""
        if self._stage_mesh is None:
            with use_run_timeout():
                group = flatten_mesh(self.device_mesh, STAGE_AXES, "stage").get_group()
            self._stage_mesh = copy.copy(self)
            self._stage_mesh.degrees = replace(self.degrees, pp=1)
            self._stage_mesh.world = type(self.world)(self.device, owns_group=False, group=group)
            self._stage_mesh.world.progress = self.world.progress
            self._stage_mesh._axis_ranks = {**self._axis_ranks, "pp": 0}
        return self._stage_mesh

    @property
    def data_size(self) -> int:
        """Number of different batches per step: the degree of `dp`."""
        return self.degrees.dp

    @property
    def data_rank(self) -> int:
        """Index of this rank's batch among `data_size` batches; equal for ranks that differ only in pp, cp or tp."""
        return self._axis_ranks["dp_replicate"] * self.degrees.dp_shard + self._axis_ranks["dp_shard"]

    @property
    def is_data_leader(self) -> bool:
        """Whether this rank is the first of the ranks that process its batch."""
        return all(self._axis_ranks[axis] == 0 for axis in ("pp", "cp", "tp"))


_AXIS_BY_DIM_NAME = {axis: axis for axis in ROOT_AXES} | {"dp": "dp_shard", "data_parallel": "dp_shard"}
_AXIS_BY_DIM_NAME |= {"pipeline_parallel": "pp", "context_parallel": "cp", "tensor_parallel": "tp"}


def from_device_mesh(mesh: Mesh | DeviceMesh, claims: Collection[str], moe_mesh: DeviceMesh | None = None) -> Mesh:
    """Return the Mesh with the degrees of a DeviceMesh; a Mesh is returned unchanged. Collective.

    Args:
        mesh: a Mesh, or a DeviceMesh of all ranks in order.
        claims: the axes that the strategy shards. Without `dp_shard`, the data-parallel ranks are replicas.
        moe_mesh: the expert mesh, whose axis `ep` gives the expert-parallel degree.

    Raises:
        MeshError: the mesh has unknown or unclaimed axes, or not all ranks in order.
    """
    degrees = infer_degrees(mesh, moe_mesh)
    if not isinstance(mesh, Mesh) and "dp_shard" not in claims and "dp_replicate" in claims:
        degrees = replace(degrees, dp_replicate=degrees.dp, dp_shard=1)
    unclaimed = [axis for axis in degrees.active_axes() if axis not in claims]
    if unclaimed:
        raise MeshError(
            f"the mesh is {degrees}, but this strategy does not shard {', '.join(unclaimed)}. It shards "
            f"{', '.join(axis for axis in CLAIMABLE_AXES if axis in claims)}: use one rank along the others."
        )
    if isinstance(mesh, Mesh):
        return mesh
    sharing = degrees.dp_shard * degrees.cp * degrees.tp
    if sharing % degrees.ep:
        raise MeshError(
            f"moe_mesh has {degrees.ep} ranks along ep, which do not divide the {sharing} ranks of dp_shard x cp x tp. "
            f"Use a divisor."
        )
    world = get_existing_world(mesh.device_type)
    if mesh.mesh.flatten().tolist() != list(range(world.size)):
        raise MeshError(
            f"the mesh has the ranks {mesh.mesh.flatten().tolist()}, but a manager takes all {world.size} ranks in "
            f"order. Make it with init_device_mesh, and give the whole mesh rather than a slice of it."
        )
    return Mesh(degrees, world)


def infer_degrees(mesh: Mesh | DeviceMesh, moe_mesh: DeviceMesh | None = None) -> Degrees:
    if isinstance(mesh, Mesh):
        return mesh.degrees
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"a manager takes a meshwright.Mesh or a DeviceMesh of torch, not a {type(mesh).__name__}. Make one with "
            f"Mesh(MeshSizes(...).resolve(world.size), world)."
        )
    names = mesh.mesh_dim_names or tuple(f"axis {index}" for index in range(mesh.ndim))
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    axes = {name: size for name, size in sizes.items() if size > 1}
    unknown = [name for name in axes if name not in _AXIS_BY_DIM_NAME]
    if unknown:
        raise MeshError(f"the mesh {sizes} has the unknown axis {unknown[0]!r}. Known: {', '.join(_AXIS_BY_DIM_NAME)}.")
    ours = [_AXIS_BY_DIM_NAME[name] for name in axes]
    if ours != sorted(set(ours), key=ROOT_AXES.index):
        raise MeshError(
            f"the axes of the mesh {sizes} are {', '.join(ours)}, in this order, but a manager takes each once and in "
            f"the order {', '.join(ROOT_AXES)}. Make the mesh so."
        )
    experts = 1
    if moe_mesh is not None and "ep" in (moe_mesh.mesh_dim_names or ()):
        experts = int(moe_mesh["ep"].size())
    return Degrees(**dict(zip(ours, axes.values(), strict=True)), ep=experts)
