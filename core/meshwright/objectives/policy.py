"""Objectives over what the model itself has said, and how good it was: `grpo` and its kin, and `ppo`.

Shapes: B rows of a microbatch, S positions of each, D sequences: rows, or the documents in them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from .base import Column, Columns, Objective, Sums, predicted

if TYPE_CHECKING:
    from torch import Tensor

    from ..step.tokens import Tokens

Normalize: TypeAlias = Literal["sequence", "tokens", "constant"]
Correction: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
REFERENCE = Column("reference_log_probs", ("B S",))


class GRPO(Objective):
    """A clipped policy loss with advantages that come from outside. For the tokens t of a sequence, with log p of the
    model that is trained, log p_old of the one that has spoken, and advantages A_t,

        ratio_t = exp(log p_t - log p_old,t), or with `importance: sequence` that of their mean over the sequence
        loss_t  = -min(min(ratio_t, delta) A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
                  + beta (exp(d_t) - d_t - 1) - entropy H_t, d_t = log p_reference,t - log p_t

    `normalize` says what is made of it: `sequence`, the mean over a sequence's tokens, summed over sequences and
    divided by their number (GRPO); `tokens`, the sum divided by the number of tokens (DAPO); `constant`, the sum over
    tokens by max_tokens and the number of sequences (Dr. GRPO). With `packed`, documents, which begin where
    `position_ids` do not rise, are sequences.

    `correction` is for rollouts of another engine, which gives other probabilities to the same weights: the first term
    of loss_t is multiplied by exp(log p_old,t - log p_sampling,t), or that of its sum over the sequence, between
    correction_min and correction_max (truncate), or by 0 outside of them (mask). A NaN stands for an unknown one.

    Columns: `advantages`, (B,) of rows, or (B, S); `old_log_probs` (B, S), if the batch has it: without, those of this
    forward, which is right for one update for each rollout; `reference_log_probs` (B, S) where beta > 0;
    `sampling_log_probs` (B, S) with a correction; `position_ids` where packed.
    Sums, each such that divided by `num_tokens` it is a mean over tokens (`tokens`), or over sequences of means over
    tokens (otherwise): `clip_ratio/low_mean`, `clip_ratio/high_mean`, `clip_ratio/region_mean`; `kl` where beta > 0;
    `entropy` where it takes part or `log_entropy` asks for it.
    Sources: Shao et al. 2024, arXiv:2402.03300; DAPO, Yu et al. 2025, arXiv:2503.14476; Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783; GSPO, Zheng et al. 2025, arXiv:2507.18071; the KL's estimator: Schulman 2020, "Approximating KL
    divergence", k3. In trl: GRPOTrainer with loss_type="grpo", "dapo" or "dr_grpo"; importance_sampling_level, epsilon,
    epsilon_high, delta, beta, entropy_coef, vllm_importance_sampling_mode, ..._clip_min, ..._clip_max.
    """

    name: ClassVar[str] = "grpo"

    clip_low: float = Field(0.2, ge=0, le=1, description="How far a ratio may fall below 1.")
    clip_high: float = Field(0.2, ge=0, allow_inf_nan=False, description="How far it may rise above 1.")
    delta: float | None = Field(
        None, gt=1, allow_inf_nan=False, description="Highest ratio where the advantage is negative; null: none."
    )
    beta: float = Field(0.0, ge=0, allow_inf_nan=False, description="Factor of the KL divergence from a reference.")
    entropy: float = Field(0.0, ge=0, allow_inf_nan=False, description="Factor of the entropy, which is rewarded.")
    importance: Literal["token", "sequence"] = Field("token", description="Of what the ratio is taken.")
    normalize: Normalize = Field("sequence", description="What the sum is divided by.")
    max_tokens: int | None = Field(None, ge=1, description="What a sequence's sum is divided by where constant.")
    packed: bool = Field(False, description="Sequences are documents of rows.")
    correction: Correction | None = Field(None, description="For rollouts of another engine; null: none.")
    correction_min: float | None = Field(None, ge=0, allow_inf_nan=False, description="Lowest correction; null: none.")
    correction_max: float | None = Field(3.0, gt=0, allow_inf_nan=False, description="Highest one; null: none.")
    log_entropy: bool = Field(False, description="Sum the entropy also where it does not take part.")

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
            Column("old_log_probs", ("B S",), needed=False),
        ]
        found += [REFERENCE] if self.beta else []
        found += [Column("sampling_log_probs", ("B S",))] if self.correction else []
        # What the model takes by name is no column for the objective, so that it cannot be asked for as one.
        return tuple(found)

    def weigh(self, batch: Columns) -> int:
        if self.normalize == "tokens":
            return super().weigh(batch)
        if not self.packed:
            return int(predicted(batch).any(1).sum())
        from .functions import documents_with_targets

        return documents_with_targets(batch)

    def __call__(self, tokens: Tokens, batch: Columns) -> tuple[Tensor, Sums]:
        from .policy_loss import PolicyLoss

        return PolicyLoss(self, tokens, batch).result()


class PPO(GRPO):
    """The clipped policy loss of `grpo` as it was first: one ratio for each token, divided by the number of tokens, and
    log-probabilities of the time of the rollout, which the batch must have. Values are trained by `value`, with another
    model or head.

    Columns and sums: those of `grpo`; `old_log_probs` is needed.
    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7, with its KL penalty and entropy bonus.
    In trl: PPOTrainer, until 1.0, with cliprange = clip_low = clip_high; the loss is that of GRPOTrainer's
    loss_type="dapo".
    """

    name: ClassVar[str] = "ppo"

    normalize: Normalize = Field("tokens", description="What the sum is divided by.")

    @property
    def takes(self) -> tuple[Column, ...]:
        old = Column("old_log_probs", ("B S",))
        return tuple(old if each.name == old.name else each for each in super().takes)
