"""Options of the `fsdp2` strategy. No torch in this module."""

from __future__ import annotations

from pydantic import Field

from meshwright.contract import StrategyConfig


class FSDP2Config(StrategyConfig):
    """Options of `fsdp2`; more come with later releases, and an unknown one is an error until then."""

    reshard_after_forward: bool | None = Field(
        None,
        description="Free a block's gathered parameters after its forward and gather them again for backward. "
        "null: all blocks but the last of each stack, whose backward comes first.",
    )
    defer_fsdp_grad_sync: bool = Field(
        True,
        description="Reduce gradients on the last microbatch of a step only, at the price of holding whole gradients "
        "between microbatches. false: reduce on each, holding shards.",
    )
