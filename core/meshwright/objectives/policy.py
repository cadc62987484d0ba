"""Policy objectives over sampled tokens and their advantages: `grpo` and its variants, and `ppo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from .base import Column, Columns, Fraction, NotNegative, Objective, Positive, Sums, predicted

if TYPE_CHECKING:
    from torch import Tensor

    from ..step.tokens import Tokens

Normalize: TypeAlias = Literal["sequence", "tokens", "constant"]
Correction: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
OLD = Column("old_log_probs", ("B S",))


class GRPO(Objective):
    """Clipped policy loss with given advantages. For the tokens t of a sequence, with log p of the trained model,
    log p_old of the model that sampled, and advantages A_t,

        ratio_t = exp(log p_t - log p_old,t), or with `importance: sequence` that of their mean over the sequence
        loss_t  = -min(min(ratio_t, delta) A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
                  + beta (exp(d_t) - d_t - 1) - entropy H_t, d_t = log p_reference,t - log p_t

    `normalize`: `sequence`, the mean over a sequence's tokens, summed and divided by the number of sequences (GRPO);
    `tokens`, the sum divided by the number of tokens (DAPO); `constant`, the sum divided by max_tokens and the number
    of sequences (Dr. GRPO). With `packed`, the sequences are documents, which begin where `position_ids` do not rise.

    `correction` is for rollouts of another engine: the first term is multiplied by exp(log p_old,t - log p_sampling,t),
    or that of its sum over the sequence, clamped to [correction_min, correction_max] (truncate) or set to 0 outside of
    it (mask). A NaN stands for an unknown probability.

    Columns: `advantages`, (B,) or (B, S); `old_log_probs` (B, S), optional: without it those of this forward, which is
    right for one update per rollout; `reference_log_probs` (B, S) where beta > 0; `sampling_log_probs` (B, S) with a
    correction; `position_ids` where packed.
    Sums: `clip_ratio/low_mean`, `clip_ratio/high_mean`, `clip_ratio/region_mean`, `kl` where beta > 0, `entropy` if it
    takes part or `log_entropy`; divided by `num_tokens`, means over tokens (`tokens`) or over means of sequences.
    Sources: Shao et al. 2024, arXiv:2402.03300; DAPO, Yu et al. 2025, arXiv:2503.14476; Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783; GSPO, Zheng et al. 2025, arXiv:2507.18071; Schulman 2020, "Approximating KL divergence", k3.
    In trl: GRPOTrainer with loss_type="grpo", "dapo" or "dr_grpo"; importance_sampling_level, epsilon, epsilon_high,
    delta, beta, entropy_coef, vllm_importance_sampling_mode, ..._clip_min, ..._clip_max.
    """

    name: ClassVar[str] = "grpo"

    clip_low: Fraction = Field(default=0.2, description="How far a ratio may fall below 1.")
    clip_high: NotNegative = Field(default=0.2, description="How far it may rise above 1.")
    delta: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        default=None, description="Highest ratio where the advantage is negative; null: none."
    )
    beta: NotNegative = Field(default=0.0, description="Factor of the KL divergence from a reference.")
    entropy: NotNegative = Field(default=0.0, description="Factor of the entropy, which is rewarded.")
    importance: Literal["token", "sequence"] = Field(default="token", description="Of what the ratio is taken.")
    normalize: Normalize = Field(default="sequence", description="What the sum is divided by.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="What a sequence's sum is divided by where constant."
    )
    packed: bool = Field(default=False, description="Sequences are documents of rows.")
    correction: Correction | None = Field(default=None, description="For rollouts of another engine; null: none.")
    correction_min: NotNegative | None = Field(default=None, description="Lowest correction; null: none.")
    correction_max: Positive | None = Field(default=3.0, description="Highest one; null: none.")
    log_entropy: bool = Field(default=False, description="Sum the entropy also where it does not take part.")

    @model_validator(mode="after")
    def _check_combinations(self) -> GRPO:
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
            Column(OLD.name, OLD.shapes, needed=False),
        ]
        found += [Column("reference_log_probs", ("B S",))] if self.beta else []
        found += [Column("sampling_log_probs", ("B S",))] if self.correction else []
        return tuple(found)

    def count(self, batch: Columns) -> int:
        if self.normalize == "tokens":
            return super().count(batch)
        if not self.packed:
            return int(predicted(batch).any(1).sum())
        from .functions import documents_with_targets

        return documents_with_targets(batch)

    def __call__(self, tokens: Tokens, batch: Columns) -> tuple[Tensor, Sums]:
        from .policy_loss import PolicyLoss

        return PolicyLoss(self, tokens, batch).result()


class PPO(GRPO):
    """`grpo` with a ratio per token, divided by the number of tokens, and `old_log_probs` required. Values are trained
    by `value`, with another model or head.

    Columns and sums: those of `grpo`.
    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7, with its KL penalty and entropy bonus. In trl: the loss
    of GRPOTrainer's loss_type="dapo"; once PPOTrainer, with cliprange = clip_low = clip_high.
    """

    name: ClassVar[str] = "ppo"

    normalize: Normalize = Field(default="tokens", description="What the sum is divided by.")

    @property
    def takes(self) -> tuple[Column, ...]:
        return tuple(OLD if each.name == OLD.name else each for each in super().takes)
