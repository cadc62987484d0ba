"""The trainer's own loss as an objective: its `compute_loss`, called with something that stands in for the model.

[Note: the trainer's own loss] Losses of trainers, TRL's and those of users, are written against a model: they call it
with a microbatch and make a mean of what it returns. Here the manager runs the model, under whatever layout, and gives
statistics of its tokens to an objective. So the objective calls `compute_loss` of the trainer with a `StandIn`, which
answers with these statistics under the names that the model's outputs have. What a loss logs on the way it gathers over
data ranks; that is done after the step, on statistics that were kept, with a second call: an objective sends nothing.

Shapes: B rows of a microbatch, S positions of each, V entries of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.base.errors import ConfigError
from meshwright.base.types import IGNORED_LABEL
from meshwright.step.tokens import Outputs, Tokens

ROWS = "meshwright_trainer_rows"
"""Column (B,) of a batch, int64: which row of which microbatch of the trainer each row is; see `numbered`."""
_STRIDE = 1 << 32

_STATISTICS: Mapping[str, Callable[[Tokens], Tensor]] = {
    "log_probs": lambda tokens: tokens.log_probs[:, :-1],
    "entropy": lambda tokens: tokens.entropy.where(tokens.mask, 0.0)[:, :-1],
    "mean_logits": lambda tokens: tokens.mean_logit.where(tokens.mask, 0.0)[:, :-1],
    "is_top1": lambda tokens: tokens.is_top1[:, :-1],
    "label_mask": lambda tokens: tokens.mask[:, :-1],
}
"""Fields of TRL's outputs of a fused head, (B, S - 1), of our statistics; 0 where there is no label."""


def numbered(microbatch: int, order: Tensor) -> Tensor:
    """The column `ROWS` of the rows that a trainer's microbatch has in this order; int64, (B,)."""
    return order + microbatch * _STRIDE


class Kept:
    """Statistics of the microbatches of a step, kept after it."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, Tensor]] = {}

    def note(self, microbatch: int, name: str, rows: Tensor, value: Tensor, count: int) -> None:
        """Keep a value of some rows, of a microbatch that has `count`."""
        values = self._values.setdefault(microbatch, {})
        if name not in values:
            values[name] = value.new_zeros((count, *value.shape[1:]))
        values[name][rows] = value.detach()

    def of(self, microbatch: int) -> dict[str, Tensor]:
        return self._values.get(microbatch, {})


class Answer:
    """What a model's outputs are to a loss.

    Args:
        get: gives a value by its name: "logits", "loss", or one of a fused head.
        order: names of what it is as a tuple.
    """

    def __init__(self, get: Callable[[str], Tensor], order: Sequence[str] = ("loss", "logits")) -> None:
        self._get, self._order = get, order
        self._known: dict[str, Tensor] = {}

    def without_labels(self) -> Answer:
        """The same of a model that is called without labels, and so has no loss to give first."""
        other = Answer(self._get, ("logits",))
        other._known = self._known
        return other

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._known:
            self._known[name] = self._get(name)
        return self._known[name]

    def __getitem__(self, key: int | str) -> Tensor:
        return getattr(self, key if isinstance(key, str) else self._order[key])


class StandIn:
    """In the place of a model that is called with some `input_ids`: it gives one answer. Other attributes are the
    model's.

    Raises:
        ConfigError: it is called with others, of which nothing is known.
    """

    def __init__(self, model: Any, ids: Tensor, answer: Answer) -> None:
        self._model, self._ids, self._answer = model, ids, answer

    def __call__(self, *args: Any, **inputs: Any) -> Answer:
        ids = inputs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor) or not torch.equal(ids, self._ids):
            raise ConfigError(
                "the trainer's loss calls the model with other input_ids than those of its microbatch, for which alone "
                "the model runs over a mesh. Change them in the data or its collator, and call the model with those."
            )
        return self._answer if inputs.get("labels") is not None else self._answer.without_labels()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def from_tokens(seen: Tokens | Outputs, order: Tensor, vocab_size: int) -> Callable[[str], Tensor]:
    """What `Answer` gets of an objective's first argument.

    Args:
        order: of the rows in the answer; int64, (B,).
        vocab_size: V, of the head.
    """

    def get(name: str) -> Tensor:
        if isinstance(seen, Outputs):
            if name != "logits":
                raise ConfigError(f"the trainer's loss asks for {name!r} of a model that classifies; it has 'logits'.")
            return seen.logits[order]
        if name == "loss":
            # Of one item: Trainer's losses divide by the number of items, which here is the manager's to do.
            return -seen.log_probs.sum()
        if name == "logits":
            return logits(seen)[order]
        if name not in _STATISTICS:
            raise ConfigError(
                f"the trainer's loss asks for {name!r} of the model, and there is: loss, logits, "
                f"{', '.join(_STATISTICS)}. Take a loss that is made of these."
            )
        return _STATISTICS[name](seen)[order]

    def logits(seen: Tokens) -> Tensor:
        """All logits, whole on this rank: float32 or wider, (B, S, V)."""
        every_V = torch.arange(vocab_size, device=seen.targets.device)
        return seen.log_probs_of(every_V.expand(*seen.targets.shape, -1)) + seen.logsumexp[..., None]

    return get


def labels_of(inputs: Mapping[str, Tensor]) -> Tensor:
    """The labels of a trainer's microbatch, int64, (B, S): its own; or its completions; or all that is no padding."""
    if "labels" in inputs:
        return inputs["labels"]
    ids = inputs["input_ids"]
    for name in ("completion_mask", "attention_mask"):
        if name in inputs:
            return ids.masked_fill(inputs[name] == 0, IGNORED_LABEL)
    return ids


def rows_of(column: Tensor) -> tuple[int, Tensor]:
    """The reverse of `numbered`: which microbatch, and the rows, int64, (B,)."""
    return int(column[0]) // _STRIDE, column % _STRIDE
