"""Training cases for the comparison of strategies, their batches, and the outcomes that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.plugin import IGNORE_INDEX, Batch, OptimizerConfig, ScheduleConfig

from .models import case_vocab_size

TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """Training case: a model, an optimizer, and global batches that are equal under every layout.

    Attributes:
        model_type: name for `meshwright_testing.models.build_case_model`.
        tied: whether embedding and head are one parameter; None for the model type's default.
        layers: number of blocks; None for the model's default.
        steps: number of optimizer steps.
        sequences: number of sequences per step, over all ranks.
        microbatches: number of microbatches per rank and step.
        ragged: whether to mask a random part of each sequence, so that ranks have different numbers of tokens.
        num_masked_sequences: number of leading sequences of each step whose labels are all masked, so that a rank has
            no tokens.
        shares: number of sequences of each data rank; None for equal shares.
        max_norm, norm_type: arguments of gradient clipping.
        frozen: shell patterns of frozen parameters.
        optimizer: optimizer with its settings.
        group_settings: (shell pattern, learning rate, weight decay) of each additional parameter group; the other
            parameters use `optimizer`.
        dtype: dtype of the model.
        float32_parameters: shell patterns of parameters in float32, in which transformers keeps routers.
        eval_after: whether to evaluate after each step.
        unshard_after: whether to unshard the parameters after each step, and compare them with `iter_parameters`.
        schedule: schedule of the learning rate; None for a constant one.
        route: sequences that take the branch for even tokens in the "routed" model: "steps" (none in the second step)
            or "ranks" (only the first half of each step); None for random ones.
        adapter: options for `meshwright_testing.models.attach_adapter`; only the adapter is trained.
    """

    model_type: str = "llama"
    tied: bool | None = False
    layers: int | None = None
    steps: int = 3
    sequences: int = 12
    microbatches: int = 1
    ragged: bool = True
    num_masked_sequences: int = 0
    shares: tuple[int, ...] | None = None
    max_norm: float | None = 0.5
    norm_type: float = 2.0
    frozen: tuple[str, ...] = ()
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-2, weight_decay=0.1))
    group_settings: tuple[tuple[str, float, float], ...] = ()
    dtype: str = "float64"
    float32_parameters: tuple[str, ...] = ()
    eval_after: bool = False
    unshard_after: bool = False
    schedule: ScheduleConfig | None = None
    route: str | None = None
    adapter: Mapping[str, Any] | None = None

    def __hash__(self) -> int:
        return hash(repr(self))

    def on_one_rank(self, microbatches: int = 1) -> Case:
        """Return the case for one rank, with this number of microbatches per step."""
        return replace(self, shares=None, microbatches=microbatches)

    @property
    def tolerance(self) -> float:
        """Absolute tolerance between layouts, larger if parts are in float32, whose sums depend on the layout."""
        return FLOAT32_TOLERANCE if self.float32_parameters else TOLERANCE


@dataclass(frozen=True)
class Outcome:
    """Results of a rank: losses and norms of each step, and the full weights at the end."""

    losses: list[float]
    norms: list[float]
    eval_losses: list[float]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """Largest absolute differences between a strategy's ranks and the reference."""

    loss: float
    norm: float
    weight: float
    eval_loss: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, self.weight, self.eval_loss)


def build_global_batch(case: Case, step: int) -> dict[str, Tensor]:
    """Return `input_ids` and `labels` of one step, int64, (sequences, 16)."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape, vocab = (case.sequences, 16), case_vocab_size(case.model_type)
    ids = torch.randint(0, vocab, shape, generator=generator)
    if case.route is not None:
        is_second_half = torch.arange(case.sequences) >= case.sequences // 2
        odd = torch.full((case.sequences,), step == 1) if case.route == "steps" else is_second_half
        ids[:, 0] = ids[:, 0] // 2 * 2 + odd.long()
        ids.clamp_(max=vocab - 1)
    labels = ids.clone()
    if case.ragged:
        # Each sequence keeps a random fraction of its labels, from almost none to all.
        keep = torch.rand(case.sequences, 1, generator=generator)
        labels[torch.rand(shape, generator=generator) > keep] = IGNORE_INDEX
    labels[: case.num_masked_sequences] = IGNORE_INDEX
    return {"input_ids": ids, "labels": labels}


def split_sequences(case: Case, data_size: int) -> tuple[int, ...]:
    """Return the number of sequences of each data rank in a step."""
    sizes = case.shares or (case.sequences // data_size,) * data_size
    if len(sizes) != data_size or sum(sizes) != case.sequences:
        raise ValueError(f"shares {sizes} do not split {case.sequences} sequences over {data_size} ranks")
    return sizes


def rank_microbatches(case: Case, step: int, data_rank: int, data_size: int) -> list[Batch]:
    """Return one data rank's microbatches of a step."""
    sizes = split_sequences(case, data_size)
    start = sum(sizes[:data_rank])
    parts = {
        key: value[start : start + sizes[data_rank]].tensor_split(case.microbatches)
        for key, value in build_global_batch(case, step).items()
    }
    return [{key: chunks[index] for key, chunks in parts.items()} for index in range(case.microbatches)]
