"""Values of `activation_checkpointing` besides false, true, "full" and "selective". Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, model_validator

from ..base.validation import FrozenModel


class ActivationOptions(FrozenModel):
    """Activations within a memory budget, or in host memory."""

    budget_gb: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="GB (10^9 bytes) of activations that the blocks of a rank may hold at any time, what is computed "
        "again included. What of each block is held follows: as much as fits, the costliest to compute again first.",
    )
    offload: Literal["cpu"] | None = Field(
        default=None,
        description="cpu: what blocks hold for backward lies in host memory until then; nothing is computed again.",
    )

    @model_validator(mode="after")
    def _check_one(self) -> ActivationOptions:
        if (self.budget_gb is None) == (self.offload is None):
            raise ValueError("takes one of budget_gb and offload")
        return self


ActivationCheckpointing: TypeAlias = bool | Literal["full", "selective"] | ActivationOptions
"""Type of the option `activation_checkpointing` of strategies."""


def activation_field(saved: str = "every second matrix product and attention") -> Any:
    """Return a config's field `activation_checkpointing`; `saved` names what "selective" does not recompute."""
    return Field(
        default=False,
        description="Compute the activations of each block again in backward: true or full: all; selective: all but "
        f"{saved}. {{budget_gb: X}}: what X GB do not hold. {{offload: cpu}}: nothing; activations lie in host memory "
        "until then.",
    )


def format_activation_option(value: ActivationCheckpointing) -> str:
    """Return the option as a user writes it."""
    if isinstance(value, ActivationOptions):
        return "{" + ", ".join(f"{name}: {each}" for name, each in value.model_dump(exclude_none=True).items()) + "}"
    return str(value).lower() if isinstance(value, bool) else value


def needs_identical_operators(value: ActivationCheckpointing) -> bool:
    """Return whether recomputation must call the same operators as the forward, because some results are saved."""
    return value == "selective" or (isinstance(value, ActivationOptions) and value.budget_gb is not None)
