"""Use a torch DeviceMesh, made by the caller, as a Mesh.

Axes have the names that Hugging Face and NVIDIA use, and lie on the ranks as a Mesh's own: the outermost first, and all
ranks of the world in order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from torch.distributed.device_mesh import DeviceMesh

from ..base.errors import MeshError
from .mesh import Mesh
from .sizes import CLAIMABLE_AXES, ROOT_AXES, Degrees
from .world import existing_world

_AXIS_OF: Mapping[str, str] = MappingProxyType(
    {
        **{axis: axis for axis in ROOT_AXES},
        "pipeline_parallel": "pp",
        "dp": "dp_shard",
        "data_parallel": "dp_shard",
        "context_parallel": "cp",
        "tensor_parallel": "tp",
    }
)


def as_mesh(given: Mesh | DeviceMesh, claims: Collection[str], moe_mesh: DeviceMesh | None = None) -> Mesh:
    """Return a Mesh unchanged, or a Mesh of the same degrees as a DeviceMesh; collective for a DeviceMesh.

    Args:
        given: a DeviceMesh of all ranks in order, with axes named as in `_AXIS_OF`.
        claims: the axes that the strategy shards; for one without `dp_shard`, all data ranks hold copies.
        moe_mesh: the mesh for experts, whose axis `ep` gives their degree.

    Raises:
        MeshError: it is neither, an axis is unknown or not claimed, or ranks lie in another order; on all ranks alike.
    """
    degrees = degrees_of(given, moe_mesh)
    if isinstance(given, Mesh):
        _check_claims(degrees, claims)
        return given
    if "dp_shard" not in claims and "dp_replicate" in claims:
        degrees = replace(degrees, dp_replicate=degrees.dp, dp_shard=1)
    _check_claims(degrees, claims)
    sharing = degrees.dp_shard * degrees.cp * degrees.tp
    if sharing % degrees.ep:
        raise MeshError(
            f"moe_mesh has {degrees.ep} ranks along ep, which do not divide the {sharing} ranks of dp_shard x cp x tp. "
            f"Use a divisor."
        )
    world = existing_world(given.device_type)
    if given.mesh.flatten().tolist() != list(range(world.size)):
        raise MeshError(
            f"the mesh has the ranks {given.mesh.flatten().tolist()}, but a manager takes all {world.size} ranks in "
            f"order. Make it with init_device_mesh, and give the whole mesh rather than a slice of it."
        )
    return Mesh(degrees, world)


def degrees_of(given: Mesh | DeviceMesh, moe_mesh: DeviceMesh | None = None) -> Degrees:
    """Return the degrees of a mesh; arguments as of `as_mesh`.

    Raises:
        MeshError: it is neither a Mesh nor a DeviceMesh, or an axis is unknown.
    """
    if isinstance(given, Mesh):
        return given.degrees
    if not isinstance(given, DeviceMesh):
        raise MeshError(
            f"a manager takes a meshwright.Mesh or a DeviceMesh of torch, not a {type(given).__name__}. Make one with "
            f"Mesh(MeshSizes(...).resolve(world.size), world)."
        )
    experts = 1
    if moe_mesh is not None and "ep" in (moe_mesh.mesh_dim_names or ()):
        experts = int(moe_mesh["ep"].size())
    return Degrees(**_sizes(given), ep=experts)


def _check_claims(degrees: Degrees, claims: Collection[str]) -> None:
    unclaimed = [axis for axis in degrees.above_one() if axis not in claims]
    if unclaimed:
        raise MeshError(
            f"the mesh is {degrees}, but this strategy does not shard {', '.join(unclaimed)}. It shards "
            f"{', '.join(axis for axis in CLAIMABLE_AXES if axis in claims)}: use one rank along the others."
        )


def _sizes(given: DeviceMesh) -> dict[str, int]:
    """The sizes by the names of our axes."""
    names = given.mesh_dim_names or tuple(f"axis {index}" for index in range(given.ndim))
    told = dict(zip(names, given.mesh.shape, strict=True))
    axes = {name: size for name, size in zip(names, given.mesh.shape, strict=True) if size > 1}
    unknown = [name for name in axes if name not in _AXIS_OF]
    if unknown:
        raise MeshError(f"the mesh {told} has the unknown axis {unknown[0]!r}. Known: {', '.join(_AXIS_OF)}.")
    ours = [_AXIS_OF[name] for name in axes]
    if ours != sorted(set(ours), key=ROOT_AXES.index):
        raise MeshError(
            f"the axes of the mesh {told} are {', '.join(ours)}, in this order, but a manager takes each once and in "
            f"the order {', '.join(ROOT_AXES)}. Make the mesh so."
        )
    return dict(zip(ours, axes.values(), strict=True))
