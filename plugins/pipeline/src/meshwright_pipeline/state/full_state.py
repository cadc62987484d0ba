"""Gather the full state of a model from its stages, and load it: `state_dict(full=True)` and its counterpart.

Ranks of the pipeline send tensors one at a time, so that no rank holds more than it keeps and one tensor. The structure
of the state (names, optimizer settings, shapes) is sent first, as one small object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plugin import DataParallelManager, Mesh, StrategyError

from .parameter_names import StagedParameterNames, rename_groups, rename_to_local

StatePath = tuple[Any, ...]


def gather_full_state(
    managers: Mapping[int, DataParallelManager], names: StagedParameterNames, mesh: Mesh, *, with_optimizer: bool
) -> dict[str, Any]:
    """See `StrategyManager.state_dict`. The state is on the CPU of global rank 0, empty on others. Collective."""
    parts = {index: manager.state_dict(full=True) for index, manager in managers.items()}
    stages: list[dict[str, Any]] = []
    # The full state of a stage is on the first of its ranks.
    if mesh.get_stage_mesh().world.rank == 0:
        states = gather_states(parts, mesh.group("pp"), mesh.device)
        found = {index: state for each in states for index, state in each.items()}
        stages = [found[index] for index in sorted(found)]
    return _merge_states(stages, names, with_optimizer=with_optimizer)


def load_full_state(
    managers: Mapping[int, DataParallelManager], names: StagedParameterNames, mesh: Mesh, state: Mapping[str, Any]
) -> None:
    """See `StrategyManager.load_state_dict`; the `state` of global rank 0 is loaded. Collective."""
    mesh.world.run_on_all_ranks(lambda: _check_names(state["model"], names))
    full_state: Any = None
    if mesh.get_stage_mesh().world.rank == 0:
        held = {name for manager in managers.values() for name in manager.model.state_dict(keep_vars=True)}
        held |= {names.first_name.get(name, name) for name in held}

        def wanted(path: Sequence[Any]) -> bool:
            # ("model", name) or ("optimizer", "state", name, key).
            return not held.isdisjoint(path[1:3])

        full_state = broadcast_state(state, mesh.group("pp"), mesh.device, is_wanted=wanted)
    for manager in managers.values():
        part = (
            _select_stage_state(full_state, manager, names)
            if full_state is not None
            else {"model": {}, "optimizer": {}}
        )
        mesh.world.run_on_all_ranks(lambda manager=manager, part=part: manager.load_state_dict(part, full=True))  # type: ignore[misc]


def _merge_states(
    states: Sequence[Mapping[str, Any]], names: StagedParameterNames, *, with_optimizer: bool
) -> dict[str, Any]:
    """Merge the states of all stages, in order, to the state of the full model; empty if `states` is empty."""
    model: dict[str, Any] = {}
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    masters: dict[str, Any] = {}
    for state in states:
        for name, tensor in state["model"].items():
            # Tied names continue to share one tensor.
            model.setdefault(name, model.get(names.first_name.get(name, name), tensor))
        optimizer = state.get("optimizer", {})
        for key, merged in (("state", values), ("masters", masters)):
            for name, each in optimizer.get(key, {}).items():
                merged.setdefault(names.first_name[name], each)
        for group in optimizer.get("param_groups", []):
            _merge_group({**group, "params": [names.first_name[name] for name in group["params"]]}, groups)
    merged_state: dict[str, Any] = {"model": {name: model[name] for name in names.ordered_names if name in model}}
    if with_optimizer:
        merged_state["optimizer"] = {"state": values, "param_groups": groups} if states else {}
        if masters:
            merged_state["optimizer"]["masters"] = masters
    return merged_state


def _merge_group(group: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Merge a stage's parameter group into a group with equal settings, or append it."""
    settings = {key: value for key, value in group.items() if key != "params"}
    for each in groups:
        if {key: value for key, value in each.items() if key != "params"} == settings:
            each["params"] += [name for name in group["params"] if name not in each["params"]]
            return
    groups.append({**settings, "params": group["params"]})


