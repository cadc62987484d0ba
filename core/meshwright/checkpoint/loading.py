"""Load a checkpoint that was saved under any strategy and mesh."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar, overload

import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from ..base.errors import CheckpointError, IncompleteCheckpointError
from ..files.terminal import warn
from ..mesh.world import World
from ..model.adapter import BaseParameters, find_frozen_base_parameters, get_base
from ..strategy.contract import StrategyManager
from ..tensors.chunks import ChunkedTensor
from ..tensors.state import TensorMeta
from .index import read_index, read_tensors
from .manifest import Manifest, list_checkpoints, read_manifest, verify_files
from .remote_storage import is_url, open_storage
from .storage import Storage, StorageLike, StorageReader
from .training_state import (
    EMA_PREFIX,
    MODEL_PREFIX,
    allocate_rng_state,
    decode_values,
    flatten_state,
    load_scheduler_state,
    read_optimizer_state,
    set_rng_state,
)


def load_checkpoint(
    manager: StrategyManager,
    checkpoint: StorageLike,
    *,
    scheduler: LRScheduler | None = None,
    keep_group_settings: bool = False,
) -> Manifest:
    """Load a checkpoint that was saved under any strategy and mesh. Collective.

    The optimizer's state is loaded if the manager has an optimizer. The random generators' states are loaded if the
    mesh is the same.

    Args:
        manager: manager with its model; loaded in place.
        checkpoint: path, URL or storage of the checkpoint.
        scheduler: learning-rate scheduler; loaded in place.
        keep_group_settings: keep the settings of the optimizer's groups (learning rate, weight decay, ...) and load
            only the state of each parameter. The groups may then differ from the saved ones.

    Returns:
        The manifest of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, not signed with the key, of another model, or lacks the moving
            averages that the manager keeps. Raised on all ranks, before anything changes.
        StrategyError: the saved optimizer state does not fit the optimizer. Raised on all ranks, before anything
            changes.
    """
    world = manager.mesh.world
    checkpoint = world.run_on_all_ranks(lambda: open_storage(checkpoint))
    manifest = world.run_on_all_ranks(lambda: read_and_verify_share(checkpoint, world))
    index = world.run_on_all_ranks(lambda: read_index(checkpoint, manifest))
    stored = index.metas
    own_state = manager.sharded_state()
    _check_base(checkpoint, manifest, get_base(manager.model_parts))
    _check_model(checkpoint, own_state.model, stored, find_frozen_base_parameters(manager.model_parts), world)
    _check_averages(checkpoint, own_state.ema_weights, stored, world)
    has_optimizer = own_state.optimizer is not None
    saved_optimizer = world.run_on_all_ranks(
        lambda: read_optimizer_state(checkpoint, manifest, stored) if has_optimizer else None
    )
    if saved_optimizer is not None and keep_group_settings:
        saved_optimizer = replace(saved_optimizer, groups=[])
    if scheduler is not None and manifest.scheduler is None:
        raise CheckpointError(f"the checkpoint {checkpoint} has no learning-rate schedule. Load it without scheduler.")
    with manager.load_sharded_state(saved_optimizer) as target:
        same_mesh = manifest.mesh == asdict(manager.mesh.degrees)
        rng_state = allocate_rng_state(stored, dist.get_rank()) if same_mesh else {}
        targets = {name: each for name, each in flatten_state(target).items() if name in stored}
        world.run_on_all_ranks(lambda: read_tensors(checkpoint, manifest, index, {**targets, **rng_state}))
    for sharded in rng_state.values():
        set_rng_state(sharded.chunks[0].tensor)
    if scheduler is not None and manifest.scheduler is not None:
        saved_schedule = decode_values(manifest.scheduler)
        world.run_on_all_ranks(lambda: load_scheduler_state(scheduler, saved_schedule))
    return manifest


@overload
def find_newest_checkpoint(root: Path, world: World) -> Path | None: ...
@overload
def find_newest_checkpoint(root: Storage, world: World) -> Storage | None: ...
@overload
def find_newest_checkpoint(root: str, world: World) -> Path | Storage | None: ...
def find_newest_checkpoint(root: str | Path | Storage, world: World) -> Path | Storage | None:
    """Return the newest valid checkpoint in a directory; None if there are no checkpoints. Collective.

    Returns a path if `root` is a path, otherwise a storage. Warns on rank 0 about newer checkpoints that are
    incomplete.

    Raises CheckpointError on all ranks if no checkpoint is valid. Also raises it if the newest complete one cannot be
    read, is not signed with the key, or is of another version of meshwright.
    """
    folder = world.run_on_all_ranks(lambda: open_storage(root))
    names = world.run_on_first_rank(lambda: [checkpoint.name for checkpoint in list_checkpoints(folder)])
    newest, incomplete = find_first_valid([folder.child(name) for name in names], world)
    if newest is not None:
        for text in incomplete if world.rank == 0 else ():
            warn(f"{text} An older one is tried.", stacklevel=2)
    elif incomplete:
        reasons = "\n".join(f"  {text}" for text in incomplete)
        raise CheckpointError(
            f"none of the checkpoints in {root} is valid; none was changed or removed:\n{reasons}\nBring one back "
            f"from a copy, or start over in another directory. (`meshwright train` with resume=never and "
            f"overwrite=true removes them.)"
        )
    is_path = isinstance(root, Path) or (isinstance(root, str) and not is_url(root))
    return Path(str(newest)) if is_path and newest is not None else newest


CheckpointT = TypeVar("CheckpointT", bound=StorageLike)


def find_first_valid(paths: Sequence[CheckpointT], world: World) -> tuple[CheckpointT | None, list[str]]:
    """Return the first valid checkpoint, and the errors of those before it. Collective. Raises CheckpointError."""
    incomplete = []
    for path in paths:
        try:
            world.run_on_all_ranks(lambda path=path: read_and_verify_share(path, world))  # type: ignore[misc]
        except IncompleteCheckpointError as error:
            incomplete.append(str(error))
            continue
        return path, incomplete
    return None, incomplete


def read_and_verify_share(directory: StorageLike, world: World) -> Manifest:
    """Read the manifest and verify this rank's share of the files. Raises CheckpointError."""
    manifest = read_manifest(directory)
    verify_files(directory, manifest, list(manifest.files)[world.rank :: world.size])
    return manifest


