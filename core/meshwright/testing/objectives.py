"""An objective for the conformance suite: weights, sums over sequences, and log-probabilities of other ids.

Shapes: B sequences of a microbatch, S positions of each, K ids at each position.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base.types import IGNORED_LABEL, Batch
from ..step.tokens import Tokens
from .case import Case, Outcome, share
from .models import case_vocab
from .parity import build_manager, full_weights
from .pool import pool


@dataclass(frozen=True)
class Found:
    """What a rank saw of an objective.

    Attributes:
        outcome: further sums are among the losses.
        first: the first of this rank's sequences in the global batch.
        log_probs: of the last step's labels, (sequences, S), as `token_stats` tells them behind it.
    """

    outcome: Outcome
    first: int
    log_probs: Tensor

    def apart(self, expected: Found) -> float:
        """How far log-probabilities are from those of one rank that has all sequences."""
        whole = expected.log_probs[self.first : self.first + len(self.log_probs)]
        return float((self.log_probs - whole).abs().max())


def preference(tokens: Tokens, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted tokens, sequences by a sign and a strength, and less of some other ids."""
    wholes_B = tokens.sequence_sum(tokens.log_probs)
    sequences_B = F.softplus(wholes_B * batch["signs"]) * tokens.mask.any(1)
    others_BSK = tokens.log_probs_of(batch["ids"]).exp() * (batch["ids"] != IGNORED_LABEL)
    others = (others_BSK.sum(-1) * tokens.mask).sum()
    value = -(tokens.log_probs * batch["weights"]).sum() + sequences_B.sum() + 10.0 * others
    return value, {"correct": tokens.is_top1.sum(), "others": others, "rows": tokens.mask.any(1).sum()}


def with_columns(batch: Batch, entries: int) -> Batch:
    """A microbatch with what `preference` takes, made of its ids.

    Args:
        entries: of the vocabulary.
    """
    ids_BS = batch["input_ids"]
    wave_BS = ids_BS.double() + torch.arange(ids_BS.shape[1])
    others_BS = (ids_BS * 7 + 3) % entries
    return {
        **batch,
        "weights": (wave_BS * 0.37).cos(),
        "signs": (wave_BS[:, 0] * 0.3).sin() * 0.1,
        "ids": torch.stack([others_BS, (others_BS + 1) % entries, others_BS.where(ids_BS % 2 == 0, IGNORED_LABEL)], -1),
    }


def train_objective(
    strategy: str, config: Mapping[str, Any], sizes: Mapping[str, Any], case: Case, device: str = "cpu"
) -> Found:
    """The task of one rank."""
    manager = build_manager(strategy, config, sizes, case, device=device)
    mesh, entries = manager.mesh, case_vocab(case.model_type)
    losses, norms, evaluated = [], [], []

    def seen(loss: Tensor) -> list[float]:
        return [float(loss), *(float(each) for _, each in sorted(manager.last_sums.items()))]

    for step in range(case.steps):
        plain = share(case, step, mesh.data_rank, mesh.data_size)
        batches = [with_columns(batch, entries) for batch in plain]
        count = manager.announce(batches, objective=preference)
        losses += seen(manager.forward_backward(batches, num_tokens=count, objective=preference))
        norms.append(float(manager.clip_grad_norm(case.max_norm, case.norm_type)))
        manager.optimizer_step()
        evaluated += seen(manager.eval_loss(batches, num_tokens=torch.tensor(int(count)), objective=preference))
    told = manager.token_stats(plain, ["log_probs"])
    sizes_of = case.shares or (case.sequences // mesh.data_size,) * mesh.data_size
    log_probs = torch.cat([each["log_probs"].cpu() for each in told])
    return Found(Outcome(losses, norms, evaluated, full_weights(manager)), sum(sizes_of[: mesh.data_rank]), log_probs)


@functools.lru_cache(maxsize=64)
def objective_reference(case: Case, device: str = "cpu") -> Found:
    """The case under `single`, on one rank, each step in one microbatch."""
    return pool(1).run(train_objective, "single", {}, {}, case.undivided(), device, device=device)[0]
