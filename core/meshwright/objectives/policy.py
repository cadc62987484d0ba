"""Objectives over what the model itself has said, and how good it was: `grpo` and its kin, and `ppo`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from .base import Column, Columns, Sums
from .policy_options import Normalize, PolicyOptions

if TYPE_CHECKING:
    from torch import Tensor

    from ..step.tokens import Tokens


class GRPO(PolicyOptions):
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

    def __call__(self, tokens: Tokens, batch: Columns) -> tuple[Tensor, Sums]:
        from .policy_loss import PolicyLoss

        return PolicyLoss(self, tokens, batch).result()


class PPO(GRPO):
    """The clipped policy loss of `grpo` as it was first: one ratio for each token, divided by the number of tokens, and
    log-probabilities of the time of the rollout, which the batch must have. Values are trained by `value`, with another
    model or head.

    Columns and sums: those of `grpo`; `old_log_probs` is needed.
    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7, with its KL penalty and entropy bonus.
    In trl: once PPOTrainer, with cliprange = clip_low = clip_high; the loss is that of GRPOTrainer's
    loss_type="dapo".
    """

    name: ClassVar[str] = "ppo"

    normalize: Normalize = Field(default="tokens", description="What the sum is divided by.")

    @property
    def takes(self) -> tuple[Column, ...]:
        old = Column("old_log_probs", ("B S",))
        return tuple(old if each.name == old.name else each for each in super().takes)
