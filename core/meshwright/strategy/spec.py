"""The description of a strategy in the registry. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from ..base.validation import FrozenModel

if TYPE_CHECKING:
    from ..mesh.sizes import Degrees
    from .contract import StrategyManager

ROUNDS_ANEW = "rounds anew"
"""Annotates an option of a config, `Annotated[bool, ROUNDS_ANEW]`, under which the parts that a model computes in
float32 are rounded in other places. The conformance suite tries it on a model that has no such parts."""


class StrategyConfig(FrozenModel):
    """Base of strategy configs: frozen, unknown fields refused. Third parties may use any pydantic model."""

    reduce_dtype: Literal["float32", "float64"] | None = Field(
        default=None,
        description="Dtype in which gradients are accumulated over microbatches and summed over ranks; null: the "
        "gradients' own. float64 under float32 gradients makes the sum independent of its order, so that every "
        "strategy and world size prints the same losses.",
    )
    loss_chunk_rows: int | None = Field(
        default=None,
        ge=0,
        description="Compute the loss for so many positions of a microbatch at a time, so that logits are held for "
        "these alone. null: half as many as a position has hidden features, at least 512, where logits are large. 0: "
        "for all at once.",
    )


DistributedConfig = StrategyConfig
"""The reference's name for the options of any strategy but a pipeline."""


@dataclass(frozen=True)
class StrategySpec:
    """A strategy as the registry knows it.

    Attributes:
        name: lower-case identifier; users choose the strategy by it.
        summary: one line for `meshwright strategies`.
        axes: the axes it shards, out of `meshwright.mesh.sizes.CLAIMABLE_AXES`. A degree above 1 on any other axis is
            an error unless a wrapping strategy claims that axis.
        config_cls: a pydantic model of its options.
        build: `build(config, mesh) -> StrategyManager`; for `wraps`, `build(config, mesh, inner)` with `inner:
            Callable[[Mesh], StrategyManager]`, called once for each model part with the mesh it trains on.
        aliases: other names for it.
        wraps: it claims its axes around another strategy, which does the rest.
        check: `check(config, degrees)` raises a MeshwrightError if the config cannot act on a mesh of these degrees;
            without torch, since it is called before ranks start.
    """

    name: str
    summary: str
    axes: frozenset[str]
    config_cls: type[BaseModel]
    build: Callable[..., StrategyManager]
    aliases: tuple[str, ...] = ()
    wraps: bool = False
    check: Callable[[Any, Degrees], None] | None = None
