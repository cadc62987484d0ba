"""Supervised objectives: cross entropy, distillation, unlikelihood.

Shapes: B rows of a microbatch, S positions per row, K entries per position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from meshwright.plugin import (
    BatchColumns,
    Column,
    ExtraSums,
    Fraction,
    NonNegativeFloat,
    ObjectiveConfig,
    PositiveFloat,
    get_target_mask,
)

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.plugin import Tokens


class CrossEntropy(ObjectiveConfig):
    """Cross entropy of the next token with label smoothing, z-loss and weights, divided by the number of targets.

    For each target y with weight w, p = softmax(l) over V entries, and Z = sum(exp(l)):

        w ((1 - label_smoothing) (-log p_y) + label_smoothing / V sum_v(-log p_v) + z_loss (log Z)^2)

    Targets of weight 0 are not counted. So weights of 0 and 1 act as a mask, with the same mean as in torch and
    Megatron. Other weights are not normalized; their sum is in `last_sums["weights"]`.

    Columns: `weights` (B, S), optional.
    Sums: `correct`, the number of targets with no likelier token, and `entropy`, if in `extra_sums`; `weights` with
    the column.
    Sources: `label_smoothing` of torch.nn.functional.cross_entropy (Szegedy et al. 2016, arXiv:1512.00567); z-loss of
    Chowdhery et al. 2022, arXiv:2204.02311, section 5. In trl: SFTTrainer, whose `mean_token_accuracy` is `correct`.
    """

    name: ClassVar[str] = "cross_entropy"

    label_smoothing: Fraction = Field(default=0.0, description="Probability that is spread evenly over the vocabulary.")
    z_loss: NonNegativeFloat = Field(default=0.0, description="Weight of the squared logsumexp; 1e-4 in the paper.")
    extra_sums: list[Literal["correct", "entropy"]] = Field(
        default=[], description="Further values to sum; each adds some cost."
    )

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        return (Column("weights", ("B S",), is_required=False),)

    def count(self, batch: BatchColumns) -> int:
        counted = get_target_mask(batch)
        if "weights" in batch:
            counted = counted & (batch["weights"][:, :-1] != 0)
        return int(counted.sum())

    def __call__(self, tokens: Tokens, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        from .functional import mask_to_targets, masked_sums

        loss_BS = -tokens.log_probs
        if self.label_smoothing:
            even_BS = tokens.logsumexp - tokens.mean_logit
            loss_BS = (1 - self.label_smoothing) * loss_BS + self.label_smoothing * even_BS
        if self.z_loss:
            loss_BS = loss_BS + self.z_loss * tokens.logsumexp**2
        kept_BS, each = tokens.mask, {}
        if "weights" in batch:
            weights_BS = mask_to_targets(tokens, batch["weights"], loss_BS)
            loss_BS, kept_BS = loss_BS * weights_BS, kept_BS & (weights_BS != 0)
            each["weights"] = weights_BS
        if "correct" in self.extra_sums:
            each["correct"] = tokens.is_top1.to(loss_BS.dtype)
        if "entropy" in self.extra_sums:
            each["entropy"] = tokens.entropy
        return loss_BS.where(kept_BS, 0.0).sum(), masked_sums(each, kept_BS)


class Unlikelihood(ObjectiveConfig):
    """Cross entropy plus a penalty on the candidates C of each target y, divided by the number of targets:

        -log p_y - alpha sum_{c in C} log(1 - p_c), where 1 - p_c is at least 1e-5, as in the authors' code

    Columns: `negatives` (B, S, K), int64, padded with -100; `meshwright.objectives.previous_tokens` returns those of
    the paper.
    Sums: `nll` and `unlikelihood`, the two terms, without alpha.
    Source: Welleck et al. 2020, arXiv:1908.04319, equation 4. Not in trl.
    """

    name: ClassVar[str] = "unlikelihood"

    alpha: NonNegativeFloat = Field(default=1.0, description="Weight of the unlikelihood term.")

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        return (Column("negatives", ("B S K",), "int"),)

    def __call__(self, tokens: Tokens, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        from .functional import MASKED_LOG_PROB, mask_ids, masked_sums

        nll_BS, kept_BS = -tokens.log_probs, tokens.mask
        ids_BSK, valid_BSK = mask_ids(batch["negatives"], kept_BS)
        log_probs_BSK = tokens.log_probs_for(ids_BSK).where(valid_BSK, MASKED_LOG_PROB)
        unlikely_BS = -(-log_probs_BSK.expm1()).clamp(min=1e-5).log().sum(-1)
        each = {"nll": nll_BS, "unlikelihood": unlikely_BS}
        return (nll_BS + self.alpha * unlikely_BS).sum(), masked_sums(each, kept_BS)


class Distill(ObjectiveConfig):
    """Divergence of the student p from the top entries of a teacher q, divided by the number of targets:

        weight D + (1 - weight) (-log p_y), where y is the label

    D is the forward KL(q || p) for `beta` 0, the reverse KL(p || q) for 1, and between them the generalized
    Jensen-Shannon divergence beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p. The mass outside of
    the teacher's entries becomes one more entry (`tail: entry`), or p and q are renormalized over these entries
    (`tail: renormalize`).

    The temperature divides all logits. It requires `tail: renormalize`, where the sum over other entries cancels.
    `teacher_log_probs` are those at temperature 1. The loss is not multiplied by the squared temperature.

    Columns: `teacher_ids` (B, S, K), int64, padded with -100; `teacher_log_probs` (B, S, K).
    Sums: `divergence`, and `nll` with a weight below 1.
    Source: Hinton et al. 2015, arXiv:1503.02531; Agarwal et al. 2024, arXiv:2306.13649. In trl: `beta` of
    DistillationTrainer and GKDTrainer; with the server's top-k, `tail: entry` is `loss_add_tail=True`.
    """

    name: ClassVar[str] = "distill"

    beta: Fraction = Field(default=0.0, description="0: forward KL; 1: reverse KL; between: Jensen-Shannon.")
    tail: Literal["entry", "renormalize"] = Field(
        default="entry",
        description="Treatment of the mass outside of the teacher's entries: one more entry, or renormalization.",
    )
    temperature: PositiveFloat = Field(
        default=1.0, description="Temperature of student and teacher; other than 1 only with tail: renormalize."
    )
    weight: Fraction = Field(
        default=1.0, description="Weight of the divergence; 1 - weight is that of the cross entropy."
    )

    @model_validator(mode="after")
    def _check_temperature(self) -> Distill:
        if self.temperature != 1 and self.tail == "entry":
            raise ValueError(
                f"temperature={self.temperature:g} with tail='entry' would need a sum over the full vocabulary. Set "
                f"temperature=1, or tail='renormalize'"
            )
        return self

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        return Column("teacher_ids", ("B S K",), "int"), Column("teacher_log_probs", ("B S K",))

    def __call__(self, tokens: Tokens, batch: BatchColumns) -> tuple[Tensor, ExtraSums]:
        from .functional import MASKED_LOG_PROB, generalized_jsd, mask_ids, masked_sums

        kept_BS = tokens.mask
        ids_BSK, valid_BSK = mask_ids(batch["teacher_ids"], kept_BS)
        student_BSK = tokens.log_probs_for(ids_BSK)
        teacher_BSK = batch["teacher_log_probs"].to(student_BSK.dtype).clamp(min=MASKED_LOG_PROB)
        student_BSK, teacher_BSK = (
            self._to_distribution(each.where(valid_BSK, MASKED_LOG_PROB)) for each in (student_BSK, teacher_BSK)
        )
        found_BS = generalized_jsd(student_BSK, teacher_BSK, self.beta).where(valid_BSK.any(-1), 0.0)
        loss_BS, each = found_BS, {"divergence": found_BS}
        if self.weight < 1:
            each["nll"] = -tokens.log_probs
            loss_BS = self.weight * found_BS + (1 - self.weight) * each["nll"]
        return loss_BS.sum(), masked_sums(each, kept_BS)

    def _to_distribution(self, log_probs_BSK: Tensor) -> Tensor:
        """Return the log-probabilities of a full distribution, (B, S, K) or (B, S, K + 1)."""
        from .functional import append_tail

        if self.tail == "entry":
            return append_tail(log_probs_BSK)
        return (log_probs_BSK / self.temperature).log_softmax(-1)
