"""Where objectives and statistics of tokens are proven: layouts, microbatches with columns, and an objective that uses
everything.

Shapes: B sequences of a microbatch, S positions of each, K ids at each position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshwright import count_tokens
from meshwright.base.types import IGNORE_INDEX, Batch
from meshwright.objectives import get_objective
from meshwright.step.tokens import Tokens, shift_labels
from meshwright.strategy.contract import StrategyManager
from meshwright_testing.case import Case, Outcome, build_global_batch
from meshwright_testing.parity import build_manager, full_weights


@dataclass(frozen=True)
class ObjectiveLayout:
    """Some ranks under a strategy.

    Attributes:
        config, sizes, wrapper: options of the strategy, of the mesh, and of what wraps the strategy.
        data_ranks: with batches of their own.
        model: that is trained unless a test names another.
    """

    ranks: int
    strategy: str
    config: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    wrapper: Mapping[str, Any] = field(default_factory=dict)
    data_ranks: int = 1
    model: str = "llama"

    def build(self, case: Case, config: Mapping[str, Any] | None = None) -> StrategyManager:
        """On every rank: the manager, ready to train."""
        wrapper = {"pipeline": dict(self.wrapper)} if self.wrapper else None
        return build_manager(self.strategy, {**self.config, **(config or {})}, self.sizes, case, wrapper_config=wrapper)


ZERO1 = {"engine": "bucketed", "use_distributed_optimizer": True}
LAYOUTS: dict[str, ObjectiveLayout] = {
    "single": ObjectiveLayout(1, "single"),
    "ddp": ObjectiveLayout(2, "ddp", data_ranks=2),
    "ddp-zero1": ObjectiveLayout(2, "ddp", ZERO1, data_ranks=2),
    "fsdp2": ObjectiveLayout(2, "fsdp2", data_ranks=2),
    "hsdp": ObjectiveLayout(4, "fsdp2", {}, {"dp_replicate_size": 2}, data_ranks=4),
    "tp": ObjectiveLayout(2, "fsdp2", {}, {"tp_size": 2}),
    "tp-sequence": ObjectiveLayout(2, "fsdp2", {"sequence_parallel": True}, {"tp_size": 2}),
    "cp": ObjectiveLayout(2, "fsdp2", {}, {"cp_size": 2}),
    "cp-ulysses": ObjectiveLayout(2, "fsdp2", {"cp_attention": "ulysses"}, {"cp_size": 2}),
    "ep": ObjectiveLayout(2, "fsdp2", {}, {"ep_size": 2}, data_ranks=2, model="mixtral"),
    "pp": ObjectiveLayout(4, "fsdp2", {}, {"pp_size": 2}, data_ranks=2),
    "pp-interleaved": ObjectiveLayout(2, "fsdp2", {}, {"pp_size": 2}, {"pp_schedule": "interleaved1f1b"}),
    "pp-tp": ObjectiveLayout(4, "fsdp2", {}, {"pp_size": 2, "tp_size": 2}),
    "pp-cp": ObjectiveLayout(4, "fsdp2", {}, {"pp_size": 2, "cp_size": 2}),
    "megatron_fsdp": ObjectiveLayout(2, "megatron_fsdp", data_ranks=2),
}

SHARES = {1: (12,), 2: (7, 5), 4: (4, 2, 3, 3)}
"""Sequences of each data rank in a step, by their number."""


def build_case(layout: ObjectiveLayout, **options: Any) -> Case:
    """What a layout trains; four blocks, of which stages get one at least."""
    tied = None if layout.model != "llama" else False
    return Case(**{"model_type": layout.model, "tied": tied, "layers": 4, "steps": 4, **options})


# -- microbatches


def build_columns(batch: Batch) -> dict[str, Tensor]:
    """What `Everything` takes, made of the ids alone: (B,), (B, S) and (B, S, K)."""
    ids_BS = batch["input_ids"]
    wave_BS = ids_BS.double() + torch.arange(ids_BS.shape[1])
    # The label itself, another entry twice, and one that is missing at half of the positions.
    other_BS = (ids_BS * 7 + 3) % 100
    missing_BS = other_BS.where(ids_BS % 2 == 0, IGNORE_INDEX)
    return {
        "beta": (wave_BS[:, 0] * 0.3).sin() * 0.1,
        "real": torch.ones(len(ids_BS), dtype=torch.float64),
        "old": -4.8 + 0.1 * (wave_BS * 0.77).cos(),
        "advantage": (wave_BS * 0.37).sin(),
        "ids": torch.stack([shift_labels(batch["labels"]), other_BS, other_BS, missing_BS], -1),
        "scales": torch.stack([(wave_BS * part).cos() * 0.1 for part in (0.11, 0.23, 0.31, 0.47)], -1),
    }


def pack_documents(batch: Batch) -> dict[str, Tensor]:
    """With two documents in each row, which part at another place in each."""
    ids_BS = batch["input_ids"]
    at_BS, first_B1 = torch.arange(ids_BS.shape[1]).expand(ids_BS.shape), 3 + ids_BS[:, :1] % 9
    return {**batch, "position_ids": torch.where(at_BS < first_B1, at_BS, at_BS - first_B1)}


def add_padding_row(batch: Batch) -> dict[str, Tensor]:
    """With a row behind the others that counts for nothing."""
    more = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in batch.items()}
    more["labels"][-1] = IGNORE_INDEX
    more["real"][-1] = 0.0
    return more


def build_microbatches(case: Case, step: int, data_rank: int, data_ranks: int, *, count: int = 2) -> list[Batch]:
    """One data rank's: of different numbers of rows, packed; every second rank's last has a row without labels."""
    shares = SHARES[data_ranks]
    start, size = sum(shares[:data_rank]), shares[data_rank]
    mine = {name: tensor[start : start + size] for name, tensor in build_global_batch(case, step).items()}
    parts = zip(*(tensor.tensor_split(count) for tensor in mine.values()), strict=True)
    found: list[Batch] = []
    for part in parts:
        batch = pack_documents(dict(zip(mine, part, strict=True)))
        found.append(batch | build_columns(batch))
    if data_rank % 2:
        found[-1] = add_padding_row(found[-1])
    return found


# -- objectives


def combined_objective(tokens: Tokens, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Each statistic, sum and kind of column, so that each part of the gradient depends on where it is."""
    mask, real_B1 = tokens.mask, batch["real"][:, None]
    ratio_BS = (tokens.log_probs - batch["old"]).exp()
    gains_BS = ratio_BS * batch["advantage"]
    clipped_BS = ratio_BS.clamp(0.8, 1.2) * batch["advantage"]
    policy = -(torch.minimum(gains_BS, clipped_BS) * mask).sum()
    given_BSK = batch["ids"] != IGNORE_INDEX
    some = (tokens.log_probs_for(batch["ids"]).exp() * given_BSK * batch["scales"] * real_B1[..., None]).sum()
    wholes_B = tokens.sum_by_sequence(tokens.log_probs)
    sequences = (F.softplus(wholes_B * batch["beta"]) * mask.any(1)).sum()
    documents_D = tokens.sum_by_document(tokens.log_probs * batch["advantage"])
    documents = documents_D.square().sum() * 1e-2
    # Of all positions of rows that count, masked or not.
    shape = ((tokens.entropy * 0.1 + tokens.logsumexp.square() * 1e-2 + tokens.mean_logit * 0.3) * real_B1).sum()
    value = policy + some * 10.0 + sequences + documents + shape + batch["real"].sum()
    return value, {
        "correct": (tokens.is_top1 * batch["advantage"]).sum(),
        "documents": (tokens.sum_by_document(mask) > 0).sum(),
        "entropy": (tokens.entropy * mask).sum(),
        "rows": batch["real"].sum(),
        "squares": wholes_B.square().sum() * 1e-4,
    }


