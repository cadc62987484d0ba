"""Objectives of models with a one-feature head: values of tokens, rewards of sequences.

Shapes: B rows of a microbatch, S positions of each, P = B / 2 pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from meshwright.plugin import (
    Column,
    Columns,
    ModelError,
    NotNegative,
    ObjectiveConfig,
    On,
    Positive,
    SequenceObjective,
    Sums,
)

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.plugin import Outputs


class Value(ObjectiveConfig):
    """Half the squared error of values v against returns R at the positions that predict a token, divided by targets.

    With `clip` c and the values v_old of the rollout, max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    Columns: `returns` (B, S); `old_values` (B, S) with `clip`.
    Sums: `value`; `clipfrac`, where the clipped error is the larger one.
    Source: Schulman et al. 2016, arXiv:1506.02438; OpenAI's baselines of arXiv:1707.06347 for the clip.
    """

    name: ClassVar[str] = "value"
    on: ClassVar[On] = "outputs"

    clip: Positive | None = Field(default=0.2, description="How far a value may move; null: any.")

    @property
    def takes(self) -> tuple[Column, ...]:
        old = () if self.clip is None else (Column("old_values", ("B S",)),)
        return Column("returns", ("B S",)), *old

    def __call__(self, outputs: Outputs, batch: Columns) -> tuple[Tensor, Sums]:
        from .functions import at_targets, total

        value_BS, kept_BS = feature(outputs.logits, 3, self.name).where(outputs.mask, 0.0), outputs.mask
        returns_BS = at_targets(outputs, batch["returns"], value_BS)
        error_BS = (value_BS - returns_BS) ** 2
        each = {"value": value_BS}
        if self.clip is not None:
            old_BS = at_targets(outputs, batch["old_values"], value_BS)
            # Clamping leaves a value inside the range unchanged, without rounding.
            clipped_BS = (value_BS.clamp(old_BS - self.clip, old_BS + self.clip) - returns_BS) ** 2
            each["clipfrac"] = (clipped_BS > error_BS).to(error_BS.dtype)
            error_BS = error_BS.maximum(clipped_BS)
        return 0.5 * error_BS.sum(), total(each, kept_BS)


class Reward(SequenceObjective):
    """Reward model loss of pairs, for rewards c of the chosen and r of the rejected row, divided by pairs:

        -log sigmoid(c - r - margin) + center (c + r)^2

    Row 2i is chosen, 2i + 1 rejected.

    Columns: `margin` (B,) of the chosen row, optional.
    Sums: `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies`.
    Source: Bradley and Terry 1952; margins of Touvron et al. 2023, arXiv:2307.09288; centring of Eisenstein et al.
    2023, arXiv:2312.09244. In trl: RewardTrainer, `center_rewards_coefficient`.
    """

    name: ClassVar[str] = "reward"
    on: ClassVar[On] = "outputs"
    rows: ClassVar[int] = 2

    center: NotNegative = Field(default=0.0, description="Factor of the square of a pair's sum.")

    @property
    def takes(self) -> tuple[Column, ...]:
        return (Column("margin", ("B",), needed=False),)

    def __call__(self, outputs: Outputs, batch: Columns) -> tuple[Tensor, Sums]:
        from .functions import kept_pairs, log_sigmoid, pairs, reward_sums

        kept_P = kept_pairs(outputs)
        chosen_P, rejected_P = pairs(feature(outputs.logits, 2, self.name))
        margin_P = chosen_P - rejected_P
        if "margin" in batch:
            margin_P = margin_P - pairs(batch["margin"].to(margin_P.dtype))[0].where(kept_P, 0.0)
        loss_P = -log_sigmoid(margin_P)
        if self.center:
            loss_P = loss_P + self.center * (chosen_P + rejected_P) ** 2
        return loss_P.where(kept_P, 0.0).sum(), reward_sums(chosen_P, rejected_P, kept_P)


def feature(logits: Tensor, dims: int, name: str) -> Tensor:
    """Return the one feature of a head, at least float32, without its dim; raises ModelError for other heads."""
    from .functions import wide

    if logits.dim() != dims or logits.shape[-1] != 1:
        kind, shape = ("tokens", "(B, S, 1)") if dims == 3 else ("sequences", "(B, 1)")
        raise ModelError(
            f"objective {name!r} needs a head over {kind} with one feature, {shape}, and the model gives "
            f"{tuple(logits.shape)}. Set num_labels=1, and take a model that classifies {kind}."
        )
    return wide(logits[..., 0])
