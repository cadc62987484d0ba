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

from meshwright.plugin import ModelError, WrapOrder, replace_parameters, set_tensor, wrap_forward

from .boundary import ModelPartition, StageBoundary, SymbolicDim, find_hidden_states, get_tensor_at

# -- whole models, one for each stage of a rank


def copy_for_stages(model: nn.Module, count: int) -> list[nn.Module]:
    """The model and copies of its modules, `count` in all, which share all parameters."""
    shared = [{id(parameter): parameter for parameter in model.parameters()} for _ in range(count - 1)]
    return [model, *(copy.deepcopy(model, memo) for memo in shared)]


def unshare_parameters(parts: Sequence[nn.Module]) -> None:
    """Give each part parameters of its own where an earlier part has the same; in place, of equal values and dtypes."""
    taken: set[nn.Parameter] = set()

    def own(parameter: nn.Parameter) -> nn.Parameter:
        is_taken = parameter in taken
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad) if is_taken else parameter

    for part in parts:
        replace_parameters(part, own)
        taken.update(part.parameters())


# -- a stage of a whole model


def reduce_to_stage(model: nn.Module, cut: ModelPartition, stage: range, boundary: StageBoundary) -> None:
    """Leave of a whole model, in place, what the stage holds; one that is not the last then returns what it sends."""
    for name, stand_in in build_stubs(model, cut, stage, boundary).items():
        original = model.get_submodule(name)
        model.set_submodule(name, stand_in)
        original.to("meta")
    if stage.start > 0:
        for name in cut.container_parameters:
            _replace_by_zeros(model, name)
    else:
        register_output_hooks(model, boundary)
    if stage.stop < len(cut.blocks):
        wrap_forward(model, WrapOrder.STAGE, stop_at_stage_end)


def register_input_hook(
    model: nn.Module, cut: ModelPartition, stage: range, boundary: StageBoundary
) -> Callable[[], None]:
    """Let the first block of a stage take what was received; returns what undoes that."""
    first = model.get_submodule(cut.blocks[stage.start])
    # Before the hooks of sharding, which see what is received as the block's own input.
    return first.register_forward_pre_hook(boundary.input_hook, prepend=True, with_kwargs=True).remove


def register_output_hooks(model: nn.Module, boundary: StageBoundary) -> list[Callable[[], None]]:
    """Let modules before the first block leave what crosses of them with the boundary; returns what undoes that."""

    def keeping(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            boundary.pre_block_outputs.setdefault(name, output)

        return hook

    names = [each.source for each in boundary.outputs if isinstance(each.source, str)]
    return [model.get_submodule(name).register_forward_hook(keeping(name)).remove for name in names]


def _replace_by_zeros(model: nn.Module, name: str) -> nn.Parameter:
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    parameter = module.get_parameter(leaf)
    delattr(module, leaf)
    module.register_buffer(leaf, torch.zeros_like(parameter), persistent=False)
    return parameter


@contextmanager
def temporary_stage(model: nn.Module, cut: ModelPartition, stage: range, boundary: StageBoundary) -> Iterator[None]:
    """The whole model as one stage, for a while."""
    with ExitStack() as undo:
        if stage.start > 0:
            undo.callback(register_input_hook(model, cut, stage, boundary))
        else:
            for each in register_output_hooks(model, boundary):
                undo.callback(each)
        undo.enter_context(_swap_modules(model, build_stubs(model, cut, stage, boundary)))
        for name in cut.container_parameters if stage.start > 0 else ():
            undo.callback(set_tensor, model, name, _replace_by_zeros(model, name))
        yield


@contextmanager
def _swap_modules(model: nn.Module, others: Mapping[str, nn.Module]) -> Iterator[None]:
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


def build_stubs(model: nn.Module, cut: ModelPartition, stage: range, boundary: StageBoundary) -> dict[str, nn.Module]:
    """For each module that a stage does not hold, by name, what takes its place."""
    found: dict[str, nn.Module] = {}
    for index, name in enumerate(cut.blocks):
        block = model.get_submodule(name)
        if index < stage.start:
            found[name] = _PassThroughStub(block, boundary, cut.output_lengths[name], is_last=index == stage.start - 1)
        elif index >= stage.stop:
            found[name] = _StageEndStub(block, boundary) if index == stage.stop else _UnreachableStub(block, boundary)
    for name, positions in cut.outside_modules.items():
        if not cut.runs_on_stage(name, stage):
            module = model.get_submodule(name)
            is_before = stage.start > 0 and min(positions, default=stage.stop) <= stage.start
            has_dims = is_before and name in cut.outside_outputs
            found[name] = (
                _ZerosStub(module, boundary, name, *cut.outside_outputs[name])
                if has_dims
                else _UnreachableStub(module, boundary)
            )
    return found


def stop_at_stage_end(forward: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    @functools.wraps(forward)
    def stage_forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        try:
            forward(*args, **kwargs)
        except _StageEndReached as left:
            return left.outputs
        raise ModelError("the forward of a stage of the pipeline ended before the stage did.")

    return stage_forward


class _StageEndReached(Exception):
    """Ends the forward of a stage at the block behind it; holds what the stage sends."""

    def __init__(self, sent: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.outputs = sent


class _ModuleStub(nn.Module):
    """Holds no parameter; answers what a model reads of the module that it replaces, parameters with zeros.

    `absent_names` are modules and parameters within the one that it replaces, for tensor-parallel plans.
    """

    def __init__(self, original: nn.Module, boundary: StageBoundary) -> None:
        super().__init__()
        # In a tuple, so that it is no submodule.
        self._original = (original,)
        self._boundary = boundary
        self.absent_names = frozenset(
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


class _ZerosStub(_ModuleStub):
    """For what runs before the stage, outside of blocks: zeros, or what has crossed of it."""

    def __init__(
        self, original: nn.Module, boundary: StageBoundary, name: str, dims: Sequence[SymbolicDim], dtype: torch.dtype
    ) -> None:
        super().__init__(original, boundary)
        self._name, self._dims, self._dtype = name, dims, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        early = self._boundary.pre_block_outputs.get(self._name)
        if early is not None:
            return early
        shape = [dim.size(*self._boundary.batch_shape) for dim in self._dims]
        return torch.zeros(shape, dtype=self._dtype, device=self._boundary.device)


class _PassThroughStub(_ModuleStub):
    """For blocks before the stage."""

    def __init__(
        self, original: nn.Module, boundary: StageBoundary, output_length: int | None, *, is_last: bool
    ) -> None:
        super().__init__(original, boundary)
        self._output_length, self._is_last = output_length, is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = get_tensor_at((args, kwargs), find_hidden_states(args, kwargs))
        if self._is_last and hidden is not None:
            # Into which what was received may be written; the model may hold its input besides.
            hidden = hidden.detach().clone()
        return hidden if self._output_length is None else (hidden, *[None] * (self._output_length - 1))


class _StageEndStub(_ModuleStub):
    """For the block behind the stage."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _StageEndReached(self._boundary.collect_outputs(args, kwargs))


class _UnreachableStub(_ModuleStub):
    """For what a stage never reaches."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError("a stage of the pipeline called a module that it does not hold.")
