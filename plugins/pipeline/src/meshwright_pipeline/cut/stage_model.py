"""Cut a model at the inputs of blocks, with its own forward on every stage.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.errors import ModelError

from .boundary import Boundary, Crossing, Dim, found_at, hidden_path


@dataclass(frozen=True)
class Cut:
    """How a model is cut, as runs of it have shown (`meshwright_pipeline.cut.trial_runs`).

    Attributes:
        blocks: names, in the order in which they run.
        outside: for each module outside of the blocks that has parameters of its own, after how many blocks it runs;
            nothing for those that do not run.
        outputs: dims and dtype of what those return that return one tensor.
        kept: those without a parameter that trains, such as tables of positions; every stage holds them.
        loose: names of parameters of modules that contain the blocks; the first stage holds them.
        widths: for each block, the length of the tuple that it returns; None where it returns a tensor.
        crossings: what crosses the boundary before each block at which the model is cut, by the block's index.
        in_place: see `Boundary`.
    """

    blocks: tuple[str, ...]
    outside: Mapping[str, frozenset[int]]
    outputs: Mapping[str, tuple[tuple[Dim, ...], torch.dtype]]
    kept: frozenset[str]
    loose: tuple[str, ...]
    widths: Mapping[str, int | None]
    crossings: Mapping[int, tuple[Crossing, ...]] = field(default_factory=dict)
    in_place: bool = False

    def runs_in(self, module: str, stage: range) -> bool:
        """Whether a stage runs a module outside of the blocks on real values, and so must hold it."""
        if module in self.kept:
            return True
        positions = self.outside[module] or {0}
        return any(stage.start < each <= stage.stop or each == stage.start == 0 for each in positions)

    def boundary(self, stage: range) -> Boundary:
        """For a stage with these blocks."""
        entering, leaving = self.crossings.get(stage.start, ()), self.crossings.get(stage.stop, ())
        return Boundary(entering, leaving, in_place=self.in_place)


class Left(Exception):
    """Ends the forward of a stage at the block behind it; holds what the stage sends."""

    def __init__(self, sent: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.sent = sent


class _StandIn(nn.Module):
    """Holds no parameter; answers what a model reads of the module that it replaces, parameters with zeros."""

    def __init__(self, original: nn.Module, boundary: Boundary) -> None:
        super().__init__()
        # In a tuple, so that it is no submodule.
        self._original = (original,)
        self._boundary = boundary

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


# -- taking a model apart


def take_stage(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> None:
    """Leave of a whole model what one stage holds; in place.

    Args:
        model: whole; a stage that is not the last then returns what it sends.
        cut: of the model.
        stage: indices of its blocks.
        boundary: which the stand-ins will read.
    """
    for name, stand_in in stand_ins(model, cut, stage, boundary).items():
        original = model.get_submodule(name)
        model.set_submodule(name, stand_in)
        original.to("meta")
    if stage.start > 0:
        for name in cut.loose:
            module, _, leaf = name.rpartition(".")
            _zero_parameter(model.get_submodule(module), leaf)
    else:
        keep_early(model, boundary)
    if stage.stop < len(cut.blocks):
        model.forward = until_left(model.forward)


def enter_stage(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> Callable[[], None]:
    """Let the first block of a stage take what was received; returns what undoes that."""
    first = model.get_submodule(cut.blocks[stage.start])
    # Before the hooks of sharding, which see what is received as the block's own input.
    return first.register_forward_pre_hook(boundary.hook, prepend=True, with_kwargs=True).remove


def keep_early(model: nn.Module, boundary: Boundary) -> list[Callable[[], None]]:
    """Let modules before the first block leave what crosses of them with the boundary; returns what undoes that."""

    def keeping(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            boundary.early.setdefault(name, output)

        return hook

    names = [each.source for each in boundary.leaving if isinstance(each.source, str)]
    return [model.get_submodule(name).register_forward_hook(keeping(name)).remove for name in names]


def _zero_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Put zeros in the place of a parameter, and return it."""
    parameter = module._parameters.pop(name)
    if parameter is None:
        raise ModelError(f"{name} is no parameter.")
    module.register_buffer(name, torch.zeros_like(parameter), persistent=False)
    return parameter


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


def stand_ins(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> dict[str, nn.Module]:
    """For each module that a stage does not hold, what takes its place."""
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


# -- for a while


@contextmanager
def staged(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> Iterator[None]:
    """The whole model as one stage, for a while."""
    with ExitStack() as undo:
        if stage.start > 0:
            undo.callback(enter_stage(model, cut, stage, boundary))
        else:
            for each in keep_early(model, boundary):
                undo.callback(each)
        undo.enter_context(_swapped(model, stand_ins(model, cut, stage, boundary)))
        if stage.start > 0:
            undo.enter_context(_zeroed(model, cut.loose))
        yield


@contextmanager
def _zeroed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    parameters = {}
    try:
        for name in names:
            module, _, leaf = name.rpartition(".")
            parameters[name] = _zero_parameter(model.get_submodule(module), leaf)
        yield
    finally:
        for name, parameter in parameters.items():
            module, _, leaf = name.rpartition(".")
            delattr(model.get_submodule(module), leaf)
            model.get_submodule(module).register_parameter(leaf, parameter)


@contextmanager
def _swapped(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
    originals = {name: model.get_submodule(name) for name in others}
    try:
        for name, module in others.items():
            model.set_submodule(name, module)
        yield
    finally:
        # Backwards, for those that lie within others.
        for name, module in reversed(originals.items()):
            model.set_submodule(name, module)
