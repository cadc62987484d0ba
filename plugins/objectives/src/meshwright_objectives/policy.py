"""Policy objectives over sampled tokens and their advantages: `grpo` and its variants, `ppo`, and `value`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from meshwright.plugin import (
    BatchColumns,
    Column,
    ExtraSums,
    Fraction,
    InputKind,
    NonNegativeFloat,
    ObjectiveConfig,
    PositiveFloat,
    get_target_mask,
)

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.plugin import Outputs, Tokens

Normalize: TypeAlias = Literal["sequence", "tokens", "constant"]
Correction: TypeAlias = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
OLD_LOG_PROBS = Column("old_log_probs", ("B S",))


class GRPO(ObjectiveConfig):
    """Clipped policy loss with precomputed advantages. For tokens t of a sequence, log p of the trained model,
    log p_old of the model that sampled the sequence, and advantages A_t,

        ratio_t = exp(log p_t - log p_old,t); with `importance_level: sequence`, exp of the mean over the sequence
        loss_t  = -min(min(ratio_t, delta) A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)
                  + beta (exp(d_t) - d_t - 1) - entropy_coef H_t, d_t = log p_reference,t - log p_t

    `normalize`: `sequence`, the sum of the means over each sequence, divided by the number of sequences (GRPO);
    `tokens`, the sum divided by the number of tokens (DAPO); `constant`, the sum divided by max_tokens and the number
    of sequences (Dr. GRPO). With `packed`, each document is a sequence; it starts where `position_ids` do not increase.

    `correction` is for rollouts of another engine. It multiplies the first term by exp(log p_old,t - log p_sampling,t),
    or by exp of its sum over the sequence, clamped to [correction_min, correction_max] (truncate) or set to 0 outside
    of that range (mask). A NaN is an unknown probability, taken as equal to the other one.

    Columns: `advantages`, (B,) or (B, S); `old_log_probs` (B, S), optional: the default, those of this forward, is
    correct for one update per rollout; `reference_log_probs` (B, S) if beta > 0; `sampling_log_probs` (B, S) with a
    correction; `position_ids` if packed.
    Sums: `clip_ratio/low_mean`, `clip_ratio/high_mean`, `clip_ratio/region_mean`; `kl` if beta > 0; `entropy` if
    entropy_coef > 0 or with `report_entropy`. Divided by `num_tokens`, they are means over tokens with
    `normalize: tokens`, else means over sequences of the mean over a sequence.
    Sources: Shao et al. 2024, arXiv:2402.03300; DAPO, Yu et al. 2025, arXiv:2503.14476; Dr. GRPO, Liu et al. 2025,
    arXiv:2503.20783; GSPO, Zheng et al. 2025, arXiv:2507.18071; Schulman 2020, "Approximating KL divergence", k3.
    In trl: GRPOTrainer with loss_type="grpo", "dapo" or "dr_grpo"; importance_sampling_level, epsilon, epsilon_high,
    delta, beta, entropy_coef, vllm_importance_sampling_mode, ..._clip_min, ..._clip_max.
    """

    name: ClassVar[str] = "grpo"

    clip_low: Fraction = Field(default=0.2, description="A ratio is clipped at 1 - clip_low.")
    clip_high: NonNegativeFloat = Field(default=0.2, description="A ratio is clipped at 1 + clip_high.")
    delta: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        default=None, description="Maximum ratio if the advantage is negative; null: none."
    )
    beta: NonNegativeFloat = Field(default=0.0, description="Weight of the KL divergence from the reference model.")
    entropy_coef: NonNegativeFloat = Field(default=0.0, description="Weight of the entropy bonus.")
    importance_level: Literal["token", "sequence"] = Field(
        default="token", description="Compute the ratio per token or per sequence."
    )
    normalize: Normalize = Field(default="sequence", description="Divisor of the sum; see the formulas.")
    max_tokens: int | None = Field(
        default=None, ge=1, description="Divisor of a sequence's sum with normalize: constant."
    )
    packed: bool = Field(default=False, description="Rows are packed: each document is a sequence.")
    correction: Correction | None = Field(
        default=None, description="Importance weights for rollouts of another engine; null: none."
    )
    correction_min: NonNegativeFloat | None = Field(default=None, description="Minimum correction; null: none.")
    correction_max: PositiveFloat | None = Field(default=3.0, description="Maximum correction; null: none.")
    report_entropy: bool = Field(default=False, description="Report the entropy even if entropy_coef is 0.")

    @model_validator(mode="after")
    def _check_combinations(self) -> GRPO:
        if (self.normalize == "constant") != (self.max_tokens is not None):
            raise ValueError(
                f"normalize={self.normalize!r} with max_tokens={self.max_tokens}: max_tokens is the divisor of "
                f"normalize='constant', and has no effect otherwise. Set both, or neither"
            )
        if self.delta is not None and self.delta <= 1 + self.clip_high:
            raise ValueError(
                f"delta={self.delta:g} is not above 1 + clip_high = {1 + self.clip_high:g}, so it would clip before "
                f"clip_high does. Raise it"
            )
        low, high = self.correction_min, self.correction_max
        if low is not None and high is not None and low > high:
            raise ValueError(f"correction_min={low:g} is above correction_max={high:g}. Lower it")
        return self

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        found = [
            Column("advantages", ("B S",) if self.packed else ("B", "B S")),
            Column(OLD_LOG_PROBS.name, OLD_LOG_PROBS.shapes, is_required=False),
        ]
        found += [Column("reference_log_probs", ("B S",))] if self.beta else []
        found += [Column("sampling_log_probs", ("B S",))] if self.correction else []
        return tuple(found)

    def count(self, batch: BatchColumns) -> int:
        if self.normalize == "tokens":
            return super().count(batch)
        if not self.packed:
            return int(get_target_mask(batch).any(1).sum())
        from .functional import count_documents_with_targets

        return count_documents_with_targets(batch)

    def __call__(self, tokens: Tokens, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        return _PolicyLoss(self, tokens, batch).compute()


class PPO(GRPO):
    """`grpo` with other defaults: the loss is divided by the number of tokens, and `old_log_probs` is required.

    Train the value function with `value`, with another model or head.

    Columns and sums: as `grpo`.
    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7, with its KL penalty and entropy bonus. In trl: the loss
    of GRPOTrainer with loss_type="dapo"; formerly PPOTrainer, with cliprange = clip_low = clip_high.
    """

    name: ClassVar[str] = "ppo"

    normalize: Normalize = Field(default="tokens", description="Divisor of the sum; see the formulas of grpo.")

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        return tuple(OLD_LOG_PROBS if each.name == OLD_LOG_PROBS.name else each for each in super().accepted_columns)


class Value(ObjectiveConfig):
    """Half the squared error of values v against returns R, summed over targets and divided by their number.

    With `clip` c and the values v_old of the rollout: max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    Columns: `returns` (B, S); `old_values` (B, S) with `clip`.
    Sums: `value`; with `clip`, `clipfrac`, the number of targets whose clipped error is the larger.
    Source: Schulman et al. 2016, arXiv:1506.02438; clip of OpenAI Baselines' PPO, arXiv:1707.06347.
    """

    name: ClassVar[str] = "value"
    input_kind: ClassVar[InputKind] = "outputs"

    clip: PositiveFloat | None = Field(
        default=0.2, description="Clip range around the values of the rollout; null: none."
    )

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        old = () if self.clip is None else (Column("old_values", ("B S",)),)
        return Column("returns", ("B S",)), *old

    def __call__(self, outputs: Outputs, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        from .functional import mask_to_targets, masked_sums, select_head_output

        value_BS, kept_BS = select_head_output(outputs.logits, 3, self.name).where(outputs.mask, 0.0), outputs.mask
        returns_BS = mask_to_targets(outputs, batch["returns"], value_BS)
        error_BS = (value_BS - returns_BS) ** 2
        each = {"value": value_BS}
        if self.clip is not None:
            old_BS = mask_to_targets(outputs, batch["old_values"], value_BS)
            # `clamp` does not round values inside of the range.
            clipped_BS = (value_BS.clamp(old_BS - self.clip, old_BS + self.clip) - returns_BS) ** 2
            each["clipfrac"] = (clipped_BS > error_BS).to(error_BS.dtype)
            error_BS = error_BS.maximum(clipped_BS)
        return 0.5 * error_BS.sum(), masked_sums(each, kept_BS)


class _PolicyLoss:
    """The loss of one microbatch. All terms are first summed over each sequence.

    A factor per sequence, such as a ratio r with clipped value c, is applied to these sums: -sum_t min(r A_t, c A_t)
    equals -(min(r, c) sum_t A_t+ + max(r, c) sum_t A_t-), with the positive and negative parts A+ and A- of the
    advantages. So rows and packed documents need no separate code.

    Shapes: B rows of a microbatch, S positions per row, D sequences: rows, or documents if packed.
    """

    def __init__(self, options: GRPO, tokens: Tokens, batch: BatchColumns) -> None:
        self.options, self._tokens, self._batch = options, tokens, batch
        self._log_probs_BS = tokens.log_probs
        self._advantages_BS = self._read_column("advantages")

    def compute(self) -> tuple[Tensor, ExtraSums]:
        """Return the summed loss, a scalar, and extra sums."""
        options, dtype = self.options, self._log_probs_BS.dtype
        loss_D, (low, high) = self._compute_surrogate()
        clipped = {"low_mean": low, "high_mean": high, "region_mean": low | high}
        each_D = {
            f"clip_ratio/{name}": self._sum_values_by_sequence(value.to(dtype)) for name, value in clipped.items()
        }
        if options.beta:
            difference_BS = self._read_column("reference_log_probs") - self._log_probs_BS
            each_D["kl"] = self._sum_by_sequence(difference_BS.exp() - difference_BS - 1)
            loss_D = loss_D + options.beta * each_D["kl"]
        if options.entropy_coef or options.report_entropy:
            each_D["entropy"] = self._sum_by_sequence(self._tokens.entropy.where(self._tokens.mask, 0.0))
            loss_D = loss_D - options.entropy_coef * each_D["entropy"] if options.entropy_coef else loss_D
        means = options.normalize != "tokens"
        sums = {name: (value / self._lengths_D if means else value).sum().detach() for name, value in each_D.items()}
        divisor = {"tokens": 1, "sequence": self._lengths_D, "constant": options.max_tokens}[options.normalize]
        return (loss_D / divisor).sum(), sums

    def _compute_surrogate(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the first term, (D,), and clip masks (low, high): bool, (B, S), or (D,) for sequence ratios."""
        options = self.options
        old_BS = self._read_column("old_log_probs") if "old_log_probs" in self._batch else self._log_probs_BS.detach()
        log_ratio_BS, token_weight_BS, weight_D = self._log_probs_BS - old_BS, None, None
        if options.correction:
            weight = self._compute_correction(old_BS)
            token_weight_BS, weight_D = (weight, None) if options.correction.startswith("token") else (None, weight)
        advantages_BS = self._advantages_BS if token_weight_BS is None else self._advantages_BS * token_weight_BS
        if options.importance_level == "token":
            ratio = log_ratio_BS.exp()
            once_BS, clipped_BS = self._clip_ratio(ratio)
            surrogate_D = -self._sum_by_sequence((once_BS * advantages_BS).minimum(clipped_BS * advantages_BS))
            gains, losses = self._advantages_BS > 0, self._advantages_BS < 0
        else:
            ratio = (self._sum_by_sequence(log_ratio_BS) / self._lengths_D).exp()
            once_D, clipped_D = self._clip_ratio(ratio)
            up_D = self._sum_by_sequence(advantages_BS.clamp(min=0))
            down_D = self._sum_by_sequence(advantages_BS.clamp(max=0))
            surrogate_D = -(once_D.minimum(clipped_D) * up_D + once_D.maximum(clipped_D) * down_D)
            # Use the sign of the total advantage; the tokens of a sequence usually share one.
            mean_D = self._sum_by_sequence(self._advantages_BS)
            gains, losses = mean_D > 0, mean_D < 0
        surrogate_D = surrogate_D if weight_D is None else surrogate_D * weight_D
        low, high = ratio < 1 - options.clip_low, ratio > 1 + options.clip_high
        return surrogate_D, (low & losses, high & gains)

    def _clip_ratio(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        options = self.options
        once = ratio if options.delta is None else ratio.clamp(max=options.delta)
        return once, ratio.clamp(1 - options.clip_low, 1 + options.clip_high)

    def _compute_correction(self, old_BS: Tensor) -> Tensor:
        """Return importance weights for rollouts of another engine, without gradient: (B, S), or (D,) per sequence."""
        kind = self.options.correction or ""
        difference = (old_BS - self._read_column("sampling_log_probs")).nan_to_num(nan=0.0).detach()
        factor = (self._sum_by_sequence(difference) if kind.startswith("sequence") else difference).exp()
        low, high = self.options.correction_min, self.options.correction_max
        bounded = factor if low is None and high is None else factor.clamp(low, high)
        return bounded if kind.endswith("truncate") else factor.where(bounded == factor, 0.0)

    def _read_column(self, name: str) -> Tensor:
        from .functional import mask_to_targets

        return mask_to_targets(self._tokens, self._batch[name], self._log_probs_BS)

    def _sum_by_sequence(self, values_BS: Tensor) -> Tensor:
        return (
            self._tokens.sum_by_document(values_BS) if self.options.packed else self._tokens.sum_by_sequence(values_BS)
        )

    def _sum_values_by_sequence(self, values: Tensor) -> Tensor:
        """Sum values per token, or values per sequence for each token, over each sequence, (D,)."""
        return self._sum_by_sequence(values) if self.options.importance_level == "token" else values * self._lengths_D

    @cached_property
    def _lengths_D(self) -> Tensor:
        """Number of targets of each sequence, at least 1, (D,)."""
        return self._sum_by_sequence(self._tokens.mask.to(self._log_probs_BS.dtype)).clamp(min=1)
