"""Check and count the microbatches of a step, the same on every rank.

[Note: packed documents] Where several documents share a row, `position_ids` restart at each, from which transformers
finds them and keeps them apart, but only without an attention mask: beside one, each document sees those before it
(github.com/huggingface/transformers/issues/46634). So a mask of ones, which says nothing, is left out; any other is
refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import BatchError
from ..mesh.mesh import Mesh
from ..strategy.contract import IGNORED_LABEL, Batch
from .token_loss import targets

_NEUTRAL = 2**62
"""Above all checksums."""


def count_tokens(microbatches: Sequence[Batch], mesh: Mesh) -> Tensor:
    """Count the unmasked targets of the global batch.

    Args:
        microbatches: this data-parallel rank's share of the step.
        mesh: all of its ranks call this.

    Returns:
        int64 scalar on the CPU, equal on all ranks.

    Raises:
        BatchError: a microbatch of any rank is malformed.
    """
    defect = _defect(microbatches, None)
    counts = defect is None and mesh.leads_data
    mine = sum(int((targets(batch["labels"]) != IGNORED_LABEL).sum()) for batch in microbatches) if counts else 0
    defects, total = mesh.world.reduce_ints([int(defect is not None), mine])
    if defects:
        mesh.world.raise_any(BatchError(defect) if defect else None)
    return torch.tensor(total, dtype=torch.int64)


def check_step(
    microbatches: Sequence[Batch],
    num_tokens: Tensor,
    mesh: Mesh,
    *,
    vocab_size: int | None,
    sequence_multiple: int = 1,
) -> list[Batch]:
    """Make sure that all ranks can run this step together; one small all-reduce where they can.

    Args:
        vocab_size: token ids must be below it; None: unknown.
        sequence_multiple: the length of a sequence must be a multiple of it.

    Returns:
        What is to be trained on: the microbatches, but for masks that are left out; see [Note: packed documents].

    Raises:
        BatchError: on all ranks, as `StrategyManager.forward_backward` says.
    """
    defect = _defect(microbatches, vocab_size) or _length_defect(microbatches, sequence_multiple, mesh.degrees.cp)
    tokens = int(num_tokens)
    if defect is None and tokens < 1:
        defect = "num_tokens is 0: no rank has an unmasked target in this step. Leave the step out, or unmask labels."
    count = len(microbatches) if defect is None else 0
    # MIN over x and over -x agree (but for the sign) exactly when x is the same on all ranks.
    values = [int(defect is None), count, -count, tokens, -tokens, *_prints(microbatches, mesh, defect)]
    reduced = mesh.world.reduce_ints(values, dist.ReduceOp.MIN)
    ok, low_count, high_count, low_tokens, high_tokens = reduced[:5]
    if not ok:
        mesh.world.raise_any(BatchError(defect) if defect else None)
    if low_count != -high_count:
        raise BatchError(
            f"ranks disagree on the number of microbatches: between {low_count} and {-high_count}. "
            f"Give every rank the same number; pad with microbatches whose labels are all {IGNORED_LABEL}."
        )
    if low_tokens != -high_tokens:
        raise BatchError(
            f"ranks disagree on num_tokens: between {low_tokens} and {-high_tokens}. It is the count over the global "
            f"batch, equal on all ranks: use meshwright.count_tokens."
        )
    lows, highs = reduced[5::2], reduced[6::2]
    for data_rank, (low, high) in enumerate(zip(lows, highs, strict=True)):
        if low != -high and low != _NEUTRAL:
            raise BatchError(
                f"ranks that share a batch ({mesh.degrees}) have different input_ids for data rank {data_rank} of "
                f"{mesh.data_size}. Choose the batch by mesh.data_rank, not by the rank."
            )
    return [_without_mask(batch) if _restarts(batch) else batch for batch in microbatches]


def _prints(microbatches: Sequence[Batch], mesh: Mesh, defect: str | None) -> list[int]:
    """For each data rank, a checksum of its tokens and the negative of it, neutral to MIN elsewhere.

    Nothing where no two ranks share a batch. Ids on an accelerator are not looked at.
    """
    if mesh.world.size == mesh.data_size:
        return []
    prints = [_NEUTRAL] * (2 * mesh.data_size)
    if defect is None and all(batch["input_ids"].device.type == "cpu" for batch in microbatches):
        checksum = 0
        for batch in microbatches:
            checksum = zlib.crc32(batch["input_ids"].contiguous().numpy().tobytes(), checksum)
        prints[2 * mesh.data_rank : 2 * mesh.data_rank + 2] = [checksum, -checksum]
    return prints


def _defect(microbatches: Sequence[Batch], vocab_size: int | None) -> str | None:
    """What is wrong with this rank's microbatches, or None."""
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
    """Whether a batch has a mask, and positions that restart among a row's unmasked tokens.

    See [Note: packed documents]. False where the mask is not a row's: one of each query and key can keep documents
    apart by itself.
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
