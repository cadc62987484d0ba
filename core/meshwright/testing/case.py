"""What is trained to compare strategies, and what is compared: the same global batches under every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..base.types import IGNORED_LABEL, Batch
from ..train.run.run_file import OptimizerConfig, ScheduleConfig
from .models import case_vocab

TOLERANCE = 1e-9


ROUNDED = 1e-5


@dataclass(frozen=True)
class Case:
    """What is trained: the same global batches under every layout.

    Attributes:
        model_type: a name for `meshwright.testing.models.case_model`.
        tied: embedding and head are one parameter; None: the model type's default.
        steps: optimizer steps.
        sequences: sequences of a step, over all ranks.
        microbatches: microbatches of each rank in a step.
        ragged: mask a random part of each sequence, so that ranks see different numbers of tokens.
        empty: leading sequences of each step that are masked wholly, so that a rank has no token.
        shares: sequences of each data rank, where they differ; None: equal shares.
        max_norm, norm_type: clipping.
        frozen: shell patterns of parameters that do not train.
        optimizer: of the run file.
        rates: (shell pattern, learning rate, weight decay) of parameters that have their own, in the order of their
            groups; others have those of `optimizer`.
        dtype: of the model.
        in_float32: shell patterns of parameters that are kept in float32 beside it, as transformers keeps routers.
        eval_after: evaluate after each step, too.
        unshard_after: hold the full parameters for a moment after each step, and compare them with those that
            `iter_parameters` gives.
        schedule: of the learning rate; None: constant.
        adapter: fields of peft's `LoraConfig`, for a model with an adapter, which alone trains; see `adapters`.
        route: which sequences take the branch of the "routed" model: "steps" (in no sequence of the second step) or
            "ranks" (in those of the first half only); None: by chance.
    """

    model_type: str = "llama"
    tied: bool | None = False
    layers: int | None = None
    steps: int = 3
    sequences: int = 12
    microbatches: int = 1
    ragged: bool = True
    empty: int = 0
    shares: tuple[int, ...] | None = None
    max_norm: float | None = 0.5
    norm_type: float = 2.0
    frozen: tuple[str, ...] = ()
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-2, weight_decay=0.1))
    rates: tuple[tuple[str, float, float], ...] = ()
    dtype: str = "float64"
    in_float32: tuple[str, ...] = ()
    eval_after: bool = False
    unshard_after: bool = False
    schedule: ScheduleConfig | None = None
    route: str | None = None
    adapter: Mapping[str, Any] | None = None

    def __hash__(self) -> int:
        return hash(repr(self))

    def undivided(self, microbatches: int = 1) -> Case:
        """The case as one rank runs it, each step in so many microbatches."""
        return replace(self, shares=None, microbatches=microbatches)

    @property
    def tolerance(self) -> float:
        """Within what layouts agree: sums of parts in float32 are rounded anew in each."""
        return ROUNDED if self.in_float32 else TOLERANCE


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


def global_batch(case: Case, step: int) -> dict[str, Tensor]:
    """`input_ids` and `labels` of one step, int64, (sequences, 16)."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (case.sequences, 16)
    ids = torch.randint(0, case_vocab(case.model_type), shape, generator=generator)
    if case.route is not None:
        odd = torch.full((case.sequences,), step == 1) if case.route == "steps" else _second_half(case.sequences)
        ids[:, 0] = ids[:, 0] // 2 * 2 + odd.long()
        ids.clamp_(max=case_vocab(case.model_type) - 1)
    labels = ids.clone()
    if case.ragged:
        # Each sequence keeps a share of its own, between almost nothing and everything.
        keep = torch.rand(case.sequences, 1, generator=generator)
        labels[torch.rand(shape, generator=generator) > keep] = IGNORED_LABEL
    labels[: case.empty] = IGNORED_LABEL
    return {"input_ids": ids, "labels": labels}


def _second_half(count: int) -> Tensor:
    return torch.arange(count) >= count // 2


def share(case: Case, step: int, data_rank: int, data_size: int) -> list[Batch]:
    """One data rank's microbatches of a step."""
    sizes = case.shares or (case.sequences // data_size,) * data_size
    if len(sizes) != data_size or sum(sizes) != case.sequences:
        raise ValueError(f"shares {sizes} do not split {case.sequences} sequences over {data_size} ranks")
    start = sum(sizes[:data_rank])
    mine = {key: value[start : start + sizes[data_rank]] for key, value in global_batch(case, step).items()}
    parts = {key: value.tensor_split(case.microbatches) for key, value in mine.items()}
    return [{key: chunks[index] for key, chunks in parts.items()} for index in range(case.microbatches)]
