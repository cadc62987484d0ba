"""Model and optimizer state by parameter name, full or sharded.

Full state moves between strategies in memory, as plain tensors on the CPU of rank 0. An optimizer's is `{"state":
{name: values}, "param_groups": [{..., "params": names}]}`. Tensors are gathered or broadcast one at a time. Sharded
state lists the chunks of each rank, from which checkpoints are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer

from .._compat.torch import gather_packed, is_packed_shard
from ..base.errors import StrategyError
from ..mesh.world import World
from .chunks import ChunkedTensor, LocalChunk, get_local_chunks
from .norms import ShardGroups, get_shard_groups


class ShardLayout:
    """How a strategy shards tensors over ranks; this base class: as DTensors.

    A strategy with other shards overrides the methods and sets `DataParallelManager.shard_layout`. `parameter` is the
    optimizer's parameter; `value` is that parameter or an entry of its optimizer state (sharded like it, or a scalar).
    """

    def gather(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Return the full `value`, on rank 0 and possibly on other ranks. Collective."""
        return gather_full_tensor(value)

    def shard(self, full: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor that every rank has. Collective."""
        if isinstance(parameter, DTensor) and parameter.shape == full.shape:
            return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return full

    def get_full_shape(self, value: Tensor, parameter: Tensor) -> torch.Size:
        """Return the full shape of `value`."""
        return value.shape

    def allocate_shard(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate this rank's shard of a tensor of the parameter's full shape."""
        return torch.empty_like(parameter.detach(), dtype=dtype)

    def get_local_chunks(self, value: Tensor, parameter: Tensor) -> list[LocalChunk]:
        """Return this rank's chunks of `value`, as views. `value` may also be a parameter or buffer of the model."""
        return get_local_chunks(value)

    def get_shard_groups(self, parameter: Tensor) -> ShardGroups:
        """Return the groups over which a parameter, and so its gradient, is sharded."""
        # Do not use the gradient: torch may put it on an equal mesh that has separate groups.
        return get_shard_groups(parameter)


DTENSOR_LAYOUT = ShardLayout()

T = TypeVar("T")


@dataclass
class OptimizerState(Generic[T]):
    """Optimizer state by parameter name.

    Attributes:
        tensors: by name and by key such as "exp_avg"; a `ChunkedTensor` on a rank, (shape, dtype) in a checkpoint.
        values: scalars and values that are not tensors, by name and key.
        groups: parameter groups, with names under "params". If empty on loading, the optimizer keeps its own.
    """

    tensors: dict[str, dict[str, T]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


TensorMeta = tuple[torch.Size, torch.dtype]
"""Global shape and dtype of a tensor."""


@dataclass
class ShardedState:
    """This rank's chunks of a model (by first names), its optimizer and its EMA weights, as views."""

    model: dict[str, ChunkedTensor]
    optimizer: OptimizerState[ChunkedTensor] | None = None
    ema_weights: dict[str, ChunkedTensor] = field(default_factory=dict)


def get_sharded_model_state(model: nn.Module, shard_layout: ShardLayout) -> dict[str, ChunkedTensor]:
    """Return the model's part of a `ShardedState`."""
    tensors = _drop_tied(model.state_dict(keep_vars=True))
    return {name: to_chunked_tensor(value, value, shard_layout) for name, value in tensors.items()}


def _drop_tied(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model's state; tied ones only under their first name."""
    first = {id(value): name for name, value in reversed(state.items())}
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and first[id(value)] == name}


def get_sharded_optimizer_state(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], shard_layout: ShardLayout
) -> OptimizerState[ChunkedTensor]:
    """Return the optimizer's part of a `ShardedState`; never steps the optimizer."""
    state: OptimizerState[ChunkedTensor] = OptimizerState(groups=_get_named_groups(optimizer, names))
    for parameter in _list_parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim():
                state.tensors.setdefault(names[parameter], {})[key] = to_chunked_tensor(value, parameter, shard_layout)
            else:
                state.values.setdefault(names[parameter], {})[key] = value
    return state


def _list_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _get_named_groups(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    return [{**group, "params": [names[each] for each in group["params"]]} for group in optimizer.param_groups]


@contextmanager
def load_sharded_optimizer(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: OptimizerState[TensorMeta],
    shard_layout: ShardLayout,
) -> Iterator[OptimizerState[ChunkedTensor]]:
    """Allocate the chunks of a saved optimizer state, to be filled within the context, and load them on exit.

    Raises:
        StrategyError: the state has other parameters or groups. Raised before any change.
    """
    _check_unexpected(optimizer, names, saved.tensors.keys() | saved.values.keys())
    groups = _match_groups(optimizer, names, saved.groups or _get_named_groups(optimizer, names))
    state: dict[int, dict[str, Any]] = {}
    target: OptimizerState[ChunkedTensor] = OptimizerState()
    for number, parameter in enumerate(_list_parameters(optimizer)):
        name = names[parameter]
        if name in saved.tensors or name in saved.values:
            # Clone: step counters are incremented in place, and several parameters may share one tensor.
            values = saved.values.get(name, {})
            state[number] = {key: v.clone() if isinstance(v, Tensor) else v for key, v in values.items()}
        full_shape = shard_layout.get_full_shape(parameter, parameter)
        for key, (shape, dtype) in saved.tensors.get(name, {}).items():
            is_sharded = shape == full_shape
            value = shard_layout.allocate_shard(parameter, dtype) if is_sharded else torch.empty(shape, dtype=dtype)
            state[number][key] = value
            target.tensors.setdefault(name, {})[key] = to_chunked_tensor(
                value, parameter, shard_layout if is_sharded else DTENSOR_LAYOUT
            )
    yield target
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def to_chunked_tensor(value: Tensor, parameter: Tensor, shard_layout: ShardLayout) -> ChunkedTensor:
    """Return this rank's chunks of a tensor; see `ShardLayout.get_local_chunks`."""
    return ChunkedTensor(
        shard_layout.get_full_shape(value, parameter),
        value.dtype,
        tuple(shard_layout.get_local_chunks(value, parameter)),
    )


def get_model_state_dict(
    model: nn.Module, world: World, *, full: bool, shard_layout: ShardLayout = DTENSOR_LAYOUT
) -> dict[str, Any]:
    """See `StrategyManager.state_dict`. Collective if `full`."""
    state = model.state_dict(keep_vars=True)
    if not full:
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in state.items()}
    # Tied names share one tensor.
    copies = {id(value): _gather_to_cpu(value, value, world, shard_layout) for value in _drop_tied(state).values()}
    return {name: copies.get(id(value), value) for name, value in state.items()} if world.rank == 0 else {}


def load_model_state_dict(
    model: nn.Module, state: Mapping[str, Any], world: World, *, full: bool, shard_layout: ShardLayout = DTENSOR_LAYOUT
) -> None:
    """See `StrategyManager.load_state_dict`. Collective if `full`; raises StrategyError on all ranks."""
    mine = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    shapes = {name: (value.shape, value.dtype) for name, value in state.items() if isinstance(value, Tensor)}
    if full:
        shapes = _broadcast_object(shapes, world)
    _check_names("model", set(shapes), set(mine))
    for name, value in mine.items():
        expected = shard_layout.get_full_shape(value, value) if full else value.shape
        if shapes[name][0] != expected:
            raise StrategyError(
                f"{name} has shape {tuple(shapes[name][0])} in the state, but {tuple(expected)} in the model. "
                f"Build the model from the configuration that the state was saved with."
            )
    for name, value in _drop_tied(mine).items():
        source = (
            _broadcast_and_shard(state.get(name), shapes[name], value, world, shard_layout) if full else state[name]
        )
        with torch.no_grad():
            value.copy_(source)


def get_optimizer_state_dict(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    world: World,
    *,
    full: bool,
    shard_layout: ShardLayout = DTENSOR_LAYOUT,
) -> dict[str, Any]:
    """Return the optimizer's part of `StrategyManager.state_dict`; never steps the optimizer. Collective if `full`."""
    state = {
        names[each]: {
            k: _gather_to_cpu(value, each, world, shard_layout) if full else value for k, value in values.items()
        }
        for each in _list_parameters(optimizer)
        if (values := optimizer.state.get(each))
    }
    return {} if full and world.rank else {"state": state, "param_groups": _get_named_groups(optimizer, names)}


def load_optimizer_state_dict(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    state: Mapping[str, Any],
    world: World,
    *,
    full: bool,
    shard_layout: ShardLayout = DTENSOR_LAYOUT,
) -> None:
    """Load the optimizer's part of `StrategyManager.load_state_dict`. Collective if `full`."""
    saved = state.get("state", {})
    kinds = {
        name: {key: (v.shape, v.dtype) if isinstance(v, Tensor) else v for key, v in values.items()}
        for name, values in saved.items()
    }
    groups = state.get("param_groups", [])
    if full:
        kinds, groups = _broadcast_object((kinds, groups), world)
    _check_unexpected(optimizer, names, kinds)
    packed: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(_list_parameters(optimizer)):
        values = saved.get(names[parameter], {})
        for key, kind in kinds.get(names[parameter], {}).items():
            value = kind if full else values[key]
            if full and isinstance(kind, tuple):
                value = _broadcast_and_shard(values.get(key), kind, parameter, world, shard_layout)
            packed.setdefault(index, {})[key] = value
    optimizer.load_state_dict({"state": packed, "param_groups": _match_groups(optimizer, names, groups)})


def _check_unexpected(optimizer: Optimizer, names: Mapping[nn.Parameter, str], names_in_state: Iterable[str]) -> None:
    _check_names("optimizer", set(names_in_state) - {names[each] for each in _list_parameters(optimizer)}, set())


def _match_groups(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the saved settings of each parameter group, with the indices of its parameters."""
    numbers = {names[parameter]: number for number, parameter in enumerate(_list_parameters(optimizer))}
    matched: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        mine = [names[parameter] for parameter in group["params"]]
        overlapping = [each for each in saved if not set(mine).isdisjoint(each["params"])]
        # A strategy may have several groups where another has one.
        settings = [{key: value for key, value in each.items() if key != "params"} for each in overlapping]
        if not mine:
            # This rank has none of the group's parameters.
            matched.append(dict(group))
        elif not overlapping or any(each != settings[0] for each in settings):
            raise StrategyError(
                f"a parameter group meets {len(overlapping)} groups of the optimizer state to load, "
                f"not one or several of equal settings. "
                f"Group the parameters as they were when the state was saved. The group begins with "
                f"{', '.join(mine[:3])}."
            )
        else:
            matched.append({**overlapping[0], "params": [numbers[name] for name in mine]})
    return matched


def _gather_to_cpu(value: Any, parameter: Tensor, world: World, shard_layout: ShardLayout) -> Any:
    """Gather a tensor to the CPU of rank 0, None on other ranks; return other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    full = shard_layout.gather(value.detach(), parameter)
    return full.to("cpu", copy=True) if world.rank == 0 else None


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor as a full plain tensor on every rank of its mesh; a plain tensor unchanged. Collective."""
    # Gather one axis at a time, outermost first, to undo sharding one dim along `tp` and then along `dp_shard`.
    # `full_tensor` warns about such shards on every rank, and before torch 2.13 it rejects packed ones.
    if not isinstance(tensor, DTensor):
        return tensor
    tensor = gather_packed(tensor) if is_packed_shard(tensor) else tensor
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            placements = (*tensor.placements[:axis], Replicate(), *tensor.placements[axis + 1 :])
            tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def _broadcast_and_shard(
    full: Tensor | None,
    meta: tuple[torch.Size, torch.dtype],
    parameter: Tensor,
    world: World,
    shard_layout: ShardLayout,
) -> Tensor:
    """Broadcast a full tensor from rank 0 and return this rank's shard."""
    shape, dtype = meta
    if full is None:
        received = torch.empty(shape, dtype=dtype, device=world.device)
    else:
        received = full.to(world.device, copy=True)
    dist.broadcast(received, group=world.group, group_src=0)
    return shard_layout.shard(received, parameter)


def _broadcast_object(value: Any, world: World) -> Any:
    box = [value if world.rank == 0 else None]
    dist.broadcast_object_list(box, group=world.group, group_src=0)
    return box[0]


def _check_names(kind: str, found: set[str], expected: set[str]) -> None:
    for names, problem in ((expected - found, "lacks"), (found - expected, "holds what the run does not have:")):
        if names:
            some = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            raise StrategyError(f"the {kind} state {problem} {some}. Load state of the same architecture.")
