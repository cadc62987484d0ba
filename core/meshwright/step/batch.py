"""Checks and counts of one rank's microbatches; see `agreement` for what ranks tell each other.

[Note: packed documents] If several documents share a row, `position_ids` restart at each. transformers keeps them apart
only without an attention mask; with one, each document sees those before it
(github.com/huggingface/transformers/issues/46634). So a mask of ones is left out, and any other is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..base.errors import BatchError, MeshwrightError, StrategyError
from ..base.types import IGNORED_LABEL, Batch
from .objective import Given, without_columns
from .token_loss import targets


@dataclass(frozen=True)
class Terms:
    """What a manager requires of the microbatches of a step.

    Attributes:
        vocab_size: token ids must be below it; None: unknown.
        sequence_multiple: divisor of the length of every sequence.
        check: further check without a collective; raises BatchError or StrategyError.
        count: a count of which ranks learn the maximum; see `Agreed.most`.
        objective: of the step; None: the token loss.
        rows: rows of the pieces into which microbatches are cut; None: they are not.
        frozen: see [Note: equal flags] in `message`.
    """

    vocab_size: int | None = None
    sequence_multiple: int = 1
    check: Callable[[Sequence[Batch]], None] = lambda microbatches: None
    count: Callable[[Sequence[Batch]], int] = len
    objective: Given | None = None
    rows: int | None = None
    frozen: int = field(default=0, compare=False)

    def tokens(self, microbatches: Sequence[Batch]) -> int:
        """Return what the loss of valid microbatches is divided by."""
        own = None if self.objective is None else self.objective.count(microbatches)
        return count_here(microbatches) if own is None else own

    def signature(self, microbatches: Sequence[Batch]) -> int:
        """Return a number that must be equal on all ranks."""
        return 0 if self.objective is None else self.objective.signature(microbatches)


def count_here(microbatches: Sequence[Batch]) -> int:
    return sum(int((targets(batch["labels"]) != IGNORED_LABEL).sum()) for batch in microbatches)


def checksum(microbatches: Sequence[Batch]) -> int | None:
    """Return a 32-bit checksum of all `input_ids`; None if they are on an accelerator, for which it would wait."""
    if any(batch["input_ids"].device.type != "cpu" for batch in microbatches):
        return None
    found = 0
    for batch in microbatches:
        found = zlib.crc32(batch["input_ids"].contiguous().numpy(), found)
    return found


def apart(microbatches: Sequence[Batch]) -> list[Batch]:
    """Return the microbatches without redundant masks; see [Note: packed documents]."""
    return [_without_mask(batch) if _restarts(batch) else batch for batch in microbatches]


def defect_under(microbatches: Sequence[Batch], terms: Terms, cp_size: int) -> MeshwrightError | None:
    """Return what is wrong with this rank's microbatches or its share of the step, or None."""
    defect = defect_of(microbatches, terms.vocab_size)
    defect = defect or _length_defect(microbatches, terms.sequence_multiple, cp_size)
    if defect is not None:
        return BatchError(defect)
    try:
        if terms.objective is not None:
            terms.objective.check(microbatches, rows=terms.rows)
        terms.check(without_columns(terms.objective, microbatches))
    except (BatchError, StrategyError) as error:
        return error
    return None


def defect_of(microbatches: Sequence[Batch], vocab_size: int | None = None) -> str | None:
    """Return what is wrong with this rank's microbatches for any trainer, or None."""
    if not isinstance(microbatches, Sequence) or not microbatches:
        return f"microbatches must be a non-empty sequence of mappings, not {type(microbatches).__name__} (or empty)."
    for index, batch in enumerate(microbatches):
        about = f"microbatch {index} of {len(microbatches)}"
        for key in ("input_ids", "labels"):
            value = batch.get(key)
            if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != 2:
                got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                return f"{about}: {key} must be an int64 tensor of shape (B, S), not {got}."
        ids, labels = batch["input_ids"], batch["labels"]
        if ids.shape != labels.shape or ids.shape[1] < 2 or ids.shape[0] < 1:
            return (
                f"{about}: input_ids {tuple(ids.shape)} and labels {tuple(labels.shape)} must have one shape (B, S), "
                f"B >= 1, S >= 2."
            )
        if _restarts(batch) and not batch["attention_mask"].all():
            return (
                f"{about}: position_ids restart, so several documents share a row, beside an attention_mask with "
                f"zeros, under which transformers would let them see each other. Leave the mask out: end each row with "
                f"padding whose position_ids restart too, and whose labels are {IGNORED_LABEL}."
            )
        if vocab_size is not None:
            for key, tensor in (("input_ids", ids), ("labels", labels[labels != IGNORED_LABEL])):
                defect = _outside(tensor, vocab_size)
                if defect:
                    return f"{about}: {key} {defect}"
    return None


def _restarts(batch: Batch) -> bool:
    """Return whether a batch has a mask, and positions that restart among a row's unmasked tokens.

    False for a mask of queries and keys, which can keep documents apart by itself.
    """
    positions, mask, shape = batch.get("position_ids"), batch.get("attention_mask"), batch["input_ids"].shape
    if positions is None or mask is None or mask.shape != shape or positions.shape not in (shape, (1, shape[1])):
        return False
    rows = zip(positions.expand(shape), mask.bool(), strict=True)
    return any(bool((row[kept].diff() <= 0).any()) for row, kept in rows)


def _without_mask(batch: Batch) -> Batch:
    return {name: tensor for name, tensor in batch.items() if name != "attention_mask"}


def _length_defect(microbatches: Sequence[Batch], multiple: int, cp_size: int) -> str | None:
    for index, batch in enumerate(microbatches):
        length = batch["input_ids"].shape[1]
        if length % multiple == 0:
            continue
        about = f"microbatch {index} of {len(microbatches)}: sequences of {length} tokens cannot be divided among"
        pad = f"Pad them to a multiple of {multiple} with masked labels, or"
        if cp_size > 1:
            beside = " and sequence_parallel" if multiple > 2 * cp_size else ""
            return f"{about} the ranks of cp_size={cp_size}{beside}. {pad} choose another cp_size."
        return f"{about} {multiple} ranks (sequence_parallel). {pad} set sequence_parallel=false."
    return None


def _outside(ids: Tensor, vocab_size: int) -> str | None:
    # Ids on an accelerator are not looked at: that would wait for queued work.
    if ids.device.type != "cpu" or ids.numel() == 0:
        return None
    low, high = (int(bound) for bound in ids.aminmax())
    if low >= 0 and high < vocab_size:
        return None
    return (
        f"range from {low} to {high}, but the model's vocabulary has {vocab_size} entries (0 to {vocab_size - 1}). "
        f"Is this the model's own tokenizer?"
    )
