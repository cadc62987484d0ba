"""The parameters of a base model with its adapters merged into them, one after the other, in bounded memory.

peft's own code merges each wrapped layer alone: a copy of its wrapper without memory gets the full tensors of this
layer, and gives the base's. So the result is that of `merge_and_unload`, bit for bit, in the memory of one layer. But
of two tied weights of which one is adapted, both are given, as the adapted model computes with them;
`merge_and_unload` adds the change to both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from .._compat.peft import (
    find_active_copies,
    find_tied_after_merge,
    is_peft_model,
    iter_tuner_layers,
    merge_layer,
    to_base_name,
)
from ..base.errors import ConfigError, StrategyError
from ..mesh.mesh import Mesh
from ..tensors.gather_parameters import ParameterChunks, iter_full_parameters
from .weights import set_tensor

AdapterMode: TypeAlias = Literal["apart", "merged"]
"""Whether adapters are given besides the base, by peft's names, or merged into it, by the base's."""


class AdapterMerger:
    """How the active adapters of a model are merged, made before sharding; `names` are of the parameters needed."""

    def __init__(self, model: nn.Module) -> None:
        layers = dict(iter_tuner_layers(model, outermost=True))
        # Without memory; what is tied stays so.
        empty: dict[int, Any] = {
            id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=False)
            for each in model.parameters()
        }
        self._layers: dict[str, Any] = copy.deepcopy(layers, empty)
        first: dict[int, str] = {}
        everywhere = dict(model.named_parameters(remove_duplicate=False))
        self._first_names = {name: first.setdefault(id(each), name) for name, each in everywhere.items()}
        # Heads that merging leaves tied to the embedding.
        self._unchanged_layers = find_tied_after_merge(model)
        self._layer_by_parameter = {name: path for path in layers for name in everywhere if name.startswith(f"{path}.")}
        # Layers that need the same parameters are merged together.
        self._groups: list[list[str]] = []
        for path in self._layers:
            needed = set(self._list_needed([path]))
            meeting = [group for group in self._groups if needed & set(self._list_needed(group))]
            apart = [group for group in self._groups if group not in meeting]
            self._groups = [*apart, [*(each for group in meeting for each in group), path]]
        self._group_by_parameter = {
            name: index for index, group in enumerate(self._groups) for name in self._list_needed(group)
        }
        copies = find_active_copies(model)
        self.needed_names = tuple(
            name
            for name in dict.fromkeys(self._first_names.values())
            if name in self._group_by_parameter or copies.get(name, True)
        )

    def merge(self, pairs: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Iterator[Any]:
        """Yield the base model's parameters, merged, from full tensors of `names` in order, which are written into."""
        waiting: dict[int, dict[str, Tensor]] = {}
        for name, tensor in pairs:
            index = self._group_by_parameter.get(name)
            if index is None:
                yield to_base_name(name), _convert(tensor, dtype)
                continue
            have = waiting.setdefault(index, {})
            have[name] = tensor
            del tensor
            if len(have) == len(self._list_needed(self._groups[index])):
                for merged, value in self._merge_group(self._groups[index], waiting.pop(index)):
                    yield merged, _convert(value, dtype)
                del have

    def _list_needed(self, group: list[str]) -> list[str]:
        return list(
            dict.fromkeys(self._first_names[name] for name, path in self._layer_by_parameter.items() if path in group)
        )

    @torch.no_grad()
    def _merge_group(self, group: list[str], tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        # What is tied changes in one place alone.
        values = {
            name: tensors[first] if first == name else tensors[first].clone()
            for name, first in self._first_names.items()
            if first in tensors
        }
        found = {to_base_name(name): value for name, value in values.items() if name not in self._layer_by_parameter}
        for path in group:
            if path not in self._unchanged_layers:
                merged = build_merged_layer(self._layers[path], path, values).named_parameters()
                found |= {f"{to_base_name(path)}.{name}": each.detach() for name, each in merged}
        return list(found.items())


def build_merged_layer(layer: nn.Module, path: str, values: Mapping[str, Tensor]) -> nn.Module:
    """Merge a copy of a wrapper, named `path`, with the values of its tensors, which are written into."""
    layer = copy.deepcopy(layer)
    for name, _ in list(layer.named_parameters(remove_duplicate=False)):
        set_tensor(layer, name, nn.Parameter(values[f"{path}.{name}"], requires_grad=False))
    for name, buffer in list(layer.named_buffers(remove_duplicate=False)):
        set_tensor(layer, name, values.get(f"{path}.{name}", buffer))
    return merge_layer(layer, to_base_name(path))


class ParameterOwner(Protocol):
    mesh: Mesh

    def parameter_chunks(self) -> ParameterChunks: ...


def build_merger(model: nn.Module) -> AdapterMerger | None:
    """Return how adapters are merged into the weights of a model; None: it has none."""
    return AdapterMerger(model) if is_peft_model(model) else None


def iter_parameters(
    manager: ParameterOwner, *, bucket_bytes: int, dtype: torch.dtype | None, adapters: AdapterMode
) -> Iterator[tuple[str, Tensor]]:
    """See `iter_full_parameters`; collective like it. A manager without `adapter_merger` gives the same in both
    ways."""

    def check() -> None:
        if adapters not in ("apart", "merged"):
            raise ConfigError(f"adapters={adapters!r} must be 'apart' or 'merged'.")

    held, mesh = manager.parameter_chunks, manager.mesh
    merging: AdapterMerger | None = getattr(manager, "adapter_merger", None)
    mesh.world.run_on_all_ranks(check)
    if adapters == "apart" or merging is None:
        return iter_full_parameters(held, mesh, bucket_bytes=bucket_bytes, dtype=dtype)

    def needed() -> ParameterChunks:
        pieces = held()
        missing = sorted(set(merging.needed_names) - pieces.keys())
        if missing:
            raise StrategyError(f"{missing[0]} is needed to merge adapters, and not among parameter_chunks.")
        return {name: pieces[name] for name in merging.needed_names}

    return merging.merge(iter_full_parameters(needed, mesh, bucket_bytes=bucket_bytes, dtype=None), dtype)


def _convert(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