def _check_base(directory: StorageReader, manifest: Manifest, known: BaseParameters | None) -> None:
    saved = manifest.base
    if saved is None or (known is not None and known.base.fingerprint == saved.get("fingerprint")):
        return
    own = "the model has none that is known" if known is None else f"the model's is {known.base}"
    path = saved.get("path")
    raise CheckpointError(
        f"the checkpoint {directory} holds adapters alone. Their base is {path} (fingerprint "
        f"{str(saved.get('fingerprint'))[:12]}), and {own}. Load it into that base with the same adapters, for "
        f"instance by from_pretrained({path!r}, peft=...); or merge it: meshwright export --merge {directory} OUT."
    )


def _check_model(
    directory: StorageReader,
    model: Mapping[str, ChunkedTensor],
    stored: Mapping[str, TensorMeta],
    optional_names: Collection[str],
    world: World,
) -> None:
    """Raise on all ranks if the checkpoint is of another model; it may lack `optional_names`, which the base has."""
    shapes = {
        name.removeprefix(MODEL_PREFIX): shape for name, (shape, _) in stored.items() if name.startswith(MODEL_PREFIX)
    }
    error: str | None = None
    for name, sharded in model.items():
        if name in shapes and shapes[name] != sharded.shape:
            error = f"{name} has shape {tuple(shapes[name])} in it, but {tuple(sharded.shape)} in the model"
        elif name not in shapes and name not in optional_names:
            error = f"it lacks {name}"
        if error is not None:
            break
    flags = world.reduce_ints([int(name in model) for name in shapes], dist.ReduceOp.MAX)
    unknown = [name for name, is_known in zip(shapes, flags, strict=True) if not is_known]
    if unknown:
        error = f"it holds {', '.join(unknown[:3])}{' and more' if unknown[3:] else ''}, which the model has not"
    message = f"the checkpoint {directory} is not of this model: {error}. Build the model that it was saved from."
    world.raise_on_all_ranks(None if error is None else CheckpointError(message))


def _check_averages(
    directory: StorageReader, averages: Mapping[str, ChunkedTensor], stored: Mapping[str, TensorMeta], world: World
) -> None:
    """Raise on all ranks if the checkpoint lacks moving averages of trained weights."""
    names = [name for name in averages if f"{EMA_PREFIX}{name}" not in stored]
    has_any = any(name.startswith(EMA_PREFIX) for name in stored)
    lacks = f"lacks the average of {names[0]}" if names and has_any else "has no average of the weights"
    message = (
        f"the checkpoint {directory} {lacks}. Load it before the average is started (mw.EMA), which then begins with "
        f"its weights; in a run file: resume: {{from: ..., allow: [ema]}}."
    )
    world.raise_on_all_ranks(CheckpointError(message) if names else None)
