"""Checkpoints of a trainer: meshwright's, readable under any layout, inside Trainer's directories, and the model."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from meshwright.plugin import (
    CheckpointError,
    StrategyManager,
    World,
    export_checkpoint,
    find_first_valid,
    load_checkpoint,
    save_checkpoint,
    warn,
)

MESH_DIRECTORY = "mesh"
"""Name of meshwright's checkpoint in a directory of Trainer."""
TRAINER_STATE = "trainer_state.json"
_WRITING = ".model.writing"


def save_trainer_checkpoint(
    manager: StrategyManager,
    directory: Path,
    *,
    step: int,
    scheduler: LRScheduler | None,
    tokenizer: Any,
    with_state: bool,
) -> None:
    """Write a model as `save_pretrained` does and, `with_state`, a checkpoint in a subdirectory. Collective."""
    world, inner = manager.mesh.world, directory / MESH_DIRECTORY
    if world.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(directory / _WRITING, ignore_errors=True)
    checkpoint = inner if with_state else directory / f"{_WRITING}.{MESH_DIRECTORY}"
    save_checkpoint(
        manager,
        checkpoint,
        step=step,
        scheduler=scheduler if with_state else None,
        tokenizer=tokenizer,
        extra={"generators": _get_library_rng_state()} if with_state else None,
        with_optimizer=with_state,
    )
    export_checkpoint(checkpoint, directory / _WRITING, world=world)
    if world.rank == 0:
        for each in sorted((directory / _WRITING).iterdir()):
            target = directory / each.name
            if each.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            each.replace(target)
        (directory / _WRITING).rmdir()
        if not with_state:
            shutil.rmtree(checkpoint)
    world.reduce_ints([0])


def check_checkpoint_directory(directory: Path) -> None:
    if not (directory / TRAINER_STATE).is_file():
        raise CheckpointError(
            f"resume_from_checkpoint={str(directory)!r} is not a checkpoint of a trainer: it has no {TRAINER_STATE}. "
            f"Pass a directory such as output_dir/checkpoint-50, or True for the newest valid one."
        )


def load_trainer_checkpoint(manager: StrategyManager, directory: Path, scheduler: LRScheduler | None) -> None:
    """Load a checkpoint that `save_trainer_checkpoint` wrote with state, under any layout. Collective."""
    inner = directory / MESH_DIRECTORY
    if not inner.is_dir():
        raise CheckpointError(
            f"{directory} has no checkpoint of meshwright (a directory {MESH_DIRECTORY!r}): it was written by a "
            f"trainer without a mesh, or with save_only_model. Start from its weights: model={str(directory)!r}, "
            "without resume_from_checkpoint."
        )
    manifest = load_checkpoint(manager, inner, scheduler=scheduler)
    _set_library_rng_state((manifest.extra or {}).get("generators"))


def find_newest_checkpoint(world: World, root: Path) -> Path | None:
    """Return a trainer's newest valid checkpoint that has Trainer's state. Warn of newer invalid ones. Collective."""

    def candidates() -> list[Path]:
        numbered = [(each.name.rpartition("-")[2], each) for each in root.glob("checkpoint-*")]
        found = sorted(((int(number), each) for number, each in numbered if number.isdecimal()), reverse=True)
        return [each for _, each in found if (each / MESH_DIRECTORY).is_dir() and (each / TRAINER_STATE).is_file()]

    paths = world.run_on_first_rank(candidates)
    newest, incomplete = find_first_valid([path / MESH_DIRECTORY for path in paths], world)
    for text in incomplete if world.rank == 0 else ():
        warn(f"{text} An older one is tried.", stacklevel=3)
    return None if newest is None else newest.parent


class RngState:
    """Random states of this rank: Python's, NumPy's, torch's and the accelerator's."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.get_rng_state()
        self._device = torch.get_device_module().get_rng_state() if torch.accelerator.is_available() else None

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._device is not None:
            torch.get_device_module().set_rng_state(self._device)


def _get_library_rng_state() -> dict[str, Any]:
    """Return Python's and NumPy's random states as JSON values. Trainer seeds all ranks equally, so one's suffice."""
    version, state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(state), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
    }


def _set_library_rng_state(saved: Any) -> None:
    if saved:
        version, state, gauss = saved["python"]
        random.setstate((version, tuple(state), gauss))
        kind, keys, position, has_gauss, cached = saved["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