def _check_names(model: Mapping[str, Any], names: StagedParameterNames) -> None:
    unknown = sorted(set(model) - set(names.ordered_names))
    if unknown:
        raise StrategyError(
            f"the model state has tensors that the model does not have: {', '.join(unknown[:3])}"
            f"{f' and {len(unknown) - 3} more' if len(unknown) > 3 else ''}. Load the state of the same architecture."
        )


def _select_stage_state(
    full_state: Mapping[str, Any], manager: DataParallelManager, names: StagedParameterNames
) -> dict[str, Any]:
    """Return a stage's state, under the stage's names, from the state of the full model."""
    model, optimizer = full_state["model"], full_state.get("optimizer", {})
    own = {
        name: model.get(name, model.get(names.first_name.get(name, name)))
        for name in manager.model.state_dict(keep_vars=True)
    }
    local = names.map_to_local_names(name for name, _ in manager.model.named_parameters())
    return {
        "model": {name: value for name, value in own.items() if value is not None},
        "optimizer": {
            "state": rename_to_local(optimizer.get("state", {}), local),
            "param_groups": rename_groups(optimizer.get("param_groups", []), local),
            "masters": rename_to_local(optimizer.get("masters", {}), local),
        },
    }


# -- communication along the pipeline


@dataclass(frozen=True)
class _TensorSpec:
    """Shape and dtype of a tensor, in its place in a state's structure."""

    shape: torch.Size
    dtype: torch.dtype


def gather_states(state: Any, group: dist.ProcessGroup, device: torch.device) -> list[Any]:
    """Return the states of all ranks on the CPU of the group's first rank, an empty list on others. Collective.

    States are nested mappings and lists of tensors and plain values."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outlines: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(_map_tensors(state, _describe_tensor), outlines, group=group, group_dst=0)
    if outlines is None:
        _map_tensors(state, lambda path, tensor: dist.send(tensor.to(device).contiguous(), group=group, group_dst=0))
        return []

    def receive(source: int) -> Callable[[StatePath, Any], Tensor]:
        def fill(path: StatePath, gap: _TensorSpec) -> Tensor:
            tensor = torch.empty(gap.shape, dtype=gap.dtype, device=device)
            dist.recv(tensor, group=group, group_src=source)
            return tensor.cpu()

        return fill

    return [state, *(_map_tensors(outlines[source], receive(source)) for source in range(1, size))]


def broadcast_state(
    state: Any, group: dist.ProcessGroup, device: torch.device, *, is_wanted: Callable[[StatePath], bool]
) -> Any:
    """Return the state of the group's first rank, on the CPU. Collective.

    On the other ranks, tensors at paths that `is_wanted` rejects are None."""
    is_first = dist.get_rank(group) == 0
    box = [_map_tensors(state, _describe_tensor) if is_first else None]
    dist.broadcast_object_list(box, group=group, group_src=0)

    def fill(path: StatePath, given: Any) -> Tensor | None:
        tensor = torch.empty(given.shape, dtype=given.dtype, device=device)
        if is_first:
            tensor.copy_(given)
        dist.broadcast(tensor, group=group, group_src=0)
        return given if is_first else tensor.cpu() if is_wanted(path) else None

    return _map_tensors(state if is_first else box[0], fill)


def _describe_tensor(path: StatePath, tensor: Tensor) -> _TensorSpec:
    return _TensorSpec(tensor.shape, tensor.dtype)


def _map_tensors(value: Any, change: Callable[[StatePath, Any], Any], path: StatePath = ()) -> Any:
    """Apply `change` to each tensor or `_TensorSpec`, in an order that is equal on all ranks."""
    if isinstance(value, (Tensor, _TensorSpec)):
        return change(path, value)
    if isinstance(value, Mapping):
        return {key: _map_tensors(each, change, (*path, key)) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(each, change, (*path, index)) for index, each in enumerate(value))
    return value
