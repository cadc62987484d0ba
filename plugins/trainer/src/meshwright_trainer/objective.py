"""Objective of a trainer: its `compute_loss`, called with a proxy of the model.

[Note: the trainer's own loss] Losses of trainers, of TRL and of users, call a model with a microbatch and average its
outputs. Here the manager runs the model, under any layout, and passes statistics of its tokens to an objective. The
objective calls the trainer's `compute_loss` with a `ModelProxy`, which returns these statistics under the names of
model outputs. A loss also gathers values to log over data ranks, but an objective must not communicate. A second call
after the step therefore logs them, from saved statistics.

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
"""Column (B,) of a batch, int64: the trainer's microbatch and row of each row; see `number_rows`."""
REFERENCE_KEY = "reference_log_probs"
"""Key of a pending microbatch: log-probabilities under the reference model, (B, S - 1)."""
_STRIDE = 1 << 32

_STATISTICS: Mapping[str, Callable[[Tokens], Tensor]] = {
    "log_probs": lambda tokens: tokens.log_probs[:, :-1],
    "entropy": lambda tokens: tokens.entropy.where(tokens.mask, 0.0)[:, :-1],
    "mean_logits": lambda tokens: tokens.mean_logit.where(tokens.mask, 0.0)[:, :-1],
    "is_top1": lambda tokens: tokens.is_top1[:, :-1],
    "label_mask": lambda tokens: tokens.mask[:, :-1],
}
"""Output fields of TRL's fused head, (B, S - 1), computed from token statistics; 0 where there is no label."""


def number_rows(microbatch: int, order: Tensor) -> Tensor:
    """Return the column `ROWS_COLUMN` of a trainer's microbatch, whose rows are in this order; int64, (B,)."""
    return order + microbatch * _STRIDE


def get_labels(inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the labels of a trainer's microbatch, int64, (B, S).

    Without a column of labels, these are the completions, or else all tokens except padding."""
    if "labels" in inputs:
        return inputs["labels"]
    ids = inputs["input_ids"]
    for name in ("completion_mask", "attention_mask"):
        if name in inputs:
            return ids.masked_fill(inputs[name] == 0, IGNORE_INDEX)
    return ids


class TrainerLoss:
    """Objective that calls a trainer's loss.

    If the trainer divides by the number of items, the objective is the sum over items. If it averages over the groups
    of rows of a microbatch (pairs, sequences), the objective is this mean times the number of groups. Pairs are groups
    of 2 rows. In the trainer's order all chosen rows come first; in the manager's order pairs are adjacent.
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
        """Set the microbatches of the next step or evaluation, and drop the saved statistics."""
        self.microbatches, self.has_run = microbatches, False
        self.saved_statistics: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def row_order(self, count: int, device: torch.device) -> Tensor:
        """Return the indices of the trainer's rows in the manager's order; int64, (count,)."""
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
        """Return the rows of each call of the trainer's loss: indices into the manager's order, in trainer's order."""
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
        """Call the trainer's loss again, to let it log; only on ranks with the loss. Collective over data ranks."""
        for microbatch, held in enumerate(self.microbatches):
            with torch.no_grad():
                self._compute_loss(lambda name, at=microbatch: self._get_saved(at, name), dict(held), is_logged=True)

    def _get_saved(self, microbatch: int, name: str) -> Tensor:
        """Return a statistic of a microbatch; zeros if it has no targets, so that none was computed."""
        values, ids = self.saved_statistics[microbatch], self.microbatches[microbatch]["input_ids"]
        if name in values:
            return values[name]
        if self.input_kind == "outputs":
            return ids.new_zeros((len(ids), 1), dtype=self._dtype)
        if name == "logits":
            # Logits are too large to save, and only the loss needs them, which is not logged here.
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
    """Return the value of a model output's field, from an objective's first argument.

    `order` are the rows; int64, (B,)."""
    if isinstance(statistics, Outputs):
        if name != "logits":
            raise ConfigError(
                f"the trainer's loss reads {name!r} of a sequence classification model, which has only 'logits'. Use "
                f"a loss of these."
            )
        return statistics.logits[order]
    if name == "loss":
        # As if for one item: Trainer's losses divide by the number of items, which the manager does here.
        return -statistics.log_probs.sum()
    if name == "logits":
        # Full logits on this rank: float32 or wider, (B, S, V).
        every_V = torch.arange(vocab_size, device=statistics.targets.device)
        return (
            statistics.log_probs_for(every_V.expand(*statistics.targets.shape, -1)) + statistics.logsumexp[..., None]
        )[order]
    if name not in _STATISTICS:
        raise ConfigError(
            f"the trainer's loss reads {name!r} of the model's outputs, which has only: loss, logits, "
            f"{', '.join(_STATISTICS)}. Use a loss of these."
        )
    return _STATISTICS[name](statistics)[order]


def _select_rows(microbatch: Mapping[str, Any], rows: Tensor, group: int) -> dict[str, Any]:
    """Select rows of a microbatch, also in tensors with one value per group of rows."""
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
    """Context for a call of a trainer's loss, with `reference` as its reference model.

    Unless `is_logged`, the loss communicates nothing, and its logged values are dropped."""
    names = ["accelerator", "ref_model", "aux_loss_enabled", "_metrics", "_total_train_tokens"]
    names.append("current_gradient_accumulation_steps")
    before = {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}
    if not is_logged:
        trainer.accelerator = LocalAccelerator(trainer.accelerator, trainer.num_loss_processes)
        # The manager divides by the count over all microbatches.
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


# -- proxies of a model and its outputs


class LazyModelOutput:
    """Stand-in for a model's outputs. `get` returns a value by name; `order` are the names of the tuple's items."""

    def __init__(self, get: Callable[[str], Tensor], order: Sequence[str] = ("loss", "logits")) -> None:
        self._get, self._order = get, order
        self._known: dict[str, Tensor] = {}

    def without_labels(self) -> LazyModelOutput:
        """Return the outputs of the same model called without labels, which do not start with a loss."""
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
    """Stand-in for a model. Called with the known `input_ids` it returns the known output; others are an error.

    Other attributes are the model's."""

    def __init__(self, model: Any, ids: Tensor, answer: LazyModelOutput) -> None:
        self._model, self._input_ids, self._output = model, ids, answer

    def __call__(self, *args: Any, **inputs: Any) -> LazyModelOutput:
        ids = inputs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor) or not torch.equal(ids, self._input_ids):
            raise ConfigError(
                "the trainer's loss calls the model with other input_ids than those of its microbatch, but on a mesh "
                "the model runs only on these. Change input_ids in the data or its collator, not in the loss."
            )
        return self._output if inputs.get("labels") is not None else self._output.without_labels()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
