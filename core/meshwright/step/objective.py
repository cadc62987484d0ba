"""An objective in the place of the token loss: what is asked of it, its trial, and its calls in a step.

[Note: objectives] An objective is called as `objective(tokens, columns)` for each microbatch. `tokens` is a `Tokens`,
or an `Outputs` where `objective.on` is "outputs", for models whose head is not that of a vocabulary; `columns` are the
entries of the batch that the model's forward does not name, of whole sequences: (B,), (B, S) or (B, S, K). It returns
the sum over the microbatch's tokens or sequences, scalar, with a gradient through what it was given, and may return a
mapping of further sums beside it, scalars, which the manager adds up as `last_sums`.
It may have attributes beside `on`: `columns`, entries of the batch that it cannot do without; `rows`, how many rows of
a microbatch, one behind the other, belong together (2 for pairs); `check(batch)`, which raises where it cannot take a
microbatch; `count(batch)`, an int: by what its sum is divided, counted over microbatches on the host, in the place of
unmasked targets; and `name`, for messages. Entry s of a column (B, S) goes with what is known at position s: the
prediction of token s + 1. Rows without any label (with which ranks are given equally many microbatches) should add
nothing.

[Note: a failure in a step] Where an objective fails on one rank in the middle of a step, this rank goes on with 0, so
that no other waits for it; when the step has ended, all ranks raise the error, and nothing is trained.

Shapes: B sequences of a microbatch, S positions of each, K ids at each position.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.errors import BatchError, ConfigError, MeshwrightError, NotFiniteError
from ..strategy.contract import Batch, Objective
from .token_statistics import Statistic
from .tokens import Outputs, Sequences, Tokens

OF_MODEL = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
"""Entries of a batch that are never an objective's own, whatever the model takes."""
_WHOLE = "whole: "
_RETURNS = "An objective returns a scalar tensor, or one and a mapping of names to scalar tensors, each a sum."


@dataclass(frozen=True, eq=False)
class Given:
    """An objective, as it was given for a model.

    Attributes:
        objective: called as `StrategyManager.forward_backward` says.
        taken: entries of a batch that the model's forward takes.
        usual: what it has asked of tokens, see `Tokens`.
    """

    objective: Objective
    taken: frozenset[str] = OF_MODEL
    usual: set[Statistic] = field(default_factory=set)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given) and self.is_of(other.objective) and self.taken == other.taken

    def is_of(self, objective: Objective) -> bool:
        """Whether it is this very one; a method is another object each time that it is looked up."""
        return objective is self.objective or (isinstance(objective, MethodType) and objective == self.objective)

    @property
    def name(self) -> str:
        """By which errors call it."""
        own = getattr(self.objective, "name", None) or getattr(self.objective, "__name__", None)
        return f"objective {own if isinstance(own, str) else type(self.objective).__name__!r}"

    def expect(self, names: Sequence[Statistic]) -> None:
        """These will be asked of tokens from now on, and nothing else."""
        self.usual.clear()
        self.usual.update(names)

    @property
    def on(self) -> Literal["tokens", "outputs"]:
        """What its first argument is: `Tokens` or `Outputs`."""
        return getattr(self.objective, "on", "tokens")

    @property
    def rows(self) -> int:
        """How many rows of a microbatch, one behind the other, belong together."""
        return getattr(self.objective, "rows", 1)

    def columns(self, batch: Batch) -> dict[str, Tensor]:
        """The entries of a batch that are the objective's."""
        return {name: tensor for name, tensor in batch.items() if name not in self.taken}

    def inputs(self, batch: Batch) -> Batch:
        """The others, which are the model's."""
        return {name: tensor for name, tensor in batch.items() if name in self.taken}

    def whole(self, batch: Batch) -> dict[str, Tensor]:
        """What the objective sees of a microbatch, whole, under keys of which `split_whole` knows."""
        seen = self.columns(batch) | {key: batch[key] for key in ("labels", "position_ids") if key in batch}
        return {_WHOLE + name: tensor for name, tensor in seen.items()}

    def signature(self, microbatches: Sequence[Batch]) -> int:
        """A number that differs where ranks have other objectives, or other columns; 32 bits."""
        columns = sorted((name, str(each.dtype), each.dim()) for name, each in self.columns(microbatches[0]).items())
        return 1 + zlib.crc32(repr((self.name, self.on, columns)).encode())

    def count(self, microbatches: Sequence[Batch]) -> int | None:
        """By what the sum over a step is divided, of sound microbatches, on the host; None: by unmasked targets.

        Raises:
            BatchError: the objective does not count.
        """
        own: Callable[[Batch], int] | None = getattr(self.objective, "count", None)
        if own is None:
            return None
        try:
            counts = [own(batch) for batch in microbatches]
        except Exception as error:
            raise BatchError(f"the count of {self.name} fails: {type(error).__name__}: {error}") from error
        for found in counts:
            if not isinstance(found, int) or found < 0:
                raise BatchError(f"the count of {self.name} must be an int, at least 0, not {found!r}.")
        return sum(counts)

    def check(self, microbatches: Sequence[Batch], *, rows: int | None = None) -> None:
        """Refuse what cannot be an objective, or what it cannot be called with; no collective.

        Args:
            rows: of what a microbatch is cut into; None: it is not.

        Raises:
            BatchError: says what is wrong.
        """
        if not callable(self.objective):
            raise BatchError(f"objective must be callable as objective(tokens, batch), not {self.objective!r}.")
        if self.on not in ("tokens", "outputs"):
            raise BatchError(f"the {self.name} has on={self.on!r}; it must be 'tokens' or 'outputs'.")
        if not isinstance(self.rows, int) or self.rows < 1:
            raise BatchError(f"the {self.name} has rows={self.rows!r}; it must be an int, at least 1.")
        for index, batch in enumerate(microbatches):
            about, count = f"microbatch {index} of {len(microbatches)}", batch["input_ids"].shape[0]
            for column in getattr(self.objective, "columns", ()):
                if column not in batch:
                    raise BatchError(
                        f"{about} lacks the column {column!r}, which the {self.name} needs; it has {', '.join(batch)}."
                    )
            for column, tensor in self.columns(batch).items():
                if tensor.shape[:1] != (count,):
                    raise BatchError(
                        f"{about}: {column} has the shape {tuple(tensor.shape)}; a column of the {self.name} has one "
                        f"entry for each of the {count} sequences along its first dim: (B,), (B, S) or (B, S, K)."
                    )
            own = getattr(self.objective, "check", None)
            try:
                _ = own(batch) if own is not None else None
            except Exception as error:
                raise BatchError(f"{about}: the {self.name} refuses it: {error}") from error
            for size in {count, rows or count}:
                if size % self.rows:
                    raise BatchError(
                        f"{about}: {size} sequences at a time cannot be taken {self.rows} by {self.rows}, as the "
                        f"{self.name} takes them. Let microbatches, and those of a pipeline (pp_microbatch_size), have "
                        f"a multiple of {self.rows} sequences."
                    )


