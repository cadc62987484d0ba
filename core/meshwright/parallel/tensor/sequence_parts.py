"""Sequence parallelism: between the parallel parts of a block, each rank has a part of the positions.

The residual stream and the norms of a stack are sharded along the sequence. At the entry of each part of a block that
mixes positions or features (attention, MLP) the sequence is gathered, and at its exit scattered; where the part is one
chain of column- and row-parallel layers, the scatter is that of the last one's sum. So it rests on the tensor-parallel
plan alone, and embedding, positions and masks, head and loss see the whole sequence.
Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ...base.errors import ModelError
from ...model.layout import ModelLayout
from .adapters import path_of_layer
from .module_styles import Plan

_CHAIN = ("colwise", "rowwise", "packed_colwise", "replicated_with_grad_allreduce")


@dataclass(frozen=True)
class SequenceParts:
    """What sequence parallelism does with a model; all are names.

    Attributes:
        first: blocks at whose entry the stream is scattered.
        last: blocks at whose exit it is gathered.
        blocks: all blocks of sharded stacks.
        regions: modules that get the whole sequence.
        scattering: row-parallel layers whose sum is scattered.
        on_shard: parameters that meet only this rank's positions.
    """

    first: frozenset[str]
    last: frozenset[str]
    blocks: tuple[str, ...]
    regions: tuple[str, ...]
    scattering: frozenset[str]
    on_shard: frozenset[str]


def find_parts(model: nn.Module, layout: ModelLayout, plan: Plan) -> SequenceParts:
    """Divide every stack that the plan shards.

    Raises:
        ModelError: no stack can be divided, or a block calls sharded layers itself.
    """
    stacks = [stack for stack in layout.stacks if any(_inside(plan, block) for block in stack)]
    if not stacks:
        raise ModelError(
            f"{type(model).__name__} has no stack of blocks with tensor-parallel layers ({plan.source}), so there is "
            f"nothing to shard along the sequence. Set sequence_parallel=false, or give a tp_plan."
        )
    blocks = tuple(block for stack in stacks for block in stack)
    regions: list[str] = []
    scattering: list[str] = []
    on_shard: list[str] = []
    for block in blocks:
        on_shard += [f"{block}.{name}" for name, _ in model.get_submodule(block).named_parameters(recurse=False)]
        for name, part in _parts(block, model.get_submodule(block)):
            if not _inside(plan, name) and _is_pointwise(part):
                on_shard += [f"{name}.{each}" for each, _ in part.named_parameters(recurse=False)]
                continue
            if plan.modules.get(name) in ("colwise", "rowwise", "packed_colwise"):
                raise ModelError(
                    f"the block {block} calls the tensor-parallel layer {name} itself and not within an attention or "
                    f"MLP module, so its positions cannot be sharded. Set sequence_parallel=false."
                )
            regions.append(name)
            end = _end_of_chain(name, part, plan)
            if end is not None:
                scattering.append(end)
                # Added to this rank's positions only.
                on_shard.append(f"{path_of_layer(model, end)}.bias")
    return SequenceParts(
        first=frozenset(stack[0] for stack in stacks),
        last=frozenset(stack[-1] for stack in stacks),
        blocks=blocks,
        regions=tuple(regions),
        scattering=frozenset(scattering),
        on_shard=frozenset(on_shard),
    )


def _parts(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters that a block calls; lists are no modules to call."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _parts(path, child)
        elif any(True for _ in child.parameters()):
            yield path, child


def _inside(plan: Plan, name: str) -> bool:
    return any(each == name or each.startswith(f"{name}.") for each in plan.modules)


def _is_pointwise(module: nn.Module) -> bool:
    """Whether a module treats every position alike, as norms do: it has vectors only, and no parts with parameters."""
    own = list(module.parameters(recurse=False))
    return len(own) == len(list(module.parameters())) and all(parameter.dim() <= 1 for parameter in own)


def _end_of_chain(name: str, part: nn.Module, plan: Plan) -> str | None:
    """The row-parallel layer that ends a part in which every parameter belongs to a chain of sharded layers."""
    parameters = [plan.parameters.get(f"{name}.{each}") for each, _ in part.named_parameters()]
    modules = {each: style for each, style in plan.modules.items() if each == name or each.startswith(f"{name}.")}
    rows = [each for each, style in modules.items() if style == "rowwise"]
    if len(rows) != 1 or not all(style in _CHAIN for style in (*parameters, *modules.values())):
        return None
    return rows[0]
