"""The objective of a trainer: its own `compute_loss`, called with something that stands in for the model.

[Note: the trainer's own loss] Losses of trainers, TRL's and those of users, are written against a model: they call it
with a microbatch and make a mean of what it returns. Here the manager runs the model, under whatever layout, and gives
statistics of its tokens to an objective. So the objective calls `compute_loss` of the trainer with a `ModelProxy`,
which answers with these statistics under the names that the model's outputs have. What a loss logs on the way it
gathers over data ranks; that is done after the step, on statistics that were kept, with a second call: an objective
sends nothing.

Shapes: B rows of a microbatch, S positions of each, V entries of the vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.plugin import IGNORE_INDEX, ConfigError, Outputs, Tokens

from .accelerator import LocalAccelerator

ROWS_COLUMN = "meshwright_trainer_rows"
"""Column (B,) of a batch, int64: which row of which microbatch of the trainer each row is; see `numbered`."""
REFERENCE_KEY = "reference_log_probs"
"""Key of a microbatch that is held: log-probabilities under the reference model, (B, S - 1)."""
_STRIDE = 1 << 32

_STATISTICS: Mapping[str, Callable[[Tokens], Tensor]] = {
    "log_probs": lambda tokens: tokens.log_probs[:, :-1],
    "entropy": lambda tokens: tokens.entropy.where(tokens.mask, 0.0)[:, :-1],
    "mean_logits": lambda tokens: tokens.mean_logit.where(tokens.mask, 0.0)[:, :-1],
    "is_top1": lambda tokens: tokens.is_top1[:, :-1],
    "label_mask": lambda tokens: tokens.mask[:, :-1],
}
"""Fields of TRL's outputs of a fused head, (B, S - 1), of our statistics; 0 where there is no label."""


def number_rows(microbatch: int, order: Tensor) -> Tensor:
    """The column `ROWS` of the rows that a trainer's microbatch has in this order; int64, (B,)."""
    return order + microbatch * _STRIDE


def get_labels(inputs: Mapping[str, Tensor]) -> Tensor:
    """The labels of a trainer's microbatch, int64, (B, S): its own; or its completions; or all that is no padding."""
    if "labels" in inputs:
        return inputs["labels"]
    ids = inputs["input_ids"]
    for name in ("completion_mask", "attention_mask"):
        if name in inputs:
            return ids.masked_fill(inputs[name] == 0, IGNORE_INDEX)
    return ids


