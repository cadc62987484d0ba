"""Find out whether a model isolates the documents of a row from each other, and from padding.

Tokens that must not be seen are changed, and what is computed of the others must stay. The change where they may be
seen is the scale. No class is known by name: recurrent layers carry states over, some classes do not pass positions to
their masks, and some are not causal.

A small model is tried before any rank starts, and any other before its first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...base.errors import MeshwrightError, ModelError
from ...base.types import Batch
from ...data.config import Packing

TOKENS = 16
"""Tokens of a row that is tried, if `seq_len` is not less."""

Statistics = Callable[[list[Batch]], Sequence[Tensor]]
"""Log-probabilities of the targets of each microbatch, (B, S)."""


def check_kept_apart(
    config: Any,
    kind: Packing,
    statistics: Statistics,
    *,
    dtype: torch.dtype,
    seq_len: int,
    vocab_size: int,
    multiple: int = 1,
    rows: int = 1,
    microbatches: int = 1,
    masks: bool = False,
) -> None:
    """Refuse a model that does not isolate the documents of a row.

    Args:
        config: of the model.
        kind: how rows are laid out.
        statistics: evaluates microbatches; collective where the model is on several ranks.
        multiple: the length of a row is a multiple of it.
        rows, microbatches: number of each in a step.
        masks: whether padding is masked.

    Raises:
        ModelError: says what to set; or the model cannot take such rows.
    """
    if kind == "stream":
        return
    length = min(seq_len, -(-TOKENS // multiple) * multiple)
    trial = _Trial(statistics, length, vocab_size, rows, microbatches)
    name = f"the model {config.model_type!r}"
    limit = _limit(config, dtype)
    try:
        packed = kind == "documents"
        moved, measure = trial.packed() if packed else trial.padded(masks=masks)
    except MeshwrightError:
        raise
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{name} cannot run on rows of packing={kind}: {cause:.300} {_REMEDY[kind]}") from error
    if not moved <= limit * measure:
        raise ModelError(
            f"{name} {_DEFECT[kind]}: other tokens there move log-probabilities by {moved:.3g}, where it may see them "
            f"by {measure:.3g}. {_REMEDY[kind]}"
        )


_DEFECT = {
    "documents": "lets documents that share a row see those before them",
    "none": "sees the padding behind a document",
}
_REMEDY = {
    "documents": "Set data.packing=none, so that each has a row of its own; or stream, if they may see each other.",
    "none": "Set data.packing=stream, so that there is no padding.",
}


def _limit(config: Any, dtype: torch.dtype) -> float:
    """Return the tolerance, relative to the change of visible tokens.

    Other tokens change no bit of another row of a matrix product; but experts get another number of tokens, and round
    differently.
    """
    has_experts = bool(getattr(config.get_text_config(), "num_experts_per_tok", None))
    return max(1e-4, torch.finfo(dtype).eps ** 0.5) if has_experts else 1e-4


class _Trial:
    """Changes the first or last part of a row, and measures the change in the rest."""

    def __init__(self, statistics: Statistics, length: int, vocab_size: int, rows: int, microbatches: int) -> None:
        self._statistics, self._rows, self._microbatches = statistics, rows, microbatches
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, vocab_size, (2, length), generator=generator)
        self._half = length // 2
        # Without 0, the token of padding.
        self._ids, self._others = ids.clamp(min=min(1, vocab_size - 1))

    def packed(self) -> tuple[float, float]:
        """Return how far the second document moves with the first, isolated and not."""
        half, length = self._half, len(self._ids)
        changed = torch.cat([self._others[:half], self._ids[half:]])
        positions = torch.cat([torch.arange(half), torch.arange(length - half)])
        behind = slice(half, length - 1)
        apart = self._moved(self._ids, changed, behind, position_ids=positions)
        return apart, self._moved(self._ids, changed, behind)

    def padded(self, *, masks: bool) -> tuple[float, float]:
        """Return how far tokens before the padding move with it, and tokens that may see a change."""
        half = self._half
        changed = torch.cat([self._ids[:half], self._others[half:]])
        mask = {"attention_mask": (torch.arange(len(self._ids)) < half).long()} if masks else {}
        before = self._moved(self._ids, changed, slice(0, half - 1), **mask)
        first = torch.cat([self._others[:half], self._ids[half:]])
        return before, self._moved(self._ids, first, slice(half, len(self._ids) - 1))

    def _moved(self, one: Tensor, other: Tensor, where: slice, **more: Tensor) -> float:
        found = [self._of(ids, **more)[:, where] for ids in (one, other)]
        return float((found[0] - found[1]).abs().max())

    def _of(self, ids: Tensor, **more: Tensor) -> Tensor:
        batch = {name: row.repeat(self._rows, 1) for name, row in {"input_ids": ids, "labels": ids, **more}.items()}
        return self._statistics([batch] * self._microbatches)[0].double().cpu()
