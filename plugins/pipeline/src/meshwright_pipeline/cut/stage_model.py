"""Make a stage of a whole model, in place or for a while, at the inputs of its blocks.

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

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.plugin import Layer, ModelError, put_around, replace_parameters, set_tensor

from .boundary import Boundary, Cut, Dim, found_at, hidden_path

# -- whole models, one for each stage of a rank


def separate_parts(model: nn.Module, count: int) -> list[nn.Module]:
    """The model and copies of its modules, `count` in all, which share all parameters."""
    shared = [{id(parameter): parameter for parameter in model.parameters()} for _ in range(count - 1)]
    return [model, *(copy.deepcopy(model, memo) for memo in shared)]


def own_parameters(parts: Sequence[nn.Module]) -> None:
    """Give each part parameters of its own where an earlier part has the same; in place, of equal values and dtypes."""
    taken: set[nn.Parameter] = set()

    def own(parameter: nn.Parameter) -> nn.Parameter:
        is_taken = parameter in taken
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad) if is_taken else parameter

    for part in parts:
        replace_parameters(part, own)
        taken.update(part.parameters())


# -- a stage of a whole model


def take_stage(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> None:
    """Leave of a whole model, in place, what the stage holds; one that is not the last then returns what it sends."""
    for name, stand_in in stand_ins(model, cut, stage, boundary).items():
        original = model.get_submodule(name)
        model.set_submodule(name, stand_in)
        original.to("meta")
    if stage.start > 0:
        for name in cut.loose:
            _zero_parameter(model, name)
    else:
        keep_early(model, boundary)
    if stage.stop < len(cut.blocks):
        put_around(model, Layer.STAGE, until_left)


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


def _zero_parameter(model: nn.Module, name: str) -> nn.Parameter:
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    parameter = module.get_parameter(leaf)
    delattr(module, leaf)
    module.register_buffer(leaf, torch.zeros_like(parameter), persistent=False)
    return parameter


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
        for name in cut.loose if stage.start > 0 else ():
            undo.callback(set_tensor, model, name, _zero_parameter(model, name))
        yield


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


# -- stand-ins


def stand_ins(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> dict[str, nn.Module]:
    """For each module that a stage does not hold, by name, what takes its place."""
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
    @functools.wraps(forward)
    def stage_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        try:
            forward(*args, **kwargs)
        except _Left as left:
            return left.sent
        raise ModelError("the forward of a stage of the pipeline ended before the stage did.")

    return stage_forward


class _Left(Exception):
    """Ends the forward of a stage at the block behind it; holds what the stage sends."""

    def __init__(self, sent: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.sent = sent


class _StandIn(nn.Module):
    """Holds no parameter; answers what a model reads of the module that it replaces, parameters with zeros.

    `names_elsewhere` are modules and parameters within the one that it replaces, for tensor-parallel plans.
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
        raise _Left(self._boundary.sent(args, kwargs))


class _Nothing(_StandIn):
    """For what a stage never reaches."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError("a stage of the pipeline called a module that it does not hold.")
