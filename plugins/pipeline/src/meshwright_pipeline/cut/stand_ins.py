"""What takes the place of modules that a stage does not hold, in a forward that is still the whole model's own.

What is replaced follows from the cut; putting stand-ins into a model is done in `stage_model`.

[Note: one forward] Each stage runs the forward of the whole model, so that positions, masks, rotary tables and whatever
else a model computes are its own code on every stage, and nothing here knows a model. What a stage does not hold is
replaced by stand-ins without parameters:

- what runs before the first block gives zeros of the right shape, on which the model's arithmetic falls;
- blocks before the stage give back their input; the input of the stage's first block is then replaced by what the
  stage before has sent;
- the block behind the stage ends the forward, and its input is what the stage sends.

Cutting at inputs, not outputs, leaves to the sender what a model does between two blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.errors import ModelError

from .boundary import Boundary, Dim, found_at, hidden_path
from .cut import Cut


def stand_ins(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> dict[str, nn.Module]:
    """For each module that a stage does not hold, by name, what takes its place.

    Args:
        model: whole.
        cut: of the model.
        stage: indices of the stage's blocks.
        boundary: which the stand-ins read: sizes of the microbatch, and what has crossed.
    """
    found: dict[str, nn.Module] = {}
    for index, name in enumerate(cut.blocks):
        block = model.get_submodule(name)
        if index < stage.start:
            found[name] = _Through(block, boundary, cut.widths[name], is_last=index == stage.start - 1)
        elif index >= stage.stop:
            found[name] = _End(block, boundary) if index == stage.stop else _Nothing(block, boundary)
    for name, positions in cut.outside.items():
        if not cut.runs_in(name, stage):
            module = model.get_submodule(name)
            is_before = stage.start > 0 and min(positions, default=stage.stop) <= stage.start
            has_dims = is_before and name in cut.outputs
            found[name] = _Zeros(module, boundary, name, *cut.outputs[name]) if has_dims else _Nothing(module, boundary)
    return found


def until_left(forward: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """A forward that returns what a stage sends."""

    @functools.wraps(forward)
    def stage_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        try:
            forward(*args, **kwargs)
        except Left as left:
            return left.sent
        raise ModelError("the forward of a stage of the pipeline ended before the stage did.")

    return stage_forward


class Left(Exception):
    """Ends the forward of a stage at the block behind it; holds what the stage sends."""

    def __init__(self, sent: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.sent = sent


class _StandIn(nn.Module):
    """Holds no parameter; answers what a model reads of the module that it replaces, parameters with zeros.

    Attributes:
        names_elsewhere: of modules and parameters within the one that it replaces, for tensor-parallel plans.
    """

    def __init__(self, original: nn.Module, boundary: Boundary) -> None:
        super().__init__()
        # In a tuple, so that it is no submodule.
        self._original = (original,)
        self._boundary = boundary
        self.names_elsewhere = frozenset(
            name for named in (original.named_modules(), original.named_parameters()) for name, _ in named if name
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_original"][0], name)
        if isinstance(value, nn.Parameter):
            # Without memory of its own.
            return torch.zeros((), dtype=value.dtype, device=self._boundary.device).expand(value.shape)
        return value


class _Zeros(_StandIn):
    """For what runs before the stage, outside of blocks: zeros, or what has crossed of it."""

    def __init__(
        self, original: nn.Module, boundary: Boundary, name: str, dims: Sequence[Dim], dtype: torch.dtype
    ) -> None:
        super().__init__(original, boundary)
        self._name, self._dims, self._dtype = name, dims, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        early = self._boundary.early.get(self._name)
        if early is not None:
            return early
        shape = [dim.size(*self._boundary.size) for dim in self._dims]
        return torch.zeros(shape, dtype=self._dtype, device=self._boundary.device)


class _Through(_StandIn):
    """For blocks before the stage."""

    def __init__(self, original: nn.Module, boundary: Boundary, width: int | None, *, is_last: bool) -> None:
        super().__init__(original, boundary)
        self._width, self._is_last = width, is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = found_at((args, kwargs), hidden_path(args, kwargs))
        if self._is_last and hidden is not None:
            # Into which what was received may be written; the model may hold its input besides.
            hidden = hidden.detach().clone()
        return hidden if self._width is None else (hidden, *[None] * (self._width - 1))


class _End(_StandIn):
    """For the block behind the stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise Left(self._boundary.sent(args, kwargs))


class _Nothing(_StandIn):
    """For what a stage never reaches."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError("a stage of the pipeline called a module that it does not hold.")
