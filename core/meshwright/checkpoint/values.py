"""What a checkpoint holds beside tensors, as values of JSON, and the state of the random generators."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..base.errors import CheckpointError
from ..tensors.pieces import Piece, Sharded
from ..tensors.state import ShardedState, TensorKind
from .index import dtype_name, dtype_named

MODEL, OPTIMIZER, AVERAGES, RANDOM = "model.", "optimizer.", "ema.", "random."
"""What the names of stored tensors begin with."""


def flat(state: ShardedState) -> dict[str, Sharded]:
    """All tensors of a state under the names by which they are stored."""
    tensors = {f"{MODEL}{name}": sharded for name, sharded in state.model.items()}
    for name, values in (state.optimizer.tensors if state.optimizer is not None else {}).items():
        tensors.update({f"{OPTIMIZER}{name}.{key}": sharded for key, sharded in values.items()})
    tensors.update({f"{AVERAGES}{name}": sharded for name, sharded in state.averages.items()})
    return tensors


def plain(values: Any) -> Any:
    """Values as those of JSON: tensors are written out, whole numbers of any dims and others without dims; tuples
    become lists.

    Raises:
        CheckpointError: there is something else among them.
    """
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
    """The reverse of `plain`, but for tuples."""
    if isinstance(value, Mapping):
        if "$tensor" in value:
            return torch.tensor(value["$tensor"], dtype=dtype_named(value["dtype"]))
        return {key: decoded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [decoded(each) for each in value]
    return value


def random_state() -> Sharded:
    """The state of this rank's generators: the CPU's, and its accelerator's behind it."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state().cpu())
    state = torch.cat(states)
    return Sharded(state.shape, state.dtype, (Piece((0,), state),))


def random_to_load(stored: Mapping[str, TensorKind], rank: int) -> dict[str, Sharded]:
    """Memory for the state of this rank's generators, where a checkpoint has it for the same kind of device."""
    name = f"{RANDOM}{rank}"
    expected = random_state()
    return {name: expected} if name in stored and stored[name][0] == expected.shape else {}


def set_random_state(state: Tensor) -> None:
    """The reverse of `random_state`, for the tensor in it."""
    count = torch.get_rng_state().numel()
    torch.set_rng_state(state[:count].clone())
    if state.numel() > count:
        torch.get_device_module().set_rng_state(state[count:].clone())
