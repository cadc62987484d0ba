"""State that a checkpoint holds besides tensors: JSON values, optimizer settings, random generators, schedules.

Each rank with optimizer settings or values writes its own file, so nothing is gathered: {"groups": settings with
parameter names under "params", "values": {name: {key: value}}}. See `OptimizerState`.
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
from ..tensors.chunks import ChunkedTensor, LocalChunk
from ..tensors.state import OptimizerState, ShardedState, TensorMeta
from .index import format_dtype, parse_stored_dtype
from .manifest import Manifest, incomplete_error, read_verified_file
from .remote_storage import open_storage
from .storage import StorageLike

MODEL_PREFIX = "model."
"""Name prefix of stored parameters and buffers."""
OPTIMIZER_PREFIX = "optimizer."
"""Name prefix of stored optimizer state."""
EMA_PREFIX, RNG_PREFIX = "ema.", "random."
_SETTINGS_PREFIX = "optimizer-"
_GROUP_SETTINGS = {"base_lrs": "initial_lr", "_last_lr": "lr"}
# Per-group lists in a scheduler's state that the groups' settings do not hold.
_PER_GROUP_LISTS = ("lr_lambdas", "min_lrs", "max_lrs")


def flatten_state(state: ShardedState) -> dict[str, ChunkedTensor]:
    """Return all tensors of a state by their names in a checkpoint."""
    tensors = {f"{MODEL_PREFIX}{name}": sharded for name, sharded in state.model.items()}
    for name, values in (state.optimizer.tensors if state.optimizer is not None else {}).items():
        tensors.update({f"{OPTIMIZER_PREFIX}{name}.{key}": sharded for key, sharded in values.items()})
    tensors.update({f"{EMA_PREFIX}{name}": sharded for name, sharded in state.ema_weights.items()})
    return tensors


def encode_values(values: Any) -> Any:
    """Convert values to JSON-serializable ones, including integer tensors and 0-dim tensors. Raises CheckpointError."""
    encoded = _encode(values)
    try:
        json.dumps(encoded)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"a setting of the optimizer, the schedule or `extra` cannot be written to a checkpoint: {error}. Use "
            f"numbers, strings, lists and mappings of them."
        ) from None
    return encoded


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor) and (value.dim() == 0 or not value.is_floating_point()):
        return {"$tensor": value.tolist(), "dtype": format_dtype(value.dtype)}
    if isinstance(value, Mapping):
        return {key: _encode(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(each) for each in value]
    return value


def decode_values(value: Any) -> Any:
    """Undo `encode_values`, except that tuples stay lists."""
    if isinstance(value, Mapping):
        if "$tensor" in value:
            return torch.tensor(value["$tensor"], dtype=parse_stored_dtype(value["dtype"]))
        return {key: decode_values(each) for key, each in value.items()}
    if isinstance(value, list):
        return [decode_values(each) for each in value]
    return value


def settings_file_name(rank: int) -> str:
    """Return the name of the file with a rank's optimizer settings."""
    return f"{_SETTINGS_PREFIX}{rank:05d}.json"


def read_optimizer_state(
    checkpoint: StorageLike, manifest: Manifest, stored: Mapping[str, TensorMeta]
) -> OptimizerState[TensorMeta]:
    """Read the optimizer's settings and values from a checkpoint, and select its tensors' metadata from `stored`.

    Raises CheckpointError if the checkpoint has no optimizer or has changed.
    """
    storage = open_storage(checkpoint)
    if not manifest.has_optimizer:
        raise CheckpointError(
            f"the checkpoint {storage} holds a model without an optimizer. Load it before build_optimizer."
        )
    state: OptimizerState[TensorMeta] = OptimizerState()
    for name in (name for name in manifest.files if name.startswith(_SETTINGS_PREFIX)):
        text = read_verified_file(storage, manifest, name)
        try:
            content = json.loads(text)
            state.groups += decode_values(content["groups"])
            state.values.update(decode_values(content["values"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
            raise incomplete_error(storage, f"{name} tells of no optimizer ({type(error).__name__}: {error})") from None
    for full_name, meta in stored.items():
        if full_name.startswith(OPTIMIZER_PREFIX):
            name, _, key = full_name.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
            state.tensors.setdefault(name, {})[key] = meta
    return state


def get_rng_state() -> ChunkedTensor:
    """Return the state of this rank's generators: uint8, 1-D, the CPU's followed by the accelerator's."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state().cpu())
    state = torch.cat(states)
    return ChunkedTensor(state.shape, state.dtype, (LocalChunk((0,), state),))


def allocate_rng_state(stored: Mapping[str, TensorMeta], rank: int) -> dict[str, ChunkedTensor]:
    """Return memory for this rank's generator state; empty if the checkpoint has none of the same size."""
    name = f"{RNG_PREFIX}{rank}"
    expected = get_rng_state()
    return {name: expected} if name in stored and stored[name][0] == expected.shape else {}


def set_rng_state(state: Tensor) -> None:
    """Restore the state that `get_rng_state` returned."""
    count = torch.get_rng_state().numel()
    torch.set_rng_state(state[:count].clone())
    if state.numel() > count:
        torch.get_device_module().set_rng_state(state[count:].clone())


def store_base_rates(scheduler: LRScheduler) -> None:
    """Write a scheduler's base rates, which a user may have changed, to the parameter groups before saving."""
    for group, rate in zip(scheduler.optimizer.param_groups, getattr(scheduler, "base_lrs", ()), strict=False):
        group["initial_lr"] = rate


def load_scheduler_state(scheduler: LRScheduler, saved: Mapping[str, Any]) -> None:
    """Load a scheduler's state, after its optimizer's, for any parameter groups. Raises CheckpointError."""
    scheduler.load_state_dict(_adapt_to_groups(saved, scheduler.optimizer.param_groups))


def _adapt_to_groups(saved: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    state = dict(saved)
    for key, setting in _GROUP_SETTINGS.items():
        if key in state and all(setting in group for group in groups):
            rates = [group[setting] for group in groups]
            state[key] = [rate.clone() if isinstance(rate, Tensor) else rate for rate in rates]
    for key in _PER_GROUP_LISTS:
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
        # MultiStepLR's keys are steps, which JSON has converted to strings.
        state["milestones"] = Counter({int(step): times for step, times in state["milestones"].items()})
    if "_schedulers" in state:
        state["_schedulers"] = [_adapt_to_groups(each, groups) for each in state["_schedulers"]]
    return state
