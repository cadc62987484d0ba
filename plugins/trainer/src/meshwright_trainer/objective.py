"""The objective of a trainer: its own `compute_loss`, of a microbatch or some of its rows; see [Note: the trainer's
own loss] in `stand_in`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from meshwright.base.types import IGNORED_LABEL
from meshwright.step.tokens import Outputs, Tokens

from .accelerator import OneCall
from .stand_in import ROWS, Answer, Kept, StandIn, from_tokens, labels_of, rows_of

REFERENCE = "reference_log_probs"
"""Key of a microbatch that is held: log-probabilities under the reference model, (B, S - 1)."""


class TrainerLoss:
    """A trainer's loss over the rows of its microbatches.

    A trainer either divides by the number of items itself, where the sum over items is taken here, or means over the
    groups of rows of a microbatch (pairs, sequences), where that mean times the number of groups is.

    Args:
        trainer: whose `compute_loss` is called.
        on: what the model's head gives.
        rows: how many rows of a microbatch make a group: 2 for pairs, whose chosen rows come first in the trainer's
            order, and which lie side by side in the manager's.
        is_mean: whether the loss is a mean over groups.
        vocab_size: of the head.
        dtype: of the model's parameters.
        takes_logits: whether what is predicted is kept, as "predictions".

    Attributes:
        held: the microbatches of the step, as the trainer has them.
        kept: statistics of the step, for what is logged.
        is_here: whether this rank has the loss, as the last ranks of a pipeline have.
    """

    columns = (ROWS,)

    def __init__(
        self,
        trainer: Any,
        *,
        on: Literal["tokens", "outputs"],
        rows: int,
        is_mean: bool,
        vocab_size: int,
        dtype: torch.dtype,
        takes_logits: bool = False,
    ) -> None:
        self.name = f"loss of {type(trainer).__name__}"
        self.on, self.rows, self.is_mean = on, rows, is_mean
        self._trainer, self._vocab_size, self._takes_logits = trainer, vocab_size, takes_logits
        self._dtype = dtype
        self.begin([])

    def begin(self, held: list[dict[str, Any]]) -> None:
        """Called before each step and evaluation."""
        self.held, self.kept, self.is_here = held, Kept(), False

    def order(self, count: int, device: torch.device) -> Tensor:
        """The trainer's rows in the manager's order; int64, (count,)."""
        return torch.arange(count, device=device).view(self.rows, -1).T.flatten()

    def count(self, batch: Mapping[str, Tensor]) -> int:
        targets = batch["labels"][:, 1:] != IGNORED_LABEL
        if not self.is_mean:
            return int(targets.sum())
        return len(targets) // self.rows if bool(targets.any()) else 0

    def __call__(self, seen: Tokens | Outputs, columns: Mapping[str, Tensor]) -> Tensor:
        self.is_here = True
        if not bool(seen.mask.any()):
            return seen.nothing()
        microbatch, rows = rows_of(columns[ROWS])
        called = [self._call(seen, microbatch, rows, back) for back in self.calls(len(rows), rows.device)]
        return torch.stack(called).sum()

    def calls(self, count: int, device: torch.device) -> list[Tensor]:
        """Which of the rows, in the manager's order, each call of the trainer's loss is given, in its own order."""
        # The first rows of all groups, then the second ones.
        return [torch.arange(count, device=device).view(-1, self.rows).T.flatten()]

    def _call(self, seen: Tokens | Outputs, microbatch: int, rows: Tensor, back: Tensor) -> Tensor:
        mine, held = rows[back], self.held[microbatch]
        get = from_tokens(seen, back, self._vocab_size)

        def noted(name: str) -> Tensor:
            value = get(name)
            if (value.dim() and name != "logits") or self.on == "outputs":
                self.kept.note(microbatch, name, mine, value, len(held["input_ids"]))
            return value

        inputs = _rows(held, mine, self.rows)
        if self._takes_logits:
            predicted = get("logits").detach()
            reduce = self._trainer.preprocess_logits_for_metrics
            if reduce is not None:
                predicted = reduce(predicted, labels_of(inputs))
            self.kept.note(microbatch, "predictions", mine, predicted, len(held["input_ids"]))
        loss = self._loss(noted, inputs, is_logged=False)
        return loss * (len(back) // self.rows) if self.is_mean else loss

    def log(self) -> None:
        """Let the trainer log what its loss logs, of the step or evaluation that has ended; on ranks with the loss,
        collective over those with the same place in the model."""
        for microbatch, held in enumerate(self.held):
            with torch.no_grad():
                self._loss(lambda name, at=microbatch: self._kept(at, name), dict(held), is_logged=True)

    def _kept(self, microbatch: int, name: str) -> Tensor:
        """A statistic of a microbatch; zeros where it has no target, so that nothing was asked."""
        values, ids = self.kept.of(microbatch), self.held[microbatch]["input_ids"]
        if name in values:
            return values[name]
        if self.on == "outputs":
            return ids.new_zeros((len(ids), 1), dtype=self._dtype)
        if name == "logits":
            # Too large to keep, and made into a loss alone, which is not what is logged.
            return torch.zeros(1, device=ids.device).expand(*ids.shape, self._vocab_size)
        wide = self._dtype if self._dtype is torch.float64 else torch.float32
        return torch.zeros_like(ids[:, 1:], dtype=torch.bool if name in ("is_top1", "label_mask") else wide)

    def _loss(self, get: Any, inputs: dict[str, Any], *, is_logged: bool) -> Tensor:
        trainer = self._trainer
        answer = Answer(get)
        reference = inputs.pop(REFERENCE, None)
        ids = inputs["input_ids"]
        known = None if reference is None else StandIn(trainer.model, ids, Answer({"log_probs": reference}.__getitem__))
        model, one = StandIn(trainer.model, ids, answer), torch.ones((), device=ids.device)
        with _stood_in(trainer, known, is_logged=is_logged):
            found: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=one)
        return found


def _rows(held: Mapping[str, Any], rows: Tensor, group: int) -> dict[str, Any]:
    """The entries of a microbatch for some of its rows; those with one value for each group of rows likewise."""
    count = len(held["input_ids"])
    groups = rows[: len(rows) // group]

    def of(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() and len(value) == count:
            return value[rows]
        if isinstance(value, Tensor) and value.dim() and len(value) * group == count:
            return value[groups]
        return value

    return {name: of(value) for name, value in held.items()}


@contextmanager
def _stood_in(trainer: Any, reference: StandIn | None, *, is_logged: bool) -> Iterator[None]:
    """Around a call of a trainer's loss: its reference model answers with what is known, and unless it is logged,
    nothing is sent, and what it notes is dropped."""
    names = ["accelerator", "ref_model", "aux_loss_enabled", "_metrics", "_total_train_tokens"]
    names.append("current_gradient_accumulation_steps")
    before = {name: getattr(trainer, name) for name in names if hasattr(trainer, name)}
    if not is_logged:
        trainer.accelerator = OneCall(trainer.accelerator, trainer.processes_of_loss)
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
