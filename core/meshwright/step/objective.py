"""Objectives in place of the token loss: their requirements and their calls in a step.

[Note: objectives] An objective is called as `objective(tokens, columns)` for each microbatch. `tokens` is a `Tokens`,
or an `Outputs` if `objective.on` is "outputs", for models whose head is not that of a vocabulary. `columns` are the
entries of the batch that the model's forward does not take, of whole sequences: (B,), (B, S) or (B, S, K). It returns
the sum over the microbatch's tokens or sequences, scalar, with a gradient, and optionally a mapping of further sums,
scalars, which the manager adds up as `last_sums`. Optional attributes:

- `on`: see above;
- `columns`: entries of the batch that it requires;
- `rows`: number of consecutive rows that belong together (2 for pairs);
- `check(batch)`: raises for a microbatch that it cannot take;
- `count(batch)`: int, counted on the host; the sum is divided by its total in place of the unmasked targets;
- `name`: its name in messages.

Entry s of a column (B, S) belongs to position s: the prediction of token s + 1. Rows without labels, which even out the
number of microbatches over ranks, should add nothing.

[Note: a failure in a step] If an objective fails on one rank during a step, this rank continues with 0, so that no
other waits for it. At the end of the step all ranks raise the error, and nothing is trained.

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
from ..base.types import Batch, Objective, TokenStatistic
from .tokens import Outputs, Sequences, Tokens

OF_MODEL = frozenset({"input_ids", "labels", "attention_mask", "position_ids"})
"""Entries of a batch that are never an objective's own, whatever the model takes."""
_WHOLE = "whole: "
_RETURNS = "An objective returns a scalar tensor, or one and a mapping of names to scalar tensors, each a sum."


@dataclass(frozen=True, eq=False)
class Given:
    """An objective, as it was given for a model.

    Attributes:
        objective: see [Note: objectives].
        taken: entries of a batch that the model's forward takes.
        usual: what it has asked of tokens; see `Tokens`.
    """

    objective: Objective
    taken: frozenset[str] = OF_MODEL
    usual: set[TokenStatistic] = field(default_factory=set)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Given) and self.is_of(other.objective) and self.taken == other.taken

    def is_of(self, objective: Objective) -> bool:
        """Return whether it is this very objective; a bound method is a new object at each access."""
        return objective is self.objective or (isinstance(objective, MethodType) and objective == self.objective)

    @property
    def name(self) -> str:
        """Its name in errors."""
        own = getattr(self.objective, "name", None) or getattr(self.objective, "__name__", None)
        return f"objective {own if isinstance(own, str) else type(self.objective).__name__!r}"

    def expect(self, names: Sequence[TokenStatistic]) -> None:
        """Replace `usual`."""
        self.usual.clear()
        self.usual.update(names)

    @property
    def on(self) -> Literal["tokens", "outputs"]:
        """Its first argument: `Tokens` or `Outputs`."""
        return getattr(self.objective, "on", "tokens")

    @property
    def rows(self) -> int:
        """Number of consecutive rows of a microbatch that belong together."""
        return getattr(self.objective, "rows", 1)

    def columns(self, batch: Batch) -> dict[str, Tensor]:
        """Return the entries of a batch that belong to the objective."""
        return {name: tensor for name, tensor in batch.items() if name not in self.taken}

    def inputs(self, batch: Batch) -> Batch:
        """Return the entries that belong to the model."""
        return {name: tensor for name, tensor in batch.items() if name in self.taken}

    def whole(self, batch: Batch) -> dict[str, Tensor]:
        """Return what the objective sees of an undivided microbatch, under the keys that `split_whole` removes."""
        seen = self.columns(batch) | {key: batch[key] for key in ("labels", "position_ids") if key in batch}
        return {_WHOLE + name: tensor for name, tensor in seen.items()}

    def signature(self, microbatches: Sequence[Batch]) -> int:
        """Return a 32-bit number that differs between other objectives and other columns."""
        columns = sorted((name, str(each.dtype), each.dim()) for name, each in self.columns(microbatches[0]).items())
        return 1 + zlib.crc32(repr((self.name, self.on, columns)).encode())

    def count(self, microbatches: Sequence[Batch]) -> int | None:
        """Count what the sum is divided by, on the host; None: unmasked targets.

        Raises:
            BatchError: the objective's own count fails.
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
        """Refuse an invalid objective, and batches that it does not take; no collective.

        Args:
            rows: of the pieces into which a microbatch is cut; None: it is not.

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
    """Return microbatches as the model takes them, without the objective's columns."""
    return microbatches if given is None else [given.inputs(batch) for batch in microbatches]


def split_whole(batch: Batch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a divided batch into the model's part and what `Given.whole` has added."""
    part = {name: tensor for name, tensor in batch.items() if not name.startswith(_WHOLE)}
    return part, {name.removeprefix(_WHOLE): batch[name] for name in batch.keys() - part.keys()}


class Tally:
    """An objective in one step or evaluation.

    Args:
        names: of its further sums.

    Attributes:
        sums: the further sums so far; float64, in the order of the names.
        is_wrong: a value was not finite; bool scalar on the device.
        defect: the first error on this rank; see [Note: a failure in a step].
    """

    def __init__(self, given: Given, names: Sequence[str], device: torch.device) -> None:
        self.given, self.names = given, tuple(names)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=device)
        self.is_wrong = torch.zeros((), dtype=torch.bool, device=device)
        self.defect: MeshwrightError | None = None

    def __call__(self, seen: Tokens | Outputs, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the objective's value for a microbatch, scalar."""
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
        """Return the error of this rank, if any.

        Args:
            is_wrong: the value was not finite.
        """
        if self.defect is not None or not is_wrong:
            return self.defect
        return NotFiniteError(
            f"the {self.given.name} is not finite. No parameter was changed by this step. Look at the batch, and at "
            f"what the objective divides by, exponentiates or takes the logarithm of."
        )


def called(given: Given, seen: Sequences, columns: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Call an objective and return its value and further sums.

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
