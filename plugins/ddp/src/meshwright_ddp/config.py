"""Options of the `ddp` strategy. No torch in this module."""

from __future__ import annotations

from pydantic import Field

from meshwright.contract import StrategyConfig


class DDPConfig(StrategyConfig):
    """Options of `ddp`; more come with later releases, and an unknown one is an error until then."""

    bucket_cap_mb: int = Field(25, ge=1, description="Size of a gradient bucket [MiB].")
    gradient_as_bucket_view: bool = Field(False, description="Let gradients be views of the buckets: one copy less.")
    find_unused_parameters: bool = Field(
        False, description="Needed where a step leaves out some trainable parameters; costs a walk of the graph."
    )
