"""Make a stage of a whole model, in place or for a while, at the inputs of its blocks.

What takes the place of the rest is said in `stand_ins`, and where a model can be cut in `trial_runs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.forward_order import Layer, put_around

from .boundary import Boundary
from .cut import Cut
from .stand_ins import stand_ins, until_left


def take_stage(model: nn.Module, cut: Cut, stage: range, boundary: Boundary) -> None:
    """Leave of a whole model what one stage holds; in place.

    Args:
        model: whole; a stage that is not the last then returns what it sends: tensors of the shapes and dtypes of the
            crossings behind it, the hidden states first.
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


def _zero_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Put zeros in the place of a parameter, and return it."""
    parameter = module.get_parameter(name)
    delattr(module, name)
    module.register_buffer(name, torch.zeros_like(parameter), persistent=False)
    return parameter


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