class SequenceCountObjective:
    """`combined_objective`, divided by the number of sequences that have labels."""

    name, columns = "counting", ("beta", "real", "old", "advantage", "ids", "scales")

    def __call__(self, tokens: Tokens, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return combined_objective(tokens, batch)

    def count(self, batch: Batch) -> int:
        return int((shift_labels(batch["labels"]) != IGNORE_INDEX).any(1).sum())


# -- training

Batches = Callable[[Case, int, int, int], Sequence[Batch]]
"""A data rank's microbatches of a step: (case, step, data rank, data ranks)."""


def train_with_objective(
    layout: ObjectiveLayout,
    case: Case,
    objective: Any,
    batches: Batches = build_microbatches,
    *,
    config: Mapping[str, Any] | None = None,
    announces: bool = False,
    computes_stats: bool = False,
) -> Outcome:
    """The task of one rank: steps and evaluations with an objective; its sums are among the losses.

    Args:
        announces: each step is announced, with its objective.
        computes_stats: statistics of tokens are asked for between the steps.
    """
    return train_manager(
        layout.build(case, config), case, objective, batches, announces=announces, computes_stats=computes_stats
    )


def train_manager(
    manager: StrategyManager,
    case: Case,
    objective: Any,
    batches: Batches = build_microbatches,
    *,
    announces: bool = False,
    computes_stats: bool = False,
    evaluates: bool = True,
) -> Outcome:
    """As `trained`, of a manager that is there."""
    mesh, losses, norms, evaluated = manager.mesh, [], [], []
    for step in range(case.steps):
        mine = batches(case, step, mesh.data_rank, mesh.data_size)
        count = manager.begin_step_sync(mine, objective=objective) if announces else count_tokens(mine, mesh, objective)
        losses += [float(manager.forward_backward(mine, num_tokens=count, objective=objective)), *_read_sums(manager)]
        norms.append(float(manager.clip_grad_norm(case.max_norm)))
        manager.optimizer_step()
        if computes_stats:
            manager.token_stats(mine, ["log_probs", "entropy"])
        if not evaluates:
            continue
        count = count_tokens(mine, mesh, objective)
        evaluated += [float(manager.eval_loss(mine, num_tokens=count, objective=objective)), *_read_sums(manager)]
    return Outcome(losses, norms, evaluated, full_weights(manager))


def _read_sums(manager: StrategyManager) -> list[float]:
    return [float(each) for _, each in sorted(manager.last_sums.items())]


# -- the objectives that ship

SHIPPED: dict[str, dict[str, Any]] = {
    "cross_entropy": {"label_smoothing": 0.1, "z_loss": 1e-2, "extra_sums": ["correct", "entropy"]},
    "dpo": {"rpo_alpha": 0.5, "label_smoothing": 0.1},
    "kto": {"undesirable_weight": 0.7},
    "simpo": {"sft_weight": 0.3},
    "grpo": {"beta": 0.04, "entropy_coef": 0.01, "normalize": "tokens"},
    "gspo": {"name": "grpo", "importance_level": "sequence", "clip_low": 3e-2, "clip_high": 4e-2, "beta": 0.1},
    "grpo of documents": {"name": "grpo", "packed": True, "delta": 1.5, "correction": "sequence_truncate"},
    "ppo": {"entropy_coef": 0.01, "clip_high": 0.28},
    "distill": {"beta": 0.3, "weight": 0.5},
    "unlikelihood": {"alpha": 0.5},
}
PAIRS = {1: (8,), 2: (5, 3), 4: (3, 1, 2, 2)}
"""Pairs of rows of each data rank in a step, by their number."""


def build_shipped_objective(name: str) -> Any:
    """The objective of an entry of `SHIPPED`, or `combined_objective`."""
    return combined_objective if name == "everything" else get_objective({"name": name, **SHIPPED[name]})


def build_all_columns(batch: Batch) -> dict[str, Tensor]:
    """Of `combined_objective`, and what any objective that ships takes."""
    ids_BS = batch["input_ids"]
    wave_BS = ids_BS.double() + torch.arange(ids_BS.shape[1])
    logits_BSK = torch.stack([(wave_BS * part).sin() for part in (0.13, 0.29, 0.41)], -1)
    ids_BSK = torch.stack([(ids_BS + shift) % 100 for shift in (0, 1, 17)], -1)
    return build_columns(batch) | {
        "reference_log_probs": -4.8 + 0.2 * (wave_BS * 0.71).cos(),
        "old_log_probs": -4.85 + 0.2 * (wave_BS * 0.59).sin(),
        "sampling_log_probs": -4.9 + 0.1 * (wave_BS * 0.43).sin(),
        "weights": (wave_BS * 0.53).cos().abs().round(decimals=1),
        "advantages": (wave_BS * 0.37).sin(),
        "desirable": ids_BS[:, 0] % 2 == 0,
        "reference_kl": (wave_BS[:, 1] * 0.3).sin().abs(),
        "negatives": (ids_BSK * 3 + 1).where(ids_BSK % 5 > 0, IGNORE_INDEX) % 100,
        "teacher_ids": ids_BSK,
        "teacher_log_probs": logits_BSK.log_softmax(-1) - 0.7,
    }


def build_pair_microbatches(case: Case, step: int, data_rank: int, data_ranks: int) -> list[Batch]:
    """One data rank's microbatches: two of three pairs at most, unequal, and filled up with rows without labels."""
    shares = PAIRS[data_ranks]
    start, size = 2 * sum(shares[:data_rank]), 2 * shares[data_rank]
    mine = {name: tensor[start : start + size] for name, tensor in build_global_batch(case, step).items()}
    found: list[Batch] = []
    cut = (size // 2 + 1) // 2 * 2
    for part in (slice(0, cut), slice(cut, None)):
        batch = pack_documents({name: tensor[part] for name, tensor in mine.items()})
        found.append({**batch, **build_all_columns(batch)})
    rows = 2 if data_rank % 2 else 0
    return [_add_padding_rows(each, found[0], rows if len(each["labels"]) else 2) for each in found]


def _add_padding_rows(batch: Batch, other: Batch, rows: int) -> Batch:
    """With so many rows of another batch behind it that count for nothing."""
    more = {name: torch.cat([batch[name], other[name][:rows]]) for name in batch}
    if rows:
        more["labels"][-rows:] = IGNORE_INDEX
        more["real"][-rows:] = 0.0
    return more
