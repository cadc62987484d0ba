"""Run blocks on this rank's positions; see `meshwright.parallel.tensor.sequence_parts`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import ModelError
from .collectives import Copies, Gather, GatherForParts, Split
from .sequence_parts import SequenceParts

Forward = Callable[..., Any]


@dataclass(frozen=True)
class _Shape:
    """B sequences of S positions on all ranks together, `part` of them on this one."""

    batch: int
    length: int
    part: int


class Stream:
    """The residual stream of a model, sharded along the sequence.

    Args:
        model: before its modules are wrapped.
        parts: of the model.
        copies: where what is gathered leaves the gradient rule for its uses in parts.
        group: the ranks of the axis.
    """

    def __init__(self, model: nn.Module, parts: SequenceParts, copies: Copies, group: dist.ProcessGroup) -> None:
        self.parts = parts
        self._copies = copies
        self._group = group
        self._size = dist.get_world_size(group)
        self._scattering = {model.get_submodule(name) for name in parts.scattering}
        self._shape: _Shape | None = None
        self._ran: set[str] = set()

    def scatters(self, module: nn.Module, output: Tensor) -> bool:
        """Whether a row-parallel layer's sum is scattered along the sequence."""
        shape = self._shape
        return shape is not None and module in self._scattering and output.shape[:-1] == (shape.batch, shape.length)

    def run_block(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block, between the scatter before the first of its stack and the gather behind the last.

        Raises:
            ModelError: the block mixes positions outside of its parts.
        """
        batch, length = self._given_shape(name, args, kwargs)
        # What else comes position by position is divided like the stream.
        args = tuple(self._split(value, batch, length) for value in args)
        kwargs = {key: self._split(value, batch, length) for key, value in kwargs.items()}
        outer, self._shape = self._shape, _Shape(batch, length, length // self._size)
        try:
            with self._explained(name):
                output = forward(*args, **kwargs)
            if name in self.parts.last:
                output = _map_hidden(output, batch, self._shape.part, self._gathered)
            return output
        finally:
            self._shape = outer

    def run_region(self, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A part of a block on all positions, and back.

        Raises:
            ModelError: the part is not given the stream.
        """
        shape = self._shape
        if shape is None:
            return forward(*args, **kwargs)
        known = len(self._copies)
        args = tuple(_map_hidden(value, shape.batch, shape.part, self._gathered) for value in args)
        kwargs = {key: _map_hidden(value, shape.batch, shape.part, self._gathered) for key, value in kwargs.items()}
        if len(self._copies) == known:
            raise ModelError(
                f"{name} is given no hidden states of shape (B, S, features), so its positions cannot be gathered. "
                f"Set sequence_parallel=false."
            )
        output = forward(*args, **kwargs)
        return _map_hidden(output, shape.batch, shape.length, lambda value: Split.apply(value, 1, self._group))

    def _given_shape(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        """B and S of the whole stream, from what a block is given: all of it at the first, else a part."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
                return value.shape[0], value.shape[1] * (1 if name in self.parts.first else self._size)
        raise ModelError(
            f"{name} is given no hidden states of shape (B, S, features), so its positions cannot be sharded. "
            f"Set sequence_parallel=false."
        )

    def _split(self, value: Any, batch: int, length: int) -> Any:
        whole = isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == (batch, length)
        return Split.apply(value, 1, self._group) if whole and value.dim() == 3 else value

    def _gathered(self, part: Tensor) -> Tensor:
        """The whole sequence. What uses it in parts finds its own gradient rule in the copies."""
        length = part.shape[1] * self._size
        whole: Tensor = Gather.apply(part, 1, length, self._group)
        self._copies.add(whole, GatherForParts.apply(part, whole.detach(), 1, self._group))
        return whole

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """A block that mixes positions outside of its parts fails in its first forward, on all ranks alike."""
        try:
            yield
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except RuntimeError as error:
            if name in self._ran:
                raise
            raise ModelError(
                f"{name} cannot run on a part of the positions ({str(error).splitlines()[0]}). "
                f"Set sequence_parallel=false."
            ) from error
        self._ran.add(name)


def _map_hidden(value: Any, batch: int, length: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the hidden states among a value, a tensor or the members of a tuple.

    They are (batch, length, features), or (batch * length, features), which `change` gets in the longer form.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        if value.dim() == 3 and value.shape[:2] == (batch, length):
            return change(value)
        if value.dim() == 2 and value.shape[0] == batch * length:
            return change(value.unflatten(0, (batch, length))).flatten(0, 1)
    if type(value) in (tuple, list):
        return type(value)(_map_hidden(each, batch, length, change) for each in value)
    return value