def without_columns(given: Given | None, microbatches: Sequence[Batch]) -> Sequence[Batch]:
    """Microbatches without what is an objective's own, as the model takes them."""
    return microbatches if given is None else [given.inputs(batch) for batch in microbatches]


def split_whole(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A divided batch without what `Given.whole` has added to it, and that."""
    part = {name: tensor for name, tensor in batch.items() if not name.startswith(_WHOLE)}
    return part, {name.removeprefix(_WHOLE): batch[name] for name in batch.keys() - part.keys()}


class Tally:
    """An objective in one step or evaluation.

    Args:
        given: the objective.
        names: of what it adds up beside its value.

    Attributes:
        sums: of each name, over the calls so far; float64, in the order of the names.
        is_wrong: whether a value was not finite; bool scalar on the device.
        defect: what has gone wrong first on this rank; see [Note: a failure in a step].
    """

    def __init__(self, given: Given, names: Sequence[str], device: torch.device) -> None:
        self.given, self.names = given, tuple(names)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.is_wrong = torch.zeros((), dtype=torch.bool, device=device)
        self.defect: MeshwrightError | None = None

    def __call__(self, seen: Tokens | Outputs, columns: Mapping[str, Tensor]) -> Tensor:
        """The objective's value for a microbatch, scalar."""
        value = None
        if self.defect is None:
            try:
                value, sums = called(self.given, seen, columns)
                self._add(sums)
                self.is_wrong |= ~value.detach().isfinite()
            except MeshwrightError as error:
                self.defect = error
        if self.defect is not None or value is None:
            return seen.nothing()
        # Of rows that count for nothing an objective may return a number.
        return value if value.requires_grad or not torch.is_grad_enabled() else value + seen.nothing()

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        if tuple(sorted(sums)) != self.names:
            raise ConfigError(
                f"the {self.given.name} returns sums named {sorted(sums)}, where it has returned {[*self.names]} "
                f"before. Return the same names each time."
            )
        for index, name in enumerate(self.names):
            self.sums[index] += sums[name].detach()

    def error(self, is_wrong: bool) -> MeshwrightError | None:
        """What is wrong on this rank.

        Args:
            is_wrong: whether the value is not finite.
        """
        if self.defect is not None or not is_wrong:
            return self.defect
        return NotFiniteError(
            f"the {self.given.name} is not finite. No parameter was changed by this step. Look at the batch, and at "
            f"what the objective divides by, exponentiates or takes the logarithm of."
        )


def called(given: Given, seen: Sequences, columns: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """What an objective returns, taken apart.

    Raises:
        ConfigError: it fails, or returns something else.
    """
    try:
        answer: Any = given.objective(seen, columns)
    except (MeshwrightError, torch.OutOfMemoryError, dist.DistError):
        raise
    except KeyError as error:
        raise ConfigError(
            f"the {given.name} asks for {error}, which the batch has not; its columns: {', '.join(columns) or 'none'}."
        ) from error
    except Exception as error:
        raise ConfigError(f"the {given.name} fails: {type(error).__name__}: {error}") from error
    value, sums = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, {})
    if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
        raise ConfigError(f"the {given.name} returns {_kind(value)}. {_RETURNS}")
    if not isinstance(sums, Mapping):
        raise ConfigError(f"the {given.name} returns {_kind(sums)} beside its value. {_RETURNS}")
    for name, each in sums.items():
        if not isinstance(name, str) or not isinstance(each, Tensor) or each.dim() != 0:
            raise ConfigError(f"the {given.name} returns {_kind(each)} as {name!r}. {_RETURNS}")
    return value, sums


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    return f"a value of type {type(value).__name__}"
