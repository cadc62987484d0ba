"""Parameter names of a model in stages, and the sharded state of this rank's stages under names of the full model.

Functions of this module send no tensors; see `gather_full_state` for the full state.

A parameter with several names is known by the first, as in torch. If several stages have a parameter, the first stage
saves it, and all load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn

from meshwright.plugin import (
    EMA_COUNTS,
    ChunkedTensor,
    DataParallelManager,
    ModelError,
    ModelLayout,
    OptimizerState,
    ShardedState,
    TensorMeta,
)

from ..partition.boundary import ModelPartition

T = TypeVar("T")


class StagedParameterNames:
    """Names of the full model before it is split."""

    def __init__(
        self,
        first_name: Mapping[str, str],
        stages_by_shared_name: Mapping[str, tuple[int, ...]],
        part_by_name: Mapping[str, str],
        ordered_names: Sequence[str],
        find_stage: Callable[[str], int],
    ) -> None:
        self.first_name, self.part_by_name, self.ordered_names = first_name, part_by_name, ordered_names
        """First name of each parameter name; part of each trainable parameter; ordered names of persistent tensors."""
        self.stages_by_shared_name = stages_by_shared_name
        """Stages of each trainable parameter that several stages hold, ascending."""
        self._first_stage: dict[str, int] = {}
        for name in ordered_names:
            first = first_name.get(name, name)
            self._first_stage[first] = min(find_stage(name), self._first_stage.get(first, find_stage(name)))

    def find_first_stage(self, name: str) -> int:
        return self._first_stage[self.first_name.get(name, name)]

    def map_to_local_names(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names of a stage's parameters, by their first names in the full model."""
        return {self.first_name[name]: name for name in names}

    @classmethod
    def from_model(
        cls, model: nn.Module, layout: ModelLayout, cut: ModelPartition, split: Sequence[range]
    ) -> StagedParameterNames:
        canonical = find_first_names(model)
        holders: dict[str, set[int]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.requires_grad:
                holders.setdefault(canonical[name], set()).update(_find_holders(name, cut, split))
        shared = {name: tuple(sorted(stages)) for name, stages in holders.items() if len(stages) > 1}

        def stage_of(name: str) -> int:
            return min(_find_holders(name, cut, split), default=0)

        return cls(canonical, shared, find_trainable_parts(model, layout), list(model.state_dict()), stage_of)

    @classmethod
    def from_stages(
        cls, stages: Sequence[tuple[Mapping[str, str], Mapping[str, str], Sequence[str]]]
    ) -> StagedParameterNames:
        """Build the names of user-supplied stages.

        `stages` are the results of `find_first_names` and `find_trainable_parts`, and the state's names, per stage."""
        canonical: dict[str, str] = {}
        parts: dict[str, str] = {}
        for index, (names, trained, _) in enumerate(stages):
            both = sorted(canonical.keys() & names.keys())
            if both:
                raise ModelError(
                    f"stage {index} of the pipeline and an earlier stage both have a parameter {both[0]!r}. Give each "
                    f"stage only the parameters of its own part of the model, under the names of the full model."
                )
            canonical.update(names)
            parts.update(trained)
        stage_of = {name: index for index, (*_, order) in reversed(list(enumerate(stages))) for name in order}
        order = list(dict.fromkeys(name for *_, order in stages for name in order))
        return cls(canonical, {}, parts, order, stage_of.__getitem__)


def find_first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of the parameter for each parameter name."""
    first: dict[nn.Parameter, str] = {}
    return {
        name: first.setdefault(parameter, name) for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def find_trainable_parts(model: nn.Module, layout: ModelLayout) -> dict[str, str]:
    """Return the part of the model of each trainable parameter, by the parameter's first name."""
    return {name: layout.find_part(name) for name, parameter in model.named_parameters() if parameter.requires_grad}


def rename_to_local(values: Mapping[str, T], local: Mapping[str, str]) -> dict[str, T]:
    """Rename the keys from names of the full model to names of a stage. Keys of other stages are dropped."""
    return {local[name]: each for name, each in values.items() if name in local}


def rename_groups(groups: Sequence[Mapping[str, Any]], local: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return parameter groups with only the parameters of a stage, under its names. Groups may be empty."""
    return [{**group, "params": [local[name] for name in group["params"] if name in local]} for group in groups]


def _find_holders(name: str, cut: ModelPartition, split: Sequence[range]) -> set[int]:
    """Return the stages that hold a parameter or buffer."""
    if name in cut.container_parameters:
        return {0}
    block = next((index for index, each in enumerate(cut.blocks) if name.startswith(f"{each}.")), None)
    if block is not None:
        return {stage for stage, blocks in enumerate(split) if block in blocks}
    module = name.rpartition(".")[0]
    while module and module not in cut.outside_modules:
        # A module with parameter containers is listed instead of the modules inside it.
        module = module.rpartition(".")[0]
    if not module:
        # Buffers of modules without parameters are small, so every stage holds them.
        return set(range(len(split)))
    return {stage for stage, blocks in enumerate(split) if cut.runs_on_stage(module, blocks)}


# -- sharded state


def merge_sharded_state(managers: Mapping[int, DataParallelManager], names: StagedParameterNames) -> ShardedState:
    """See `StrategyManager.sharded_state`; `managers` are those of this rank's stages, by stage number."""
    model: dict[str, ChunkedTensor] = {}
    averages: dict[str, ChunkedTensor] = {}
    optimizer: OptimizerState[ChunkedTensor] = OptimizerState()
    for index, manager in managers.items():
        state = manager.sharded_state()
        for found, merged in ((state.model, model), (state.ema_weights, averages)):
            for name, sharded in found.items():
                if name == EMA_COUNTS or names.find_first_stage(name) == index:
                    merged[names.first_name.get(name, name)] = sharded
        if state.optimizer is None:
            continue
        parameters = (name for group in state.optimizer.groups for name in group["params"])
        first = {name: names.first_name[name] for name in parameters if names.find_first_stage(name) == index}
        optimizer.tensors.update(rename_to_local(state.optimizer.tensors, first))
        optimizer.values.update(rename_to_local(state.optimizer.values, first))
        optimizer.groups += [group for group in rename_groups(state.optimizer.groups, first) if group["params"]]
    if not any(manager.has_optimizer for manager in managers.values()):
        return ShardedState(model)
    return ShardedState(model, optimizer, averages)


def merge_parameter_chunks(
    managers: Mapping[int, DataParallelManager], names: StagedParameterNames
) -> dict[str, ChunkedTensor | None]:
    """See `StrategyManager.parameter_chunks`; in the order of the full model, None for parameters of other ranks."""
    found = {
        names.first_name[name]: sharded
        for index, manager in managers.items()
        for name, sharded in manager.parameter_chunks().items()
        if names.find_first_stage(name) == index
    }
    return {name: found.get(name) for name in names.ordered_names if names.first_name.get(name) == name}


@contextmanager
def load_stages(
    managers: Mapping[int, DataParallelManager], names: StagedParameterNames, saved: OptimizerState[TensorMeta] | None
) -> Iterator[ShardedState]:
    """See `StrategyManager.load_sharded_state`; `saved` is the full model's optimizer state, or None."""
    with ExitStack() as contexts:
        model: dict[str, ChunkedTensor] = {}
        averages: dict[str, ChunkedTensor] = {}
        tensors: dict[str, dict[str, ChunkedTensor]] = {}
        for manager in managers.values():
            part = (
                _select_optimizer_state(saved, manager, names) if saved is not None and manager.has_optimizer else None
            )
            target = contexts.enter_context(manager.load_sharded_state(part))
            for found, merged in ((target.model, model), (target.ema_weights, averages)):
                for name, sharded in found.items():
                    _merge_chunks(merged, names.first_name.get(name, name), sharded)
            for name, values in (target.optimizer.tensors if target.optimizer is not None else {}).items():
                for key, sharded in values.items():
                    _merge_chunks(tensors.setdefault(names.first_name[name], {}), key, sharded)
        yield ShardedState(model, None if saved is None else OptimizerState(tensors=tensors), averages)


def _select_optimizer_state(
    saved: OptimizerState[TensorMeta], manager: DataParallelManager, names: StagedParameterNames
) -> OptimizerState[TensorMeta]:
    local = names.map_to_local_names(manager.parameter_names.values())
    groups = rename_groups(saved.groups, local)
    return OptimizerState(rename_to_local(saved.tensors, local), rename_to_local(saved.values, local), groups)


def _merge_chunks(found: dict[str, ChunkedTensor], name: str, sharded: ChunkedTensor) -> None:
    if name in found:
        sharded = ChunkedTensor(sharded.shape, sharded.dtype, found[name].chunks + sharded.chunks)
    found[name] = sharded
