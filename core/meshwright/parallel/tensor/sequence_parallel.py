"""Sequence parallelism: outside of the tensor-parallel layers of a block, each rank has a slice of the positions.

The residual stream and the norms of a stack are sharded along the sequence. The stream is gathered at the entry of each
region of a block that mixes positions or features (attention, MLP), and scattered at its exit. If the region is one
chain of column- and row-parallel layers, the last layer's reduction scatters it. Embedding, positions and masks, head
and loss see the full sequence.
Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import ModelError
from ...model.layout import ModelLayout
from ...tensors.ops import temporary_attribute
from .. import ForwardMethod, reraise_as_model_error
from .collectives import Gather, GatherWithPartialGrad, Split
from .tp_plan import TensorParallelPlan, get_base_layer_name

_CHAIN_STYLES = ("colwise", "rowwise", "packed_colwise", "replicated_with_grad_allreduce")


@dataclass
class SequenceParallelPlan:
    """Names of the modules that sequence parallelism changes in a model.

    Attributes:
        entry_blocks, exit_blocks: first and last block of each stack. The stream is scattered at the entry of the first
            and gathered at the exit of the last.
        blocks: all blocks of these stacks.
        regions: modules within blocks that get the full sequence.
        scatter_layers: row-parallel layers of regions whose reduction scatters the output.
        partial_grad_parameters: parameters that are used with this rank's positions only.
    """

    entry_blocks: set[str]
    exit_blocks: set[str]
    blocks: list[str]
    regions: list[str] = field(default_factory=list)
    scatter_layers: set[str] = field(default_factory=set)
    partial_grad_parameters: set[str] = field(default_factory=set)


def plan_sequence_parallel(model: nn.Module, layout: ModelLayout, plan: TensorParallelPlan) -> SequenceParallelPlan:
    """Plan sequence parallelism for every stack that `plan` shards.

    Raises:
        ModelError: there is no such stack, or a block cannot be divided into regions.
    """
    stacks = [stack for stack in layout.stacks if any(map(plan.has_style_within, stack))]
    if not stacks:
        raise ModelError(
            f"{type(model).__name__} has no stack of blocks with tensor-parallel layers ({plan.source}), so there is "
            f"nothing to shard along the sequence. Set sequence_parallel=false, or give a tp_plan."
        )
    blocks = [block for stack in stacks for block in stack]
    sp_plan = SequenceParallelPlan({stack[0] for stack in stacks}, {stack[-1] for stack in stacks}, blocks)
    for block in blocks:
        own = model.get_submodule(block).named_parameters(recurse=False)
        sp_plan.partial_grad_parameters |= {f"{block}.{name}" for name, _ in own}
        for name, child in _iter_called_modules(block, model.get_submodule(block)):
            if not plan.has_style_within(name) and _is_pointwise(child):
                sp_plan.partial_grad_parameters |= {
                    f"{name}.{each}" for each, _ in child.named_parameters(recurse=False)
                }
                continue
            if plan.module_styles.get(name) in ("colwise", "rowwise", "packed_colwise"):
                raise ModelError(
                    f"the block {block} calls the tensor-parallel layer {name} itself and not within an attention or "
                    f"MLP module, so its positions cannot be sharded. Set sequence_parallel=false."
                )
            sp_plan.regions.append(name)
            end = _find_chain_end(name, child, plan)
            if end is not None:
                sp_plan.scatter_layers.add(end)
                # The bias is added to this rank's positions only.
                sp_plan.partial_grad_parameters.add(f"{get_base_layer_name(model, end)}.bias")
    return sp_plan


def _iter_called_modules(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with parameters that a block calls; containers are descended into."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _iter_called_modules(path, child)
        elif any(True for _ in child.parameters()):
            yield path, child


def _is_pointwise(module: nn.Module) -> bool:
    """Return whether a module has only 1-D parameters of its own, like norms, and so treats all positions equally."""
    own = list(module.parameters(recurse=False))
    return len(own) == len(list(module.parameters())) and all(parameter.dim() <= 1 for parameter in own)


def _find_chain_end(name: str, part: nn.Module, plan: TensorParallelPlan) -> str | None:
    """Return the row-parallel layer that ends a region whose parameters all belong to one chain of sharded layers."""
    parameters = [plan.parameter_styles.get(f"{name}.{each}") for each, _ in part.named_parameters()]
    modules = {each: style for each, style in plan.module_styles.items() if each == name or each.startswith(f"{name}.")}
    rows = [each for each, style in modules.items() if style == "rowwise"]
    if len(rows) != 1 or not all(style in _CHAIN_STYLES for style in (*parameters, *modules.values())):
        return None
    return rows[0]


class ResidualStream:
    """The residual stream of a model, sharded along the sequence. Create it before the model's modules are wrapped.

    `copies` collects gathered tensors, each with a copy whose gradient is right for sharded layers.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: SequenceParallelPlan,
        copies: list[tuple[Tensor, Tensor]],
        group: dist.ProcessGroup,
    ) -> None:
        self.plan, self._copies, self._group, self._size = plan, copies, group, dist.get_world_size(group)
        self._scatter_layers = {model.get_submodule(name) for name in plan.scatter_layers}
        # B sequences of S positions, unsharded.
        self._shape: tuple[int, int] | None = None
        self._blocks_run: set[str] = set()

    def is_scattered(self, module: nn.Module, output: Tensor) -> bool:
        """Return whether a row-parallel layer's output is reduce-scattered along the sequence."""
        return self._shape is not None and module in self._scatter_layers and output.shape[:-1] == self._shape

    def run_block(self, name: str, forward: ForwardMethod, /, *args: Any, **kwargs: Any) -> Any:
        """Run a block; scatter before the first of its stack, gather after the last."""
        batch, length = self._infer_shape(name, args, kwargs)
        # Other inputs with the same leading dims are sharded like the stream.
        args = tuple(self._scatter(value, batch, length) for value in args)
        kwargs = {key: self._scatter(value, batch, length) for key, value in kwargs.items()}
        failure = f"{name} cannot run on a part of the positions"
        with temporary_attribute(self, "_shape", (batch, length)):
            # A block that mixes positions fails on all ranks.
            with reraise_as_model_error(
                lambda reason: f"{failure} ({reason}). Set sequence_parallel=false.",
                is_first=name not in self._blocks_run,
            ):
                output = forward(*args, **kwargs)
            self._blocks_run.add(name)
            is_last = name in self.plan.exit_blocks
            return _map_hidden(output, batch, length // self._size, self._gather) if is_last else output

    def run_region(self, name: str, forward: ForwardMethod, /, *args: Any, **kwargs: Any) -> Any:
        """Run a region of a block on all positions.

        Raises:
            ModelError: no input is the residual stream.
        """
        if self._shape is None:
            return forward(*args, **kwargs)
        (batch, length), known = self._shape, len(self._copies)
        args = tuple(_map_hidden(value, batch, length // self._size, self._gather) for value in args)
        kwargs = {key: _map_hidden(each, batch, length // self._size, self._gather) for key, each in kwargs.items()}
        if len(self._copies) == known:
            raise ModelError(
                f"{name} is given no hidden states of shape (B, S, features), so its positions cannot be gathered. "
                f"Set sequence_parallel=false."
            )
        output = forward(*args, **kwargs)
        return _map_hidden(output, batch, length, lambda value: Split.apply(value, 1, self._group))

    def _infer_shape(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
                return value.shape[0], value.shape[1] * (1 if name in self.plan.entry_blocks else self._size)
        raise ModelError(
            f"{name} is given no hidden states of shape (B, S, features), so its positions cannot be sharded. "
            f"Set sequence_parallel=false."
        )

    def _scatter(self, value: Any, batch: int, length: int) -> Any:
        is_full = isinstance(value, Tensor) and value.is_floating_point() and value.shape[:2] == (batch, length)
        return Split.apply(value, 1, self._group) if is_full and value.dim() == 3 else value

    def _gather(self, part: Tensor) -> Tensor:
        """Gather the full sequence. Sharded layers that use it find the copy with their gradient in `copies`."""
        length = part.shape[1] * self._size
        gathered: Tensor = Gather.apply(part, 1, length, self._group)
        self._copies.append((gathered, GatherWithPartialGrad.apply(part, gathered.detach(), 1, self._group)))
        return gathered


def _map_hidden(value: Any, batch: int, length: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the hidden states in a tensor, or in the items of a tuple or list.

    Hidden states are (batch, length, features) or (batch * length, features); `change` gets the 3-D form.
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        if value.dim() == 3 and value.shape[:2] == (batch, length):
            return change(value)
        if value.dim() == 2 and value.shape[0] == batch * length:
            return change(value.unflatten(0, (batch, length))).flatten(0, 1)
    if type(value) in (tuple, list):
        return type(value)(_map_hidden(each, batch, length, change) for each in value)
    return value
