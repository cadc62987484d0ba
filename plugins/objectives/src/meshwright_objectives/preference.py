"""Preference objectives: pairs of a chosen and a rejected answer, or single answers that are desirable or not.

A pair is two consecutive rows: 2i is chosen, 2i + 1 rejected. All labels except those of answers are masked.

Shapes: B rows of a microbatch, S positions per row, P = B / 2 pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from meshwright.plugin import (
    BatchColumns,
    Column,
    ExtraSums,
    InputKind,
    NonNegativeFloat,
    PositiveFloat,
    SequenceObjective,
)

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.plugin import Outputs, Tokens

REFERENCE_LOG_PROBS = Column("reference_log_probs", ("B", "B S"))
BETA_DESCRIPTION = "Factor of the log-ratios. A larger one keeps the model closer to the reference."
SMOOTHED_LOSSES = ("sigmoid", "robust", "exo_pair")
LabelSmoothing = Annotated[float, Field(ge=0, lt=0.5)]
PairLossName = Literal[
    "sigmoid",
    "robust",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "sigmoid_norm",
]


class DPO(SequenceObjective):
    """Preference loss without a reward model, divided by the number of pairs. With w and l the sums of
    log p - log p_reference over the chosen and the rejected answer, h = beta (w - l), s = sigmoid, token counts n_w
    and n_l, and e = label_smoothing, `loss` is

        sigmoid      -(1 - e) log s(h) - e log s(-h); cDPO if e > 0
        robust       (-(1 - e) log s(h) + e log s(-h)) / (1 - 2 e), arXiv:2403.00409
        hinge        max(0, 1 - h), arXiv:2309.06657
        ipo          (w / n_w - l / n_l - 1 / (2 beta))^2, arXiv:2310.12036
        exo_pair     KL((s(h), s(-h)) || (1 - e, e)), arXiv:2402.00856
        nca_pair     -log s(beta w) - log s(-beta w) / 2 - log s(-beta l) / 2, arXiv:2402.05369
        bco_pair     -log s(beta w) - log s(-beta l), arXiv:2404.04656
        sppo_hard    (w - 1 / (2 beta))^2 + (l + 1 / (2 beta))^2, arXiv:2405.00675
        apo_zero     1 - s(beta w) + s(beta l), arXiv:2408.06266
        apo_down     s(beta w) + 1 - s(h), arXiv:2408.06266
        sigmoid_norm -log s(beta (w / n_w - l / n_l))

    plus rpo_alpha times the mean of -log p over the chosen answer's tokens. If `reference_free`, log p_reference is 0.

    Columns: `reference_log_probs`, (B, S) as `manager.token_stats` returns them, or (B,) summed over answers.
    Sums: `rewards/chosen`, `rewards/rejected` (beta w, beta l), `rewards/margins`, `rewards/accuracies`,
    `logps/chosen`, `logps/rejected`, and `nll` with rpo_alpha; over pairs.
    Source: Rafailov et al. 2023, arXiv:2305.18290; rpo_alpha of Pang et al. 2024, arXiv:2404.19733. In trl: `loss_type`
    of DPOTrainer; its "sft" is a mean over all chosen tokens of a microbatch.
    """

    name: ClassVar[str] = "dpo"
    group_size: ClassVar[int] = 2

    loss: PairLossName = Field(default="sigmoid", description="Loss of a pair.")
    beta: PositiveFloat = Field(default=0.1, description=BETA_DESCRIPTION)
    label_smoothing: LabelSmoothing = Field(
        default=0.0, description="Assumed rate of wrong labels; for sigmoid, robust and exo_pair."
    )
    reference_free: bool = Field(default=False, description="Use no reference model; the column is not needed.")
    rpo_alpha: NonNegativeFloat = Field(
        default=0.0, description="Weight of the chosen answer's mean negative log-probability."
    )

    @model_validator(mode="after")
    def _check_smoothing(self) -> DPO:
        if self.label_smoothing and self.loss not in SMOOTHED_LOSSES:
            raise ValueError(
                f"label_smoothing={self.label_smoothing:g} has no effect on loss={self.loss!r}. Set it to 0, or loss "
                f"to one of {', '.join(SMOOTHED_LOSSES)}"
            )
        if self.loss == "exo_pair" and not self.label_smoothing:
            raise ValueError("loss='exo_pair' takes the logarithm of label_smoothing=0: set it above 0, such as 1e-3")
        return self

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        return () if self.reference_free else (REFERENCE_LOG_PROBS,)

    def __call__(self, tokens: Tokens, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        from .functional import (
            PAIR_LOSSES,
            count_targets,
            find_valid_pairs,
            masked_sums,
            sequence_log_probs,
            split_pairs,
            sum_rewards,
        )

        own_B, kept_P = sequence_log_probs(tokens), find_valid_pairs(tokens)
        ratio_B = own_B if self.reference_free else own_B - sequence_log_probs(tokens, batch[REFERENCE_LOG_PROBS.name])
        by_length = self.loss in ("ipo", "sigmoid_norm")
        chosen_P, rejected_P = split_pairs(ratio_B / count_targets(tokens) if by_length else ratio_B)
        loss_P = PAIR_LOSSES[self.loss](chosen_P, rejected_P, self.beta, self.label_smoothing)
        each = dict(zip(("logps/chosen", "logps/rejected"), split_pairs(own_B), strict=True))
        if self.rpo_alpha:
            each["nll"] = -split_pairs(own_B / count_targets(tokens))[0]
            loss_P = loss_P + self.rpo_alpha * each["nll"]
        chosen_P, rejected_P = split_pairs(self.beta * ratio_B)
        return loss_P.where(kept_P, 0.0).sum(), sum_rewards(chosen_P, rejected_P, kept_P) | masked_sums(each, kept_P)


class KTO(SequenceObjective):
    """Loss of single answers, divided by their number. With w the sum of log p - log p_reference over an answer,

        desirable_weight (1 - sigmoid(beta (w - kl))) where the answer is desirable,
        undesirable_weight (1 - sigmoid(beta (kl - w))) where it is not;

    With `loss: apo_zero_unpaired`, kl = 0.

    kl, at least 0, estimates the divergence of the model from the reference: the mean over the global batch of the
    sums of log p - log p_reference over answers to other prompts. It is not a sum over tokens of this batch, so it is
    a column, computed before the step: see docs/reference/objectives.md.

    Columns: `reference_log_probs`, (B, S) or (B,); `desirable` (B,), bool; `reference_kl` (B,), for `kto`.
    Sums: `rewards/chosen`, `logps/chosen` and their number `count/chosen` over desirable answers; `rewards/rejected`,
    `logps/rejected` and `count/rejected` over others.
    Source: Ethayarajh et al. 2024, arXiv:2402.01306; arXiv:2408.06266. In trl: KTOTrainer.
    """

    name: ClassVar[str] = "kto"

    loss: Literal["kto", "apo_zero_unpaired"] = Field(
        default="kto", description="Loss of an answer; apo_zero_unpaired does not need kl."
    )
    beta: PositiveFloat = Field(default=0.1, description=BETA_DESCRIPTION)
    desirable_weight: NonNegativeFloat = Field(default=1.0, description="Weight of desirable answers.")
    undesirable_weight: NonNegativeFloat = Field(default=1.0, description="Weight of other answers.")

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        kl = (Column("reference_kl", ("B",)),) if self.loss == "kto" else ()
        return REFERENCE_LOG_PROBS, Column("desirable", ("B",), "bool"), *kl

    def __call__(self, tokens: Tokens, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        from .functional import masked_sums, sequence_log_probs

        own_B, kept_B, wanted_B = sequence_log_probs(tokens), tokens.mask.any(1), batch["desirable"]
        ratio_B = own_B - sequence_log_probs(tokens, batch[REFERENCE_LOG_PROBS.name])
        kl_B = batch["reference_kl"].to(own_B.dtype).clamp(min=0).where(kept_B, 0.0) if self.loss == "kto" else 0.0
        good_B = wanted_B.to(own_B.dtype)
        sign_B, weight_B = 2 * good_B - 1, good_B * self.desirable_weight + (1 - good_B) * self.undesirable_weight
        loss_B = weight_B * (1 - (self.beta * sign_B * (ratio_B - kl_B)).sigmoid())
        each = {"rewards": self.beta * ratio_B, "logps": own_B, "count": own_B.new_ones(own_B.shape)}
        sums: ExtraSums = {}
        for side, kept in (("chosen", kept_B & wanted_B), ("rejected", kept_B & ~wanted_B)):
            sums |= {f"{name}/{side}": value for name, value in masked_sums(each, kept).items()}
        return loss_B.where(kept_B, 0.0).sum(), sums


class ORPO(SequenceObjective):
    """Preference loss without a reference model, divided by the number of pairs. With a and b the mean
    log-probabilities of the tokens of the chosen and the rejected answer, and odds(x) = exp(x) / (1 - exp(x)),

        -a - beta log sigmoid(log(odds(a) / odds(b)))

    Sums: those of `dpo` named `rewards/...`, for beta a and beta b; `logps/chosen`, `logps/rejected` (a, b), `nll`,
    `log_odds_ratio`, `log_odds_chosen`; over pairs.
    Source: Hong et al. 2024, arXiv:2403.07691, equations 6 and 7, where beta is lambda. In trl: ORPOTrainer
    (experimental), whose first term covers prompt and answer, and is a mean over all chosen tokens of a microbatch.
    """

    name: ClassVar[str] = "orpo"
    group_size: ClassVar[int] = 2

    beta: NonNegativeFloat = Field(default=0.1, description="Weight of the odds ratio term.")

    def __call__(self, tokens: Tokens, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        from .functional import (
            count_targets,
            find_valid_pairs,
            log1mexp,
            log_sigmoid,
            masked_sums,
            sequence_log_probs,
            split_pairs,
            sum_rewards,
        )

        own_B, kept_P = sequence_log_probs(tokens), find_valid_pairs(tokens)
        # A row without targets has probability 1, whose odds are infinite.
        mean_B = (own_B / count_targets(tokens)).where(tokens.mask.any(1), -1.0)
        chosen_P, rejected_P = split_pairs(mean_B)
        odds_P = (chosen_P - rejected_P) - (log1mexp(chosen_P) - log1mexp(rejected_P))
        ratio_P = log_sigmoid(odds_P)
        each = {"logps/chosen": chosen_P, "logps/rejected": rejected_P, "nll": -chosen_P}
        each |= {"log_odds_ratio": ratio_P, "log_odds_chosen": odds_P}
        rewards = sum_rewards(self.beta * chosen_P, self.beta * rejected_P, kept_P)
        return (-chosen_P - self.beta * ratio_P).where(kept_P, 0.0).sum(), rewards | masked_sums(each, kept_P)


class SimPO(SequenceObjective):
    """Preference loss on mean log-probabilities, divided by the number of pairs; a is of the chosen, b of the rejected:

        -(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta (a - b) - gamma, e = label_smoothing

    plus sft_weight times -a.

    Sums: those of `dpo` named `rewards/...`, for beta a and beta b; `logps/chosen`, `logps/rejected` (a, b),
    `nll`; over pairs.
    Source: Meng et al. 2024, arXiv:2405.14734. In trl: CPOTrainer (experimental) with loss_type="simpo", `simpo_gamma`,
    and `cpo_alpha` for sft_weight, which it takes as a mean over all chosen tokens of a microbatch.
    """

    name: ClassVar[str] = "simpo"
    group_size: ClassVar[int] = 2

    beta: PositiveFloat = Field(default=2.0, description="Factor of the mean log-probabilities.")
    gamma: NonNegativeFloat = Field(default=0.5, description="Target margin between chosen and rejected.")
    label_smoothing: LabelSmoothing = Field(default=0.0, description="Assumed rate of wrong labels.")
    sft_weight: NonNegativeFloat = Field(default=0.0, description="Weight of the chosen answer's cross entropy.")

    def __call__(self, tokens: Tokens, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        from .functional import (
            count_targets,
            find_valid_pairs,
            masked_sums,
            sequence_log_probs,
            smoothed_preference_loss,
            split_pairs,
            sum_rewards,
        )

        kept_P = find_valid_pairs(tokens)
        chosen_P, rejected_P = split_pairs(sequence_log_probs(tokens) / count_targets(tokens))
        loss_P = smoothed_preference_loss(self.beta * (chosen_P - rejected_P) - self.gamma, self.label_smoothing)
        if self.sft_weight:
            loss_P = loss_P - self.sft_weight * chosen_P
        each = {"logps/chosen": chosen_P, "logps/rejected": rejected_P, "nll": -chosen_P}
        rewards = sum_rewards(self.beta * chosen_P, self.beta * rejected_P, kept_P)
        return loss_P.where(kept_P, 0.0).sum(), rewards | masked_sums(each, kept_P)


class Reward(SequenceObjective):
    """Reward model loss, divided by the number of pairs; c is the reward of the chosen row, r of the rejected one:

        -log sigmoid(c - r - margin) + center_coefficient (c + r)^2

    Row 2i is chosen, 2i + 1 rejected.

    Columns: `margin` (B,), of which the value of the chosen row is used, optional.
    Sums: `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies`.
    Source: Bradley and Terry 1952; margin of Touvron et al. 2023, arXiv:2307.09288; centring of Eisenstein et al.
    2023, arXiv:2312.09244. In trl: RewardTrainer, `center_rewards_coefficient`.
    """

    name: ClassVar[str] = "reward"
    input_kind: ClassVar[InputKind] = "outputs"
    group_size: ClassVar[int] = 2

    center_coefficient: NonNegativeFloat = Field(
        default=0.0, description="Weight of the squared sum of a pair's rewards."
    )

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        return (Column("margin", ("B",), is_required=False),)

    def __call__(self, outputs: Outputs, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        from .functional import find_valid_pairs, log_sigmoid, select_head_output, split_pairs, sum_rewards

        kept_P = find_valid_pairs(outputs)
        chosen_P, rejected_P = split_pairs(select_head_output(outputs.logits, 2, self.name))
        margin_P = chosen_P - rejected_P
        if "margin" in batch:
            margin_P = margin_P - split_pairs(batch["margin"].to(margin_P.dtype))[0].where(kept_P, 0.0)
        loss_P = -log_sigmoid(margin_P)
        if self.center_coefficient:
            loss_P = loss_P + self.center_coefficient * (chosen_P + rejected_P) ** 2
        return loss_P.where(kept_P, 0.0).sum(), sum_rewards(chosen_P, rejected_P, kept_P)
