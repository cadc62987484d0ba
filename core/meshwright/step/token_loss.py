"""The token loss; see [Note: the gradient rule] in `contract`.

Shapes: B sequences of a microbatch, S tokens each, V entries of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base.types import IGNORED_LABEL, Batch

TARGETS = "shift_labels"
"""Key of a divided batch, in the place of `labels`: the label that each position predicts."""


def targets(labels_BS: Tensor) -> Tensor:
    """Return the label that each position predicts: the next one, and none for the last. int64, (B, S)."""
    return F.pad(labels_BS[:, 1:], (0, 1), value=IGNORED_LABEL)


def split_targets(batch: Batch) -> tuple[Batch, Tensor]:
    """Split a microbatch, or a part of one, into the model's inputs and the label of each position, (B, S)."""
    inputs = {name: tensor for name, tensor in batch.items() if name not in ("labels", TARGETS)}
    return inputs, batch[TARGETS] if TARGETS in batch else targets(batch["labels"])


def token_loss_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Sum the cross entropy over unmasked targets [nats]; scalar.

    Args:
        logits_BSV: floating point. Half precision is computed in float32, float64 stays float64.
        labels_BS: int64, as in the model's input: the shift by one happens here.
    """
    return target_loss_sum(logits_BSV, targets(labels_BS))


def target_loss_sum(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Sum the cross entropy as `token_loss_sum` does, given the result of `targets`."""
    if logits_BSV.dtype in (torch.float16, torch.bfloat16):
        logits_BSV = logits_BSV.float()
    return F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