class TrainerLoss:
    """A trainer's loss over the rows of its microbatches.

    A trainer either divides by the number of items itself, where the sum over items is taken here, or means over the
    groups of rows of a microbatch (pairs, sequences), where that mean times the number of groups is. Pairs are groups
    of 2 rows: chosen rows come first in the trainer's order, and lie beside the rejected ones in the manager's.
    """

    columns = (ROWS_COLUMN,)

    def __init__(self, trainer: Any, *, takes_logits: bool = False) -> None:
        self.name = f"loss of {type(trainer).__name__}"
        self._trainer, self._vocab_size, self._dtype = trainer, trainer._vocab_size, trainer._dtype
        self._takes_logits = takes_logits
        self.input_kind: Literal["tokens", "outputs"] = "tokens" if self._vocab_size else "outputs"
        self.group_size = trainer.rows_per_group
        self.is_mean = getattr(trainer, "loss_is_scaled_for_ga", None) is False or not self._vocab_size
        self.begin_step([])

    def begin_step(self, microbatches: list[dict[str, Any]]) -> None:
        """Called before each step and evaluation."""
        self.microbatches, self.has_run = microbatches, False
        self.saved_statistics: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def row_order(self, count: int, device: torch.device) -> Tensor:
        """The trainer's rows in the manager's order; int64, (count,)."""
        return torch.arange(count, device=device).view(self.group_size, -1).T.flatten()

    def count(self, batch: Mapping[str, Tensor]) -> int:
        targets = batch["labels"][:, 1:] != IGNORE_INDEX
        if not self.is_mean:
            return int(targets.sum())
        return len(targets) // self.group_size if bool(targets.any()) else 0

    def __call__(self, statistics: Tokens | Outputs, columns: Mapping[str, Tensor]) -> Tensor:
        self.has_run = True
        if not bool(statistics.mask.any()):
            return statistics.zero_with_grad()
        column = columns[ROWS_COLUMN]
        microbatch, rows = int(column[0]) // _STRIDE, column % _STRIDE
        called = [
            self._call_rows(statistics, microbatch, rows, back) for back in self.split_calls(len(rows), rows.device)
        ]
        return torch.stack(called).sum()

    def split_calls(self, count: int, device: torch.device) -> list[Tensor]:
        """Which of the rows, in the manager's order, each call of the trainer's loss is given, in its own order."""
        # The first rows of all groups, then the second ones.
        return [torch.arange(count, device=device).view(-1, self.group_size).T.flatten()]

    def _call_rows(self, statistics: Tokens | Outputs, microbatch: int, rows: Tensor, order: Tensor) -> Tensor:
        mine, held = rows[order], self.microbatches[microbatch]

        def keep(name: str, value: Tensor) -> None:
            kept = self.saved_statistics[microbatch]
            if name not in kept:
                kept[name] = value.new_zeros((len(held["input_ids"]), *value.shape[1:]))
            kept[name][mine] = value.detach()

        def noted(name: str) -> Tensor:
            value = _get_statistic(statistics, name, order, self._vocab_size)
            if (value.dim() and name != "logits") or self.input_kind == "outputs":
                keep(name, value)
            return value

        inputs = _select_rows(held, mine, self.group_size)
        if self._takes_logits:
            predicted = _get_statistic(statistics, "logits", order, self._vocab_size).detach()
            reduce = self._trainer.preprocess_logits_for_metrics
            keep("predictions", predicted if reduce is None else reduce(predicted, get_labels(inputs)))
        loss = self._compute_loss(noted, inputs, is_logged=False)
        return loss * (len(order) // self.group_size) if self.is_mean else loss

    def log(self) -> None:
        """Let the trainer log what its loss logs; on ranks with the loss, collective over those with their place in the
        model.
        """
        for microbatch, held in enumerate(self.microbatches):
            with torch.no_grad():
                self._compute_loss(lambda name, at=microbatch: self._get_saved(at, name), dict(held), is_logged=True)

    def _get_saved(self, microbatch: int, name: str) -> Tensor:
        """A statistic of a microbatch; zeros where it has no target, so that nothing was asked."""
        values, ids = self.saved_statistics[microbatch], self.microbatches[microbatch]["input_ids"]
        if name in values:
            return values[name]
        if self.input_kind == "outputs":
            return ids.new_zeros((len(ids), 1), dtype=self._dtype)
        if name == "logits":
            # Too large to keep, and made into a loss alone, which is not what is logged.
            return torch.zeros(1, device=ids.device).expand(*ids.shape, self._vocab_size)
        wide = self._dtype if self._dtype is torch.float64 else torch.float32
        return torch.zeros_like(ids[:, 1:], dtype=torch.bool if name in ("is_top1", "label_mask") else wide)

    def _compute_loss(self, get: Any, inputs: dict[str, Any], *, is_logged: bool) -> Tensor:
        trainer = self._trainer
        reference = inputs.pop(REFERENCE_KEY, None)
        ids = inputs["input_ids"]
        known = (
            None
            if reference is None
            else ModelProxy(trainer.model, ids, LazyModelOutput({"log_probs": reference}.__getitem__))
        )
        model, one = ModelProxy(trainer.model, ids, LazyModelOutput(get)), torch.ones((), device=ids.device)
        with _patch_trainer(trainer, known, is_logged=is_logged):
            found: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=one)
        return found


