"""The options of `grpo` and `ppo`, and what they ask for; see `policy` for what they mean."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from .base import Column, Columns, Objective, predicted

Normalize: TypeAlias = Literal["sequence", "tokens", "constant"]
Correction: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
REFERENCE = Column("reference_log_probs", ("B S",))


class PolicyOptions(Objective):
    """An objective over a policy, without its arithmetic."""

    clip_low: float = Field(default=0.2, ge=0, le=1, description="How far a ratio may fall below 1.")
    clip_high: float = Field(default=0.2, ge=0, allow_inf_nan=False, description="How far it may rise above 1.")
    delta: float | None = Field(
        default=None,
        gt=1,
        allow_inf_nan=False,
        description="Highest ratio where the advantage is negative; null: none.",
    )
    beta: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Factor of the KL divergence from a reference."
    )
    entropy: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, description="Factor of the entropy, which is rewarded."
    )
    importance: Literal["token", "sequence"] = Field(default="token", description="Of what the ratio is taken.")
    normalize: Normalize = Field(default="sequence", description="What the sum is divided by.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="What a sequence's sum is divided by where constant."
    )
    packed: bool = Field(default=False, description="Sequences are documents of rows.")
    correction: Correction | None = Field(default=None, description="For rollouts of another engine; null: none.")
    correction_min: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="Lowest correction; null: none."
    )
    correction_max: float | None = Field(default=3.0, gt=0, allow_inf_nan=False, description="Highest one; null: none.")
    log_entropy: bool = Field(default=False, description="Sum the entropy also where it does not take part.")

    @model_validator(mode="after")
    def _check_combinations(self) -> PolicyOptions:
        if (self.normalize == "constant") != (self.max_tokens is not None):
            raise ValueError(
                f"normalize={self.normalize!r} with max_tokens={self.max_tokens}: max_tokens is what "
                f"normalize='constant' divides by, and nothing to the others. Set both, or neither"
            )
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(
                f"delta={self.delta:g} is not above 1 + clip_high = {1 + self.clip_high:g}, so that it would clip "
                f"first. Raise it"
            )
        low, high = self.correction_min, self.correction_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"correction_min={low:g} is above correction_max={high:g}. Lower it")
        return self

    @property
    def takes(self) -> tuple[Column, ...]:
        found = [
            Column("advantages", ("B S",) if self.packed else ("B", "B S")),
            Column("old_log_probs", ("B S",), needed=False),
        ]
        found += [REFERENCE] if self.beta else []
        found += [Column("sampling_log_probs", ("B S",))] if self.correction else []
        return tuple(found)

    def count(self, batch: Columns) -> int:
        if self.normalize == "tokens":
            return super().count(batch)
        if not self.packed:
            return int(predicted(batch).any(1).sum())
        from .functions import documents_with_targets

        return documents_with_targets(batch)
