"""Placement of each parameter under tensor parallelism, what modules see of it, and a rank's attention heads.

The number of ranks must divide the query heads. If it does not divide the key and value heads, each rank computes the
ones that its query heads read, from a replicated weight.

[Note: local parameters] Parameters are DTensors on the `tp` axis, and plain local tensors while a module runs. A
strategy that gathers parameters (fully_shard) puts DTensors on the `tp` axis into a module just before its forward.
`localized` replaces them by local tensors during the forward, and autograd returns the gradients as DTensors. A module
skips the parameters of submodules that localize their own. There are two reasons: a gathered block may still be
unsharded when the model's forward starts, and fully_shard reduces a block's gradients as soon as the block's own
backward is done.

With `use_plain_tensors`, for strategies that do not accept DTensors, parameters are always plain local tensors. Only
those are replaced whose view differs from the local shard or whose gradients must be all-reduced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from ..._compat.torch import get_own_parameters, is_packed_shard, is_sharded
from ...base.errors import ModelError
from ...mesh.sizes import format_divisors
from ...model.layout import ModelLayout
from ...tensors.chunks import LocalChunk, to_global_chunks
from ...tensors.ops import temporary_parameters
from ...tensors.state import gather_full_tensor
from .collectives import Copy, chunk_sizes
from .plan_sources import get_text_config
from .sequence_parallel import SequenceParallelPlan
from .styles import NUM_PACKED_PARTS, STYLES
from .tp_plan import TensorParallelPlan

ParameterSlot: TypeAlias = "tuple[nn.Module, str]"


@dataclass(frozen=True)
class ParameterSharding:
    """Placement of a parameter of full `shape` on the mesh `tp`: sharded, maybe in packed parts, or replicated."""

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.placement)

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard of a tensor that all ranks have, as a contiguous copy."""
        shard = distribute_tensor(full, self.mesh, [self.placement], src_data_rank=None).to_local()
        return shard.clone(memory_format=torch.contiguous_format)

    def gather(self, shard: Tensor) -> Tensor:
        """Gather the full tensor on every rank. Collective if it is sharded."""
        return gather_full_tensor(self.to_dtensor(shard)) if self.is_sharded else shard

    def to_global_chunks(self, chunks: list[LocalChunk], shape: torch.Size) -> list[LocalChunk]:
        """Convert chunks of this rank's shard, which has `shape`, to chunks of the full tensor."""
        if not self.is_sharded:
            return chunks
        return to_global_chunks(chunks, self.to_dtensor(torch.empty(shape, device="meta")))

    def to_dtensor(self, shard: Tensor) -> DTensor:
        """Wrap this rank's shard in a DTensor."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(shard, self.mesh, [self.placement], run_check=False, shape=self.shape, stride=stride)


def get_packed_dim(parameter: Tensor) -> int | None:
    """Return the dim along which a parameter has packed parts that are sharded separately; None for all others.

    A strategy must not shard that dim further: torch would concatenate the parts in the wrong order.
    """
    return parameter.placements[-1].dim if is_packed_shard(parameter) else None


@dataclass(frozen=True, eq=False)
class ParameterView:
    """What a module sees of a parameter. `rows`: int64 indices of the rows that it sees; None: all rows."""

    has_partial_gradient: bool = False
    rows: Tensor | None = None


class LocalParameters:
    """The parameters of one model on the mesh `tp`. `use_plain_tensors`: keep plain tensors instead of DTensors."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, use_plain_tensors: bool = False) -> None:
        self._model, self._mesh, self._use_plain_tensors = model, mesh, use_plain_tensors
        self._views: dict[ParameterSlot, ParameterView] = {}
        self._rows_on_device: dict[ParameterView, Tensor] = {}
        self._shardings: dict[ParameterSlot, ParameterSharding] = {}
        self._claimed: set[nn.Module] = set()

    def distribute(self, shardings: Mapping[str, ParameterSharding], views: Mapping[str, ParameterView]) -> None:
        """Shard every parameter in place; only this rank's shards stay in memory.

        Args:
            shardings: by each name of each parameter; equal for tied names.
            views: by name, if a module sees something other than the local shard.
        """
        new_parameters: dict[int, nn.Parameter] = {}
        for name, parameter in list(self._model.named_parameters(remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                continue
            owner, _, own = name.rpartition(".")
            module = self._model.get_submodule(owner)
            self._shardings[module, own] = shardings[name]
            if name in views:
                self._views[module, own] = views[name]
            if id(parameter) not in new_parameters:
                shard = shardings[name].shard(parameter.detach())
                shard = shard if self._use_plain_tensors else shardings[name].to_dtensor(shard)
                new_parameters[id(parameter)] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
                new_parameters[id(parameter)].__dict__.update(parameter.__dict__)
            get_own_parameters(module)[own] = new_parameters[id(parameter)]

    @property
    def viewed_modules(self) -> set[nn.Module]:
        """The modules that see something other than the local shard of a parameter."""
        return {module for module, _ in self._views}

    def claim(self, module: nn.Module) -> list[ParameterSlot]:
        """Return the parameters of a module and its submodules for `localized`, except those already claimed."""
        self._claimed.add(module)
        return list(self._iter_slots(module))

    def _iter_slots(self, module: nn.Module) -> Iterator[ParameterSlot]:
        yield from ((module, name) for name, _ in module.named_parameters(recurse=False))
        for child in module.children():
            if child not in self._claimed:
                yield from self._iter_slots(child)

    @contextmanager
    def localized(self, slots: Iterable[ParameterSlot]) -> Iterator[None]:
        """Replace gathered parameters by local tensors; see [Note: local parameters]."""
        local: dict[tuple[int, ParameterView], Tensor] = {}
        replacements: list[tuple[nn.Module, str, Tensor]] = []
        for module, name in slots:
            parameter = get_own_parameters(module)[name]
            view = self._views.get((module, name), _DEFAULT_VIEW)
            if self._is_gathered(parameter) and not (self._use_plain_tensors and view is _DEFAULT_VIEW):
                if (key := (id(parameter), view)) not in local:
                    local[key] = self._localize(parameter, view)
                replacements.append((module, name, local[key]))
        with temporary_parameters(replacements):
            yield

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Replace gathered parameters by full plain tensors. Collective."""
        full_parameters: dict[int, nn.Parameter] = {}
        replacements: list[tuple[nn.Module, str, Tensor]] = []
        for module in self._model.modules():
            for name, parameter in get_own_parameters(module).items():
                if not self._is_gathered(parameter):
                    continue
                if id(parameter) not in full_parameters:
                    value = parameter.detach()
                    full = (
                        self._shardings[module, name].gather(value)
                        if self._use_plain_tensors
                        else gather_full_tensor(value)
                    )
                    full_parameters[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                replacements.append((module, name, full_parameters[id(parameter)]))
        with temporary_parameters(replacements):
            yield

    def _is_gathered(self, parameter: Tensor | None) -> bool:
        """Return whether a parameter is sharded on no axis other than `tp`, as plain tensors are."""
        if not isinstance(parameter, DTensor):
            return self._use_plain_tensors and parameter is not None
        return parameter.device_mesh.ndim == 1 and parameter.device_mesh == self._mesh

    def _localize(self, parameter: Tensor, view: ParameterView) -> Tensor:
        if isinstance(parameter, DTensor):
            local: Tensor = parameter.to_local(grad_placements=[Partial()] if view.has_partial_gradient else None)
        else:
            local = Copy.apply(parameter, self._mesh.get_group()) if view.has_partial_gradient else parameter
        if view.rows is None:
            return local
        if view not in self._rows_on_device or self._rows_on_device[view].device != local.device:
            # Cached, since a copy to a device synchronizes.
            self._rows_on_device[view] = view.rows.to(local.device)
        return local.index_select(0, self._rows_on_device[view])


_DEFAULT_VIEW = ParameterView()


# -- heads

_HEAD_COUNT_ATTRIBUTES = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class SharedHeads:
    """Key and value projections of the module `attention` that ranks share.

    Attributes:
        rows: int64 indices of the rows of each replicated parameter that this rank uses, by name.
        queries_per_kv_head: this rank's query heads per key and value head.
    """

    attention: str
    rows: dict[str, Tensor]
    queries_per_kv_head: int


def find_shared_heads(model: nn.Module, plan: TensorParallelPlan, size: int, rank: int) -> list[SharedHeads]:
    """Return attention modules whose key and value heads the ranks do not divide.

    Raises:
        ModelError: the ranks do not divide the query heads.
    """
    shared = []
    parents = dict.fromkeys(name.rpartition(".")[0] for name, style in plan.module_styles.items() if style == "colwise")
    config = get_text_config(model)
    for name in parents:
        attention = model.get_submodule(name)
        counts = (getattr(attention, each, None) for each in _HEAD_COUNT_ATTRIBUTES)
        heads = next((each for each in counts if isinstance(each, int) and each > 0), None)
        if heads is None and not any(hasattr(attention, each) for each in ("num_key_value_groups", "head_dim")):
            # Not an attention module.
            continue
        queries_per_kv_head = getattr(attention, "num_key_value_groups", None)
        head_dim = getattr(attention, "head_dim", None)
        key, kv_heads = f"{name}.k_proj", 0
        if (
            isinstance(queries_per_kv_head, int)
            and isinstance(head_dim, int)
            and plan.module_styles.get(key) == "colwise"
        ):
            kv_heads = int(model.get_submodule(key).out_features) // head_dim
            heads = kv_heads * queries_per_kv_head
        heads = heads or getattr(config, "num_attention_heads", None)
        if isinstance(heads, int) and heads % size:
            raise ModelError(
                f"{name} has {heads} attention heads, which tp_size={size} does not divide. Set tp_size to one of "
                f"{format_divisors(heads)}."
            )
        if queries_per_kv_head is not None and kv_heads % size:
            shared.append(_build_shared_heads(model, plan, name, kv_heads, queries_per_kv_head, size, rank))
    return shared


def _build_shared_heads(
    model: nn.Module, plan: TensorParallelPlan, name: str, kv_heads: int, groups: int, size: int, rank: int
) -> SharedHeads:
    num_queries = kv_heads * groups // size
    kv_heads_read = [(rank * num_queries + index) // groups for index in range(num_queries)]
    distinct = list(dict.fromkeys(kv_heads_read))
    per_head = len(kv_heads_read) // len(distinct)
    # If the query heads read the key heads evenly and in order, attention repeats them; else each gets its own copy.
    chosen = distinct if kv_heads_read == [head for head in distinct for _ in range(per_head)] else kv_heads_read
    rows: dict[str, Tensor] = {}
    for projection in (f"{name}.k_proj", f"{name}.v_proj"):
        layer = model.get_submodule(projection)
        width = int(layer.out_features) // kv_heads
        index = torch.cat([torch.arange(head * width, (head + 1) * width) for head in chosen])
        # Includes parameters of adapters that have the output features first.
        named = plan.parameter_styles.items()
        rows |= {each: index for each, style in named if each.startswith(f"{projection}.") and style == "colwise"}
    return SharedHeads(name, rows, len(kv_heads_read) // len(chosen))


# -- placements


def find_placements(
    model: nn.Module, layout: ModelLayout, plan: TensorParallelPlan, heads: list[SharedHeads], size: int
) -> dict[str, Placement]:
    """Return the placement of each parameter by each of its names.

    Raises:
        ModelError: the ranks cannot divide a parameter that way, or tied names have different placements.
    """
    replicated = {name for shared in heads for name in shared.rows}
    placements: dict[str, Placement] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, own = name.rpartition(".")
        style = plan.parameter_styles.get(name)
        placements[name] = Replicate()
        if style is not None and name not in replicated:
            placements[name] = STYLES[style].get_placement(model.get_submodule(owner), own, parameter)
        _check_divisible(name, parameter, placements[name], size)
    for names in layout.tied:
        different = {str(placements[name]): name for name in names if name in placements}
        if len(different) > 1:
            placements_by_name = ", ".join(f"{name} {placement}" for placement, name in different.items())
            raise ModelError(
                f"{' and '.join(names)} are one parameter, but the plan ({plan.source}) shards them in different ways: "
                f"{placements_by_name}. Give them styles that agree, such as embedding_rowwise for the embedding and "
                f"colwise_gather_output for the head, or replicate for both."
            )
    return placements


def _check_divisible(name: str, parameter: Tensor, placement: Placement, size: int) -> None:
    if not is_sharded(placement):
        return
    features = parameter.shape[placement.dim]
    if not placement.is_shard() and features % (NUM_PACKED_PARTS * size):
        raise ModelError(
            f"{name} holds {NUM_PACKED_PARTS} packed parts of {features // NUM_PACKED_PARTS} features each, which "
            f"tp_size={size} does not divide. Choose a tp_size that does, or replicate it in a tp_plan."
        )
    if placement.is_shard() and chunk_sizes(features, size)[-1] == 0:
        raise ModelError(
            f"{name} of shape {tuple(parameter.shape)} is too small along dim {placement.dim} for tp_size={size}: a "
            f"rank would have nothing of it. Choose a smaller tp_size, or replicate it in a tp_plan."
        )


def find_parameter_views(
    plan: TensorParallelPlan, heads: list[SharedHeads], sequence_plan: SequenceParallelPlan | None
) -> dict[str, ParameterView]:
    """Return by name what modules see of their parameters if it is not the local shard."""
    partial = {name for name, style in plan.parameter_styles.items() if STYLES[style].has_partial_gradients}
    if sequence_plan is not None:
        partial |= sequence_plan.partial_grad_parameters
    rows = {name: index for shared in heads for name, index in shared.rows.items()}
    return {name: ParameterView(name in partial or name in rows, rows.get(name)) for name in partial | rows.keys()}
