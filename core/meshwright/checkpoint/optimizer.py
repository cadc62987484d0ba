"""The optimizer's settings and values in a checkpoint: what it has beside tensors.

A rank that has something to tell of them writes a file of its own, so that none is gathered. JSON: {"groups": settings
with the names under "params", "values": {name: {key: value}}}; see `meshwright.tensors.state.OptimizerState`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..base.errors import CheckpointError
from ..tensors.state import OptimizerState, TensorKind
from .agreement import Share
from .manifest import Manifest, broken, read_verified
from .opening import place_of
from .places import Where
from .values import OPTIMIZER, decoded, plain

_PREFIX = "optimizer-"


def settings_name(rank: int) -> str:
    """The file of a rank."""
    return f"{_PREFIX}{rank:05d}.json"


def settings_of(optimizer: OptimizerState[Any] | None, share: Share) -> bytes | None:
    """What this rank tells of the optimizer; None if nothing. Tensors on any device are read.

    Raises:
        CheckpointError: a value is none of JSON.
    """
    if optimizer is None:
        return None
    groups = [
        {**each, "params": [name for name in each["params"] if name in share.grouped]} for each in optimizer.groups
    ]
    content = {
        "groups": [each for each in groups if each["params"]],
        "values": {name: each for name, each in optimizer.values.items() if name in share.valued},
    }
    return json.dumps(plain(content)).encode() if any(content.values()) else None


def read_optimizer(where: Where, manifest: Manifest, stored: Mapping[str, TensorKind]) -> OptimizerState[TensorKind]:
    """What a checkpoint has of the optimizer.

    Args:
        where, manifest: the checkpoint, and what it tells.
        stored: its tensors.

    Raises:
        CheckpointError: it has no optimizer, or was altered.
    """
    place = place_of(where)
    if not manifest.has_optimizer:
        raise CheckpointError(
            f"the checkpoint {place} holds a model without an optimizer. Load it before build_optimizer."
        )
    found: OptimizerState[TensorKind] = OptimizerState()
    for name in (name for name in manifest.files if name.startswith(_PREFIX)):
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