def _get_statistic(statistics: Tokens | Outputs, name: str, order: Tensor, vocab_size: int) -> Tensor:
    """What `LazyModelOutput` gets under a name of an objective's first argument, of the rows in this order; int64,
    (B,)."""
    if isinstance(statistics, Outputs):
        if name != "logits":
            raise ConfigError(f"the trainer's loss asks for {name!r} of a model that classifies; it has 'logits'.")
        return statistics.logits[order]
    if name == "loss":
        # Of one item: Trainer's losses divide by the number of items, which here is the manager's to do.
        return -statistics.log_probs.sum()
    if name == "logits":
        # All of them, whole on this rank: float32 or wider, (B, S, V).
        every_V = torch.arange(vocab_size, device=statistics.targets.device)
        return (
            statistics.log_probs_for(every_V.expand(*statistics.targets.shape, -1)) + statistics.logsumexp[..., None]
        )[order]
    if name not in _STATISTICS:
        raise ConfigError(
            f"the trainer's loss asks for {name!r} of the model, and there is: loss, logits, "
            f"{', '.join(_STATISTICS)}. Take a loss that is made of these."
        )
    return _STATISTICS[name](statistics)[order]


def _select_rows(microbatch: Mapping[str, Any], rows: Tensor, group: int) -> dict[str, Any]:
    """The entries of a microbatch for some of its rows; those with one value for each group of rows as well."""
    count = len(microbatch["input_ids"])

    def of(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and len(value) == count:
            return value[rows]
        if isinstance(value, Tensor) and value.dim() and len(value) * group == count:
            return value[rows[: len(rows) // group]]
        return value

    return {name: of(value) for name, value in microbatch.items()}


@contextmanager
def _patch_trainer(trainer: Any, reference: ModelProxy | None, *, is_logged: bool) -> Iterator[None]:
    """Around a call of a trainer's loss: its reference model answers with what is known, and unless it is logged,
    nothing is sent, and what it notes is dropped."""
    names = ["accelerator", "ref_model", "aux_loss_enabled", "_metrics", "_total_train_tokens"]
    names.append("current_gradient_accumulation_steps")
    before = {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}
    if not is_logged:
        trainer.accelerator = LocalAccelerator(trainer.accelerator, trainer.num_loss_processes)
        # The manager divides by what it counts over all microbatches.
        trainer.current_gradient_accumulation_steps = 1
    if reference is not None:
        trainer.ref_model = reference
    if "aux_loss_enabled" in before:
        # The manager adds it, over all tokens of the step.
        trainer.aux_loss_enabled = False
    if "_metrics" in before and not is_logged:
        trainer._metrics = defaultdict(lambda: defaultdict(list))
    try:
        yield
    finally:
        for name, value in before.items():
            if not (is_logged and name == "_total_train_tokens"):
                setattr(trainer, name, value)


# -- instead of a model


class LazyModelOutput:
    """What a model's outputs are to a loss: `get` gives a value by its name, and `order` names those of the tuple."""

    def __init__(self, get: Callable[[str], Tensor], order: Sequence[str] = ("loss", "logits")) -> None:
        self._get, self._order = get, order
        self._known: dict[str, Tensor] = {}

    def without_labels(self) -> LazyModelOutput:
        """The same of a model that is called without labels, and so has no loss to give first."""
        other = LazyModelOutput(self._get, ("logits",))
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


class ModelProxy:
    """Instead of a model that is called with some `input_ids`: it gives one answer, and refuses other
    `input_ids`, of which nothing is known. Other attributes are the model's."""

    def __init__(self, model: Any, ids: Tensor, answer: LazyModelOutput) -> None:
        self._model, self._input_ids, self._output = model, ids, answer

    def __call__(self, *args: Any, **inputs: Any) -> LazyModelOutput:
        ids = inputs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor) or not torch.equal(ids, self._input_ids):
            raise ConfigError(
                "the trainer's loss calls the model with other input_ids than those of its microbatch, for which alone "
                "the model runs over a mesh. Change them in the data or its collator, and call the model with those."
            )
        return self._output if inputs.get("labels") is not None else self._output.without_labels()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
