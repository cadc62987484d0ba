"""Reduce a full model to one stage, permanently or within a context.

[Note: one forward] Each stage runs the forward of the full model. The model's own code therefore computes positions,
masks and rotary tables on every stage, and no code here is specific to a model. Modules that a stage does not hold are
replaced by stubs without parameters:

- modules before the first block return zeros of the right shape;
- blocks before the stage return their input; the input of the stage's first block is then replaced with the tensors
  from the previous stage;
- the block after the stage ends the forward; its input is what the stage sends.

Models are split at the inputs of blocks, not at their outputs, so that the sender runs all code between two blocks.
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

# -- full models, one for each stage of a rank


def copy_for_stages(model: nn.Module, count: int) -> list[nn.Module]:
    """Return the model and `count - 1` copies of its modules, which share all parameters."""
    shared = [{id(parameter): parameter for parameter in model.parameters()} for _ in range(count - 1)]
    return [model, *(copy.deepcopy(model, memo) for memo in shared)]


def unshare_parameters(parts: Sequence[nn.Module]) -> None:
    """Copy parameters that a part shares with an earlier part, in place."""
    taken: set[nn.Parameter] = set()

    def own(parameter: nn.Parameter) -> nn.Parameter:
        is_taken = parameter in taken
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad) if is_taken else parameter

    for part in parts:
        replace_parameters(part, own)
        taken.update(part.parameters())


# -- a stage of a full model


def reduce_to_stage(model: nn.Module, cut: ModelPartition, stage: range, boundary: StageBoundary) -> None:
    """Reduce a full model to a stage, in place. Unless it is the last stage, its forward returns what it sends."""
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
    """Let the first block of a stage use the received tensors. Return a function that removes the hook."""
    first = model.get_submodule(cut.blocks[stage.start])
    # Before the hooks of sharding, which then treat the received tensors as the block's own input.
    return first.register_forward_pre_hook(boundary.input_hook, prepend=True, with_kwargs=True).remove


def register_output_hooks(model: nn.Module, boundary: StageBoundary) -> list[Callable[[], None]]:
    """Store outputs of modules before the first block that cross. Return functions that remove the hooks."""

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
    """Context in which the full model acts as one stage."""
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
        # In reverse order, since modules may be inside others.
        for name, module in reversed(originals.items()):
            model.set_submodule(name, module)


# -- stubs


def build_stubs(model: nn.Module, cut: ModelPartition, stage: range, boundary: StageBoundary) -> dict[str, nn.Module]:
    """Return the stub of each module that a stage does not hold, by name."""
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
    """Ends the forward of a stage at the block after it; holds the tensors that the stage sends."""

    def __init__(self, sent: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.outputs = sent


class _ModuleStub(nn.Module):
    """Module without parameters. It forwards attribute access to the module it replaces; parameters read as zeros.

    `absent_names` are the modules and parameters inside the replaced module, for tensor-parallel plans.
    """

    def __init__(self, original: nn.Module, boundary: StageBoundary) -> None:
        super().__init__()
        # In a tuple, so that it is not registered as a submodule.
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
            # A view of one element, to save memory.
            return torch.zeros((), dtype=value.dtype, device=self._boundary.device).expand(value.shape)
        return value


class _ZerosStub(_ModuleStub):
    """Replaces a module outside the blocks that runs before the stage: returns zeros, or its output if that crosses."""

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
    """Replaces a block before the stage: returns its input."""

    def __init__(
        self, original: nn.Module, boundary: StageBoundary, output_length: int | None, *, is_last: bool
    ) -> None:
        super().__init__(original, boundary)
        self._output_length, self._is_last = output_length, is_last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = get_tensor_at((args, kwargs), find_hidden_states(args, kwargs))
        if self._is_last and hidden is not None:
            # A copy, since the received tensor may be written into it, and the model may also hold its input.
            hidden = hidden.detach().clone()
        return hidden if self._output_length is None else (hidden, *[None] * (self._output_length - 1))


class _StageEndStub(_ModuleStub):
    """Replaces the block after the stage: ends the forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _StageEndReached(self._boundary.collect_outputs(args, kwargs))


class _UnreachableStub(_ModuleStub):
    """Replaces a module that a stage never reaches."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError("a stage of the pipeline called a module that it does not hold.")
