"""Base classes of objectives. Imports no torch.

[Note: sums] An objective returns a sum over a microbatch's tokens, sequences or pairs. The manager divides it by their
number in the entire step, over all microbatches and ranks; `count` returns that of one microbatch. An objective may
take a mean within a sequence, but not over a microbatch. A row whose labels are all masked adds 0.

[Note: columns] A column (B, S) is aligned with positions: entry s belongs to the prediction of token s + 1. The last
entry, and those of masked labels, are never read.

Shapes: B rows of a microbatch, S positions of each, P pairs of rows, D documents, K entries of a position.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from ..base.errors import BatchError
from ..base.types import IGNORE_INDEX
from ..base.validation import FrozenModel

if TYPE_CHECKING:
    from torch import Tensor

BatchColumns: TypeAlias = "Mapping[str, Tensor]"
"""A microbatch, or its additional columns, by name."""
ExtraSums: TypeAlias = "dict[str, Tensor]"
"""Extra sums of an objective, scalars, by name."""
NumberKind = Literal["float", "int", "bool"]
InputKind = Literal["tokens", "outputs"]
"""First argument of an objective: token statistics, or the outputs of the model."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A finite option above 0."""
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""A finite option of at least 0."""
Fraction = Annotated[float, Field(ge=0, le=1)]
"""An option from 0 to 1."""


@dataclass(frozen=True)
class Column:
    """A column of the batch: name, allowed shapes such as "B" or "B S", number type, and whether it is required."""

    name: str
    shapes: tuple[str, ...]
    number_kind: NumberKind = "float"
    is_required: bool = True

    def find_error(self, tensor: Tensor, num_rows: int, num_positions: int) -> str | None:
        """Return an error about the shape or dtype of a tensor, or None."""
        sizes = {"B": num_rows, "S": num_positions}
        allowed = [[sizes.get(each) for each in shape.split()] for shape in self.shapes]
        if not any(_matches_shape(tuple(tensor.shape), shape) for shape in allowed):
            wanted = " or ".join(f"({', '.join(shape.split())})" for shape in self.shapes)
            return f"has the shape {tuple(tensor.shape)}, not {wanted} with B={num_rows}, S={num_positions}"
        kind = str(tensor.dtype).removeprefix("torch.")
        fits = {"float": tensor.dtype.is_floating_point, "int": kind == "int64", "bool": kind == "bool"}
        wanted = {"float": "floating point", "int": "int64", "bool": "bool"}[self.number_kind]
        return None if fits[self.number_kind] else f"is {kind}, not {wanted}"


class ObjectiveConfig(FrozenModel):
    """Base class of registered objectives, called as `objective(tokens, batch)`.

    See [Note: sums] and [Note: columns].

    Attributes:
        name: name for `get_objective`.
        input_kind: the first argument: token statistics, or the outputs of a model without a vocabulary head.
        group_size: number of consecutive rows that belong together.
    """

    name: ClassVar[str]
    input_kind: ClassVar[InputKind] = "tokens"
    group_size: ClassVar[int] = 1

    @abstractmethod
    def __call__(self, tokens: Any, batch: BatchColumns) -> Tensor | tuple[Tensor, ExtraSums]:
        """Return the sum over a microbatch, scalar, and optionally extra sums by name."""

    @property
    def accepted_columns(self) -> tuple[Column, ...]:
        """The columns that the objective reads with these options, required or not."""
        return ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the required columns."""
        return tuple(each.name for each in self.accepted_columns if each.is_required)

    def count(self, batch: BatchColumns) -> int:
        """Return what a full microbatch adds to the divisor; default: its number of targets. Runs on the host."""
        return int(get_target_mask(batch).sum())

    def check(self, batch: BatchColumns) -> None:
        """Raise BatchError if a column of a full microbatch is missing or has a wrong shape or dtype."""
        rows, positions = batch["labels"].shape
        if rows % self.group_size:
            raise BatchError(
                f"objective {self.name!r} takes {self.group_size} consecutive rows together, and a microbatch has "
                f"{rows} rows. Give a multiple of {self.group_size}."
            )
        for column in self.accepted_columns:
            if column.name not in batch:
                if column.is_required:
                    raise BatchError(
                        f"objective {self.name!r} needs the column {column.name!r}, which the batch lacks. It has "
                        f"{', '.join(sorted(batch))}."
                    )
                continue
            error = column.find_error(batch[column.name], rows, positions)
            if error:
                raise BatchError(f"column {column.name!r} of objective {self.name!r} {error}.")


class SequenceObjective(ObjectiveConfig):
    """An objective whose sum is divided by the number of sequences (or pairs) with at least one unmasked target."""

    def count(self, batch: BatchColumns) -> int:
        return int(get_target_mask(batch).any(1).unflatten(0, (-1, self.group_size)).any(1).sum())


def get_target_mask(batch: BatchColumns) -> Tensor:
    """Return the mask of positions that predict a label; bool, (B, S - 1)."""
    return batch["labels"][:, 1:] != IGNORE_INDEX


def _matches_shape(shape: tuple[int, ...], allowed: list[int | None]) -> bool:
    return len(shape) == len(allowed) and all(want in (None, got) for got, want in zip(shape, allowed, strict=True))
