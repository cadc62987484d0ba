"""The sharded state of all stages on this rank, under the names of the whole model.

Where several stages have a parameter, the first saves it, and all load it. No tensor moves to another rank; see
`whole_state` for the state that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from meshwright.manager.data_parallel import DataParallelManager
from meshwright.tensors.averages import COUNTS
from meshwright.tensors.pieces import Sharded
from meshwright.tensors.state import OptimizerState, ShardedState, TensorKind

from .parameter_names import Names, local_groups, renamed


def stages_state(managers: Mapping[int, DataParallelManager], names: Names) -> ShardedState:
    """See `StrategyManager.sharded_state`.

    Args:
        managers: of this rank's stages, by their numbers.
        names: of the whole model.
    """
    states = {index: manager.sharded_state() for index, manager in managers.items()}
    model = {
        names.canonical.get(name, name): sharded
        for index, state in states.items()
        for name, sharded in state.model.items()
        if names.first_stage(name) == index
    }
    if not any(manager.has_optimizer for manager in managers.values()):
        return ShardedState(model)
    averages = {
        names.canonical.get(name, name): sharded
        for index, state in states.items()
        for name, sharded in state.averages.items()
        if name == COUNTS or names.first_stage(name) == index
    }
    optimizer: OptimizerState[Sharded] = OptimizerState()
    for index, state in states.items():
        if state.optimizer is None:
            continue
        first = {name for name in _parameters(state.optimizer) if names.first_stage(name) == index}
        for found, merged in (
            (state.optimizer.tensors, optimizer.tensors),
            (state.optimizer.values, optimizer.values),
        ):
            merged.update({names.canonical[name]: values for name, values in found.items() if name in first})
        for group in state.optimizer.groups:
            chosen = [names.canonical[name] for name in group["params"] if name in first]
            if chosen:
                optimizer.groups.append({**group, "params": chosen})
    return ShardedState(model, optimizer, averages)


def stages_parameters(managers: Mapping[int, DataParallelManager], names: Names) -> dict[str, Sharded | None]:
    """See `StrategyManager.parameter_pieces`: in the order of the whole model, None for those of other ranks' stages.

    Args:
        managers, names: as of `stages_state`.
    """
    found = {
        names.canonical[name]: sharded
        for index, manager in managers.items()
        for name, sharded in manager.parameter_pieces().items()
        if names.first_stage(name) == index
    }
    return {name: found.get(name) for name in names.order if names.canonical.get(name) == name}


@contextmanager
def loading_stages(
    managers: Mapping[int, DataParallelManager], names: Names, saved: OptimizerState[TensorKind] | None
) -> Iterator[ShardedState]:
    """See `StrategyManager.loading`.

    Args:
        managers: of this rank's stages, by their numbers.
        names: of the whole model.
        saved: of the whole model's optimizer; None: parameters and buffers alone.
    """
    with ExitStack() as contexts:
        model: dict[str, Sharded] = {}
        averages: dict[str, Sharded] = {}
        tensors: dict[str, dict[str, Sharded]] = {}
        for manager in managers.values():
            part = _part(saved, manager, names) if saved is not None and manager.has_optimizer else None
            target = contexts.enter_context(manager.loading(part))
            for name, sharded in target.model.items():
                _add(model, names.canonical.get(name, name), sharded)
            for name, sharded in target.averages.items():
                _add(averages, names.canonical.get(name, name), sharded)
            for name, values in (target.optimizer.tensors if target.optimizer is not None else {}).items():
                for key, sharded in values.items():
                    _add(tensors.setdefault(names.canonical[name], {}), key, sharded)
        yield ShardedState(model, None if saved is None else OptimizerState(tensors=tensors), averages)


def _part(saved: OptimizerState[TensorKind], manager: DataParallelManager, names: Names) -> OptimizerState[TensorKind]:
    """What a stage's optimizer has of the whole state, under the stage's names."""
    local = names.local(manager.parameter_names.values())
    groups = local_groups(saved.groups, local)
    return OptimizerState(renamed(saved.tensors, local), renamed(saved.values, local), groups)


def _parameters(state: OptimizerState[Sharded]) -> Iterator[str]:
    return (name for group in state.groups for name in group["params"])


def _add(found: dict[str, Sharded], name: str, sharded: Sharded) -> None:
    """A tensor that two stages of this rank have, has the pieces of both."""
    if name in found:
        sharded = Sharded(sharded.shape, sharded.dtype, found[name].pieces + sharded.pieces)
    found[name] = sharded
