"""The mesh sizes that a user requests, and the degrees of the mesh axes.

[Note: axis, dim, degree] A mesh has axes, a tensor has dims, and the degree of an axis is the number of ranks
along it. Root axes, outermost first: `pp, dp_replicate, dp_shard, cp, tp`. Experts are on a second mesh of the
same ranks, whose inner axes are `ep_shard, ep` instead of `dp_shard, cp, tp`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ..base.errors import MeshError
from ..base.validation import FrozenModel

ROOT_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of the mesh, outermost first."""
STAGE_AXES = ROOT_AXES[1:]
EXPERT_AXES = ("pp", "dp_replicate", "ep_shard", "ep")
"""The axes of the expert mesh, outermost first."""
VIEWS = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "dp_shard_cp": ("dp_shard", "cp"),
}
"""Flattened axes of the mesh, by name."""
CLAIMABLE_AXES = (*ROOT_AXES, "ep")
"""Axes that a strategy can claim; the degree of `ep_shard` follows from them."""

Size = Annotated[int, Field(ge=1, lt=2**31)]
"""A degree or another count, at least 1."""


@dataclass(frozen=True)
class Degrees:
    """The degree of every axis; see [Note: axis, dim, degree].

    `dp_shard * cp * tp == ep_shard * ep`, and the product of the root axes is the world size.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def ep_shard(self) -> int:
        """Number of ranks that shard the experts of one expert-parallel rank."""
        return self.dp_shard * self.cp * self.tp // self.ep

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, axis) for axis in ROOT_AXES)

    def active_axes(self) -> list[str]:
        """Return the claimable axes whose degree is larger than 1, outermost first."""
        return [axis for axis in CLAIMABLE_AXES if getattr(self, axis) > 1]

    def __str__(self) -> str:
        return " x ".join(f"{axis}={getattr(self, axis)}" for axis in self.active_axes()) or "one rank"


class MeshSizes(FrozenModel):
    """The mesh sizes that the user requests.

    At most one of `dp_size, tp_size, pp_size, cp_size` may be None, by default `dp_size`; it is inferred from the world
    size.
    """

    dp_size: Size | None = Field(default=None, description="Whole data-parallel degree: dp_replicate x dp_shard.")
    dp_replicate_size: Size | None = Field(
        default=None,
        description="Copies of the parameters. Left out: 1, or dp_size for a strategy that only replicates.",
    )
    tp_size: Size | None = Field(default=1, description="Tensor-parallel degree.")
    pp_size: Size | None = Field(default=1, description="Number of pipeline ranks.")
    cp_size: Size | None = Field(default=1, description="Context-parallel degree.")
    ep_size: Size = Field(default=1, description="Expert-parallel degree; divides dp_shard x cp x tp.")

    def known_product(self) -> int:
        """Return the product of the sizes of root axes; an inferred size counts as 1."""
        return math.prod(size or 1 for size in (self.dp_size, self.tp_size, self.pp_size, self.cp_size))

    def resolve(self, world_size: int, claims: Collection[str] = CLAIMABLE_AXES) -> Degrees:
        """Return the degree of every axis.

        Args:
            world_size: number of ranks.
            claims: axes that the stack of strategies shards. If `dp_replicate_size` is None, the data-parallel axis is
                `dp_shard` if that is claimed, else `dp_replicate`.

        Raises:
            MeshError: the sizes do not fill the world, or one does not divide another.
        """
        sizes = self._infer_sizes(world_size)
        dp = sizes["dp_size"]
        replicate = self.dp_replicate_size
        if replicate is None:
            replicate = dp if "dp_shard" not in claims and "dp_replicate" in claims else 1
        if dp % replicate:
            raise MeshError(
                f"dp_replicate_size={replicate} does not divide dp_size={dp}. dp_size is the whole data-parallel "
                f"degree, dp_replicate x dp_shard: use one of {format_divisors(dp)} for dp_replicate_size."
            )
        dp_shard, cp, tp = dp // replicate, sizes["cp_size"], sizes["tp_size"]
        sharing = dp_shard * cp * tp
        if sharing % self.ep_size:
            raise MeshError(
                f"ep_size={self.ep_size} does not divide dp_shard={dp_shard} x cp={cp} x tp={tp} = {sharing}, the "
                f"ranks that share the experts. Use one of {format_divisors(sharing)} for ep_size."
            )
        return Degrees(pp=sizes["pp_size"], dp_replicate=replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=self.ep_size)

    def _infer_sizes(self, world_size: int) -> dict[str, int]:
        sizes = {name: getattr(self, name) for name in ("pp_size", "dp_size", "cp_size", "tp_size")}
        unset = [name for name, size in sizes.items() if size is None]
        product = self.known_product()
        text = " x ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        if len(unset) > 1:
            raise MeshError(
                f"only one size can be inferred from the world size {world_size}, but {len(unset)} are left open: "
                f"{', '.join(unset)}. Give all of them but one."
            )
        if unset:
            if world_size % product:
                raise MeshError(
                    f"sizes do not fill the world: {text} = {product} does not divide the world size {world_size}, "
                    f"so {unset[0]} cannot be inferred. Start a multiple of {product} ranks, or change the sizes."
                )
            return {**sizes, unset[0]: world_size // product}
        if product == world_size:
            return sizes
        others = product // sizes["dp_size"]
        remedy = f"Start a multiple of {others} ranks, or change the sizes."
        if world_size % others == 0:
            remedy = f"Set dp_size={world_size // others}, leave dp_size out to infer it, or start other ranks."
        raise MeshError(
            f"sizes do not fill the world: {text} = {product}, but the world size is {world_size}. {remedy}"
        )


def format_divisors(number: int) -> str:
    """List the divisors of a number, for an error message."""
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
