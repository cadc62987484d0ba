"""What is trained to compare strategies, and what is compared: the same global batches under every layout."""

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
    """What is trained: the same global batches under every layout.

    Attributes:
        model_type: a name for `meshwright_testing.models.build_case_model`.
        tied: whether embedding and head are one parameter; None: the model type's default.
        layers: number of blocks; None: the model's own.
        steps: optimizer steps.
        sequences: sequences of a step, over all ranks.
        microbatches: microbatches of each rank in a step.
        ragged: mask a random part of each sequence, so that ranks see different numbers of tokens.
        num_masked_sequences: leading sequences of each step that are masked entirely, so that a rank has no token.
        shares: sequences of each data rank, where they differ; None: equal shares.
        max_norm, norm_type: clipping.
        frozen: shell patterns of parameters that do not train.
        optimizer: which optimizer, with its settings.
        group_settings: (shell pattern, learning rate, weight decay) of parameters with settings of their own, in the
            order of their groups; the rest follows `optimizer`.
        dtype: of the model.
        float32_parameters: shell patterns of parameters that are kept in float32, as transformers keeps routers.
        eval_after: evaluate after each step, too.
        unshard_after: hold the full parameters for a moment after each step, and compare them with those that
            `iter_parameters` yields.
        schedule: of the learning rate; None: constant.
        route: which sequences take the branch of the "routed" model: "steps" (in no sequence of the second step) or
            "ranks" (in those of the first half only); None: by chance.
        adapter: options for `meshwright_testing.models.attach_adapter`: an adapter, which alone trains.
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
        """Return the case as one rank runs it, each step in so many microbatches."""
        return replace(self, shares=None, microbatches=microbatches)

    @property
    def tolerance(self) -> float:
        """Absolute tolerance between layouts: each rounds sums of parts in float32 in its own way."""
        return FLOAT32_TOLERANCE if self.float32_parameters else TOLERANCE


@dataclass(frozen=True)
class Outcome:
    """What a rank saw: losses and norms of each step, and the full weights at the end."""

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
        # Each sequence keeps a share of its own, between almost nothing and everything.
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
