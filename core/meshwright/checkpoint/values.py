"""What a checkpoint holds besides tensors: JSON values, settings of the optimizer, random generators, schedules.

A rank that has settings or values of the optimizer to save writes a file of its own, so that none are gathered:
{"groups": settings with the names under "params", "values": {name: {key: value}}}; see `OptimizerState`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import CheckpointError
from ..tensors.pieces import Piece, Sharded
from ..tensors.state import OptimizerState, ShardedState, TensorKind
from .index import dtype_name, dtype_named
from .manifest import Manifest, broken, read_verified
from .places import Where
from .remote import place_of

MODEL = "model."
"""Prefix of the names of stored parameters and buffers."""
OPTIMIZER = "optimizer."
"""Prefix of the names of stored optimizer state."""
AVERAGES, RANDOM = "ema.", "random."
_SETTINGS = "optimizer-"
_OF_GROUPS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
# Lists by group in a schedule's state that the groups' settings do not hold.
_LISTS = ("lr_lambdas", "min_lrs", "max_lrs")


def flat(state: ShardedState) -> dict[str, Sharded]:
    """Return all tensors of a state by their names in a checkpoint."""
    tensors = {f"{MODEL}{name}": sharded for name, sharded in state.model.items()}
    for name, values in (state.optimizer.tensors if state.optimizer is not None else {}).items():
        tensors.update({f"{OPTIMIZER}{name}.{key}": sharded for key, sharded in values.items()})
    tensors.update({f"{AVERAGES}{name}": sharded for name, sharded in state.averages.items()})
    return tensors


def plain(values: Any) -> Any:
    """Convert values to JSON, integer tensors and those without dims included. Raises CheckpointError."""
    encoded = _encoded(values)
    try:
        json.dumps(encoded)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"a setting of the optimizer, the schedule or `extra` cannot be written to a checkpoint: {error}. Use "
            f"numbers, strings, lists and mappings of them."
        ) from None
    return encoded


def _encoded(value: Any) -> Any:
    if isinstance(value, Tensor) and (value.dim() == 0 or not value.is_floating_point()):
        return {"$tensor": value.tolist(), "dtype": dtype_name(value.dtype)}
    if isinstance(value, Mapping):
        return {key: _encoded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(each) for each in value]
    return value


def decoded(value: Any) -> Any:
    """Undo `plain`, except for tuples."""
    if isinstance(value, Mapping):
        if "$tensor" in value:
            return torch.tensor(value["$tensor"], dtype=dtype_named(value["dtype"]))
        return {key: decoded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [decoded(each) for each in value]
    return value


def settings_name(rank: int) -> str:
    """Return the name of the file with the optimizer's settings that a rank writes."""
    return f"{_SETTINGS}{rank:05d}.json"


def read_optimizer(where: Where, manifest: Manifest, stored: Mapping[str, TensorKind]) -> OptimizerState[TensorKind]:
    """Read what a checkpoint has of the optimizer besides tensors, and the kinds of its tensors, out of all `stored`.

    Raises CheckpointError if it has no optimizer, or has changed.
    """
    place = place_of(where)
    if not manifest.has_optimizer:
        raise CheckpointError(
            f"the checkpoint {place} holds a model without an optimizer. Load it before build_optimizer."
        )
    found: OptimizerState[TensorKind] = OptimizerState()
    for name in (name for name in manifest.files if name.startswith(_SETTINGS)):
        text = read_verified(place, manifest, name)
        try:
            content = json.loads(text)
            found.groups += decoded(content["groups"])
            found.values.update(decoded(content["values"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
            raise broken(place, f"{name} tells of no optimizer ({type(error).__name__}: {error})") from None
    for full, kind in stored.items():
        if full.startswith(OPTIMIZER):
            name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
            found.tensors.setdefault(name, {})[key] = kind
    return found


def random_state() -> Sharded:
    """Return the state of this rank's generators: the CPU's, followed by its accelerator's."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state().cpu())
    state = torch.cat(states)
    return Sharded(state.shape, state.dtype, (Piece((0,), state),))


def random_to_load(stored: Mapping[str, TensorKind], rank: int) -> dict[str, Sharded]:
    """Return memory for the state of this rank's generators, if the checkpoint has it for the same kind of device."""
    name = f"{RANDOM}{rank}"
    expected = random_state()
    return {name: expected} if name in stored and stored[name][0] == expected.shape else {}


def set_random_state(state: Tensor) -> None:
    """Restore the tensor of `random_state`."""
    count = torch.get_rng_state().numel()
    torch.set_rng_state(state[:count].clone())
    if state.numel() > count:
        torch.get_device_module().set_rng_state(state[count:].clone())


def note_rates(scheduler: LRScheduler) -> None:
    """Write the base rates into the groups before saving, since a user may have changed them in the schedule."""
    for group, rate in zip(scheduler.optimizer.param_groups, getattr(scheduler, "base_lrs", ()), strict=False):
        group["initial_lr"] = rate


def load_schedule(scheduler: LRScheduler, saved: Mapping[str, Any]) -> None:
    """Load a schedule's state, after its optimizer's, for any parameter groups. Raises CheckpointError.

    torch's schedules keep lists with one entry for each parameter group. Other layouts have other groups in another
    order. So each group saves its own rates, as `lr` and `initial_lr` among its settings, and the rest of the state is
    the first rank's. Source: torch.optim.lr_scheduler.LRScheduler.
    """
    scheduler.load_state_dict(_of_groups(saved, scheduler.optimizer.param_groups))


def _of_groups(saved: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    state = dict(saved)
    for key, setting in _OF_GROUPS.items():
        if key in state and all(setting in group for group in groups):
            rates = [group[setting] for group in groups]
            state[key] = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
    for key in _LISTS:
        values = state.get(key)
        if not isinstance(values, list) or len(values) == len(groups):
            continue
        if not values or any(value != values[0] for value in values):
            raise CheckpointError(
                f"the schedule's {key} differ between {len(values)} parameter groups, and this rank has {len(groups)}. "
                f"Resume on the layout that the checkpoint was saved on."
            )
        state[key] = values[:1] * len(groups)
    if isinstance(state.get("milestones"), Mapping):
        # MultiStepLR counts by step; JSON has turned the steps into strings.
        state["milestones"] = Counter({int(step): times for step, times in state["milestones"].items()})
    if "_schedulers" in state:
        state["_schedulers"] = [_of_groups(each, groups) for each in state["_schedulers"]]
    return state
