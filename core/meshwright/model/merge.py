"""The parameters of a base model with its adapters merged into them, one after the other, in bounded memory.

Each layer that is wrapped is merged by peft's own code, alone: a copy of its wrapper without memory gets the whole
tensors of this layer, and gives the base's. So what comes out is what `merge_and_unload` gives, bit for bit, for
whatever peft can merge, and takes the memory of one layer and of what is added to it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from .._compat.peft import active_copies, base_name, is_adapted, merge_layer, outermost_layers
from ..base.errors import ConfigError, StrategyError
from ..tensors.whole_parameters import Held, whole_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..mesh.mesh import Mesh

Adapters: TypeAlias = Literal["apart", "merged"]
"""Whether adapters are given beside the base, by peft's names, or merged into it, by the base's."""


class Merging:
    """How the adapters of one model are merged: those that are active when this is made.

    Args:
        model: adapted, before it is sharded; it may be on the meta device, and stays as it is.

    Attributes:
        names: of the parameters that are needed, as the adapted model has them and in its order.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = dict(outermost_layers(model))
        empty = {id(each): _empty(each) for each in model.parameters()}
        # Without memory; what is tied stays so.
        self._layers: dict[str, Any] = copy.deepcopy(layers, dict(empty))
        first: dict[int, str] = {}
        everywhere = dict(model.named_parameters(remove_duplicate=False))
        self._first = {name: first.setdefault(id(each), name) for name, each in everywhere.items()}
        self._of_layer = {name: path for path in layers for name in everywhere if name.startswith(f"{path}.")}
        self._groups = self._joined()
        group_of = {name: index for index, group in enumerate(self._groups) for name in self._needed(group)}
        self._group_of = group_of
        copies = active_copies(model)
        self.names = tuple(
            name for name in dict.fromkeys(self._first.values()) if name in group_of or copies.get(name, True)
        )

    def merged(self, pairs: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Iterator[Any]:
        """Parameters of the base model, merged, each as soon as all that it is made of has come.

        Args:
            pairs: names and whole tensors, those of `names` in this order; what belongs to a layer is written into.
            dtype: of what floats; None: the base's own.

        Returns:
            (name, tensor), by the names of the base model.

        Raises:
            ModelError: peft cannot merge a layer.
        """
        waiting: dict[int, dict[str, Tensor]] = {}
        for name, tensor in pairs:
            index = self._group_of.get(name)
            if index is None:
                yield base_name(name), _converted(tensor, dtype)
                continue
            have = waiting.setdefault(index, {})
            have[name] = tensor
            del tensor
            if len(have) == len(self._needed(self._groups[index])):
                for merged, value in self._made(self._groups[index], waiting.pop(index)):
                    yield merged, _converted(value, dtype)
                del have

    def _joined(self) -> list[list[str]]:
        """Layers, together where they have a parameter in common."""
        groups: list[list[str]] = []
        for path in self._layers:
            needed = set(self._needed([path]))
            meeting = [group for group in groups if needed & set(self._needed(group))]
            groups = [group for group in groups if group not in meeting]
            groups.append([*(each for group in meeting for each in group), path])
        return groups

    def _needed(self, group: list[str]) -> list[str]:
        """Names of the parameters of layers, each once."""
        return list(dict.fromkeys(self._first[name] for name, path in self._of_layer.items() if path in group))

    @torch.no_grad()
    def _made(self, group: list[str], tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
        layers = copy.deepcopy({path: self._layers[path] for path in group})
        filled = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        for path, layer in layers.items():
            for name, _ in list(layer.named_parameters(remove_duplicate=False)):
                owner, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(owner), leaf, filled[self._first[f"{path}.{name}"]])
        found: dict[int, tuple[str, Tensor]] = {}
        names = {id(each): base_name(name) for name, each in filled.items()}
        for path, layer in layers.items():
            for name, parameter in merge_layer(layer, base_name(path)).named_parameters():
                # Of what is tied, the first name.
                found[id(parameter)] = names.get(id(parameter), f"{base_name(path)}.{name}"), parameter.detach()
        return list(found.values())


def merging_of(model: nn.Module) -> Merging | None:
    """How a model's adapters are merged; None: it has none."""
    return Merging(model) if is_adapted(model) else None


def given_parameters(
    held: Callable[[], Held],
    mesh: Mesh,
    merging: Merging | None,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None,
    adapters: Adapters,
) -> Iterator[tuple[str, Tensor]]:
    """See `meshwright.tensors.whole_parameters.whole_parameters`; collective like it.

    Args:
        merging: of the model; None: it has no adapters, and is the same merged.
        adapters: equal on all ranks.

    Raises:
        ConfigError: `adapters` is neither of the two; on all ranks.
    """

    def check() -> None:
        if adapters not in ("apart", "merged"):
            raise ConfigError(f"adapters={adapters!r} must be 'apart' or 'merged'.")

    mesh.world.together(check)
    if adapters == "apart" or merging is None:
        return whole_parameters(held, mesh, bucket_bytes=bucket_bytes, dtype=dtype)

    def needed() -> Held:
        pieces = held()
        if not set(merging.names) <= pieces.keys():
            missing = sorted(set(merging.names) - pieces.keys())
            raise StrategyError(f"{missing[0]} is needed to merge adapters, and not among parameter_pieces.")
        return {name: pieces[name] for name in merging.names}

    whole = whole_parameters(needed, mesh, bucket_bytes=bucket_bytes, dtype=None)
    return merging.merged(whole, dtype)


def _empty(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)


def _converted(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
