"""What the objectives that ship have in common: options as a frozen config, and columns of which the shapes are known.

[Note: sums] An objective returns the sum over a microbatch's tokens, sequences or pairs, and the manager divides it by
how many of these the whole step has, whatever rank or microbatch they are in. So a mean over the step is what `count`
counts; a mean within a sequence is taken in the sum; a mean over a microbatch, which would weigh a token by how many
others are in it, is nowhere. A row of which all labels are masked counts for nothing, and nothing that its columns hold
reaches a gradient.

[Note: columns] A column (B, S) is aligned with positions, as `Tokens` is: entry s goes with the prediction of token
s + 1. The last one, and those of masked labels, are never read.

Shapes: B rows of a microbatch, S positions of each, P pairs of rows, D documents, K entries of a position.

This module imports no torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from ..base.errors import BatchError
from ..base.validation import FrozenModel
from ..strategy.contract import IGNORED_LABEL

if TYPE_CHECKING:
    from torch import Tensor

Columns: TypeAlias = "Mapping[str, Tensor]"
Sums: TypeAlias = "dict[str, Tensor]"
Kind = Literal["float", "int", "bool"]


@dataclass(frozen=True)
class Column:
    """A column of the batch.

    Attributes:
        name: its key.
        shapes: what it may be, such as "B" or "B S".
        kind: of its numbers.
        needed: whether the objective cannot do without.
    """

    name: str
    shapes: tuple[str, ...]
    kind: Kind = "float"
    needed: bool = True

    def wrong(self, tensor: Tensor, rows: int, positions: int) -> str | None:
        """What is wrong with one, or None."""
        sizes = {"B": rows, "S": positions}
        allowed = [[sizes.get(each) for each in shape.split()] for shape in self.shapes]
        if not any(_fits(tuple(tensor.shape), shape) for shape in allowed):
            wanted = " or ".join(f"({', '.join(shape.split())})" for shape in self.shapes)
            return f"has the shape {tuple(tensor.shape)}, not {wanted} with B={rows}, S={positions}"
        kind = str(tensor.dtype).removeprefix("torch.")
        fits = {"float": tensor.dtype.is_floating_point, "int": kind == "int64", "bool": kind == "bool"}
        wanted = {"float": "floating point", "int": "int64", "bool": "bool"}[self.kind]
        return None if fits[self.kind] else f"is {kind}, not {wanted}"


class Objective(FrozenModel):
    """Base of the objectives that ship: callable as `objective(tokens, batch)`; see [Note: sums] and [Note: columns].

    Attributes:
        name: by which `get_objective` finds it.
        on: what the first argument is, the statistics of tokens or the outputs of a model with another head.
        rows: how many consecutive rows belong together.
    """

    name: ClassVar[str]
    on: ClassVar[Literal["tokens", "outputs"]] = "tokens"
    rows: ClassVar[int] = 1

    @abstractmethod
    def __call__(self, tokens: Any, batch: Columns) -> Tensor | tuple[Tensor, Sums]:
        """The sum over a microbatch, scalar, and further sums by name."""

    @property
    def takes(self) -> tuple[Column, ...]:
        """The columns that these options ask for, also those that may be left out."""
        return ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that these options cannot do without."""
        return tuple(each.name for each in self.takes if each.needed)

    def count(self, batch: Columns) -> int:
        """What the sum of a whole microbatch is divided by, on the host: targets, unless a class says otherwise.

        Args:
            batch: `labels`, int64, (B, S), and the columns.
        """
        return int(predicted(batch).sum())

    def check(self, batch: Columns) -> None:
        """Refuse a whole microbatch that it cannot be called with, on the host.

        Raises:
            BatchError: a column lacks, or has another shape or dtype.
        """
        rows, positions = batch["labels"].shape
        if rows % self.rows:
            raise BatchError(
                f"objective {self.name!r} takes {self.rows} consecutive rows together, and a microbatch has {rows} "
                f"rows. Give a multiple of {self.rows}."
            )
        for column in self.takes:
            if column.name not in batch:
                if column.needed:
                    raise BatchError(
                        f"objective {self.name!r} needs the column {column.name!r}, which the batch lacks. It has "
                        f"{', '.join(sorted(batch))}."
                    )
                continue
            wrong = column.wrong(batch[column.name], rows, positions)
            if wrong:
                raise BatchError(f"column {column.name!r} of objective {self.name!r} {wrong}.")


class SequenceObjective(Objective):
    """An objective that is divided by the number of sequences (or pairs) with any unmasked target."""

    def count(self, batch: Columns) -> int:
        return int(predicted(batch).any(1).unflatten(0, (-1, self.rows)).any(1).sum())


def predicted(batch: Columns) -> Tensor:
    """Which positions predict a label, bool, (B, S - 1): the last one never does."""
    return batch["labels"][:, 1:] != IGNORED_LABEL


def _fits(shape: tuple[int, ...], allowed: list[int | None]) -> bool:
    return len(shape) == len(allowed) and all(want in (None, got) for got, want in zip(shape, allowed, strict=True))
