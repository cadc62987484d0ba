"""The whole state of a model from the states of its stages, and back: `state_dict(full=True)` and its loading.

The state that each rank keeps of its own pieces is in `pieces_of_stages`; how tensors travel is in `carry`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.base.errors import StrategyError
from meshwright.manager.data_parallel import DataParallelManager
from meshwright.mesh.mesh import Mesh

from .carry import broadcast, gathered
from .parameter_names import Names, local_groups, renamed


def whole_state(
    managers: Mapping[int, DataParallelManager], names: Names, mesh: Mesh, *, with_optimizer: bool
) -> dict[str, Any]:
    """See `StrategyManager.state_dict`; on the CPU of the first rank of all, nothing of it elsewhere. Collective.

    Args:
        managers: of this rank's stages, by their numbers.
        names: of the whole model.
        mesh: of all ranks.
        with_optimizer: whether there is an optimizer.
    """
    parts = {index: manager.state_dict(full=True) for index, manager in managers.items()}
    stages: list[dict[str, Any]] = []
    # The whole state of a stage lies on the first of its ranks.
    if mesh.stage().world.rank == 0:
        states = gathered(parts, mesh.group("pp"), mesh.device)
        found = {index: state for each in states for index, state in each.items()}
        stages = [found[index] for index in sorted(found)]
    return _merged(stages, names, with_optimizer=with_optimizer)


def load_whole_state(
    managers: Mapping[int, DataParallelManager], names: Names, mesh: Mesh, state: Mapping[str, Any]
) -> None:
    """See `StrategyManager.load_state_dict`. Collective.

    Args:
        managers, names, mesh: as of `whole_state`.
        state: on the first rank of all.

    Raises:
        StrategyError: the state holds what the model does not have; on all ranks.
    """
    mesh.world.together(lambda: _check(state["model"], names))
    whole: Any = None
    if mesh.stage().world.rank == 0:
        held = {name for manager in managers.values() for name in manager.model.state_dict(keep_vars=True)}
        held |= {names.canonical.get(name, name) for name in held}

        def wanted(path: Sequence[Any]) -> bool:
            # ("model", name) or ("optimizer", "state", name, key).
            return not held.isdisjoint(path[1:3])

        whole = broadcast(state, mesh.group("pp"), mesh.device, wanted=wanted)
    for manager in managers.values():
        part = _part(whole, manager, names) if whole is not None else {"model": {}, "optimizer": {}}
        mesh.world.together(lambda manager=manager, part=part: manager.load_state_dict(part, full=True))  # type: ignore[misc]


def _merged(states: Sequence[Mapping[str, Any]], names: Names, *, with_optimizer: bool) -> dict[str, Any]:
    """The state of the whole model from those of all stages, in order; nothing from nothing."""
    model: dict[str, Any] = {}
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    masters: dict[str, Any] = {}
    for state in states:
        for name, tensor in state["model"].items():
            # Tied names keep sharing one tensor.
            model.setdefault(name, model.get(names.canonical.get(name, name), tensor))
        optimizer = state.get("optimizer", {})
        for name, each in optimizer.get("state", {}).items():
            values.setdefault(names.canonical[name], each)
        for name, each in optimizer.get("masters", {}).items():
            masters.setdefault(names.canonical[name], each)
        for group in optimizer.get("param_groups", []):
            _join({**group, "params": [names.canonical[name] for name in group["params"]]}, groups)
    whole: dict[str, Any] = {"model": {name: model[name] for name in names.order if name in model}}
    if with_optimizer:
        whole["optimizer"] = {"state": values, "param_groups": groups} if states else {}
        if masters:
            whole["optimizer"]["masters"] = masters
    return whole


def _join(group: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Join a stage's parameter group with the one of equal settings, or put it behind them."""
    settings = {key: value for key, value in group.items() if key != "params"}
    for each in groups:
        if {key: value for key, value in each.items() if key != "params"} == settings:
            each["params"] += [name for name in group["params"] if name not in each["params"]]
            return
    groups.append({**settings, "params": group["params"]})


def _check(model: Mapping[str, Any], names: Names) -> None:
    """Refuse a whole state with what the model does not have.

    Raises:
        StrategyError: names some of it.
    """
    unknown = sorted(set(model) - set(names.order))
    if unknown:
        raise StrategyError(
            f"the model state holds what the run does not have: {', '.join(unknown[:3])}"
            f"{f' and {len(unknown) - 3} more' if len(unknown) > 3 else ''}. Load state of the same architecture."
        )


def _part(whole: Mapping[str, Any], manager: DataParallelManager, names: Names) -> dict[str, Any]:
    """A stage's state, under the stage's names, from that of the whole model."""
    model, optimizer = whole["model"], whole.get("optimizer", {})
    own = {
        name: model.get(name, model.get(names.canonical.get(name, name)))
        for name in manager.model.state_dict(keep_vars=True)
    }
    local = names.local(name for name, _ in manager.model.named_parameters())
    return {
        "model": {name: value for name, value in own.items() if value is not None},
        "optimizer": {
            "state": renamed(optimizer.get("state", {}), local),
            "param_groups": local_groups(optimizer.get("param_groups", []), local),
            "masters": renamed(optimizer.get("masters", {}), local),
        },
    }
