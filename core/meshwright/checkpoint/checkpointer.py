"""Save and load model and optimizer, under any strategy and mesh, from any other.

[Note: asynchronous saving] `Checkpointer.save` returns when this rank's part is copied; a thread writes it, with a
process group of its own, while training goes on. The next `save`, and `close`, wait for it and tell what went wrong.
"""

from __future__ import annotations

import contextlib
import json
import platform
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, TensorStorageMetadata
from torch.optim.lr_scheduler import LRScheduler

from .. import __version__
from ..contract import StrategyManager
from ..errors import CheckpointError
from ..mesh import World
from ..pieces import Piece, Sharded
from ..state import OptimizerState, ShardedState, TensorKind
from .directory import (
    HUGGING_FACE,
    Manifest,
    StoredFile,
    begin,
    commit,
    digests,
    discard,
    read_manifest,
    remove_leftovers,
    retain,
    step_directory,
    steps_in,
    verify,
)
from .ownership import Rectangle, divide
from .planner import PieceLoadPlanner, PieceSavePlanner

MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
OnError = Literal["stop", "continue"]


def save_checkpoint(
    manager: StrategyManager,
    directory: str | Path,
    *,
    step: int,
    scheduler: LRScheduler | None = None,
    tokenizer: Any = None,
    extra: Mapping[str, Any] | None = None,
    with_optimizer: bool = True,
) -> None:
    """Write a checkpoint, all ranks together. It appears under its name when it is complete, and not before.

    Args:
        manager: whose model, and optimizer if it has one, are saved, with the random generators of all ranks.
        directory: of the checkpoint; one that is there is replaced.
        step: optimizer steps done.
        scheduler: of the learning rate.
        tokenizer: of Hugging Face, to be exported with the model.
        extra: further values of JSON, the same on all ranks.
        with_optimizer: False leaves the optimizer out.

    Raises:
        CheckpointError: it could not be written (on all ranks); nothing has changed then.
    """
    with _own_group() as group:
        _Saving(
            manager,
            Path(directory),
            group,
            step=step,
            scheduler=scheduler,
            tokenizer=tokenizer,
            extra=extra,
            with_optimizer=with_optimizer,
        ).write()


def load_checkpoint(
    manager: StrategyManager, directory: str | Path, *, scheduler: LRScheduler | None = None
) -> Manifest:
    """Load a checkpoint that any strategy on any mesh has saved, all ranks together.

    The optimizer's state is loaded if the manager has an optimizer, the random generators' if the mesh is the same.

    Args:
        manager: with its model; in place.
        directory: of the checkpoint.
        scheduler: of the learning rate; in place.

    Returns:
        What the checkpoint tells about itself.

    Raises:
        CheckpointError: it is not whole, or not of this model; on all ranks, before anything is changed.
        StrategyError: the optimizer is another; the same.
    """
    directory, world = Path(directory), manager.mesh.world
    manifest = world.together(lambda: checked(directory, world))
    reader = FileSystemReader(directory)
    stored = {
        name: (each.size, each.properties.dtype)
        for name, each in reader.read_metadata().state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    has_optimizer = manager.sharded_state().optimizer is not None
    saved = world.together(lambda: _saved_optimizer(directory, manifest, stored) if has_optimizer else None)
    if scheduler is not None and manifest.scheduler is None:
        raise CheckpointError(f"the checkpoint {directory} has no learning-rate schedule. Load it without scheduler.")
    with _own_group() as group:
        with manager.loading(saved) as target:
            tensors = _flat(target)
            _check_model(directory, tensors, stored, world)
            same_mesh = manifest.mesh == asdict(manager.mesh.degrees)
            random = _random_to_load(stored, dist.get_rank()) if same_mesh else {}
            dcp.load({**tensors, **random}, storage_reader=reader, planner=PieceLoadPlanner(), process_group=group)
        for sharded in random.values():
            _set_random_state(sharded.pieces[0].tensor)
    if scheduler is not None and manifest.scheduler is not None:
        scheduler.load_state_dict(manifest.scheduler)
    return manifest


def newest_checkpoint(root: str | Path, world: World) -> Path | None:
    """The newest whole checkpoint in a directory of them; tells which newer ones are not whole. Collective."""
    for _, path in steps_in(Path(root)) if world.rank == 0 else ():
        try:
            read_manifest(path)
        except CheckpointError as error:
            warnings.warn(f"{error} An older one is tried.", stacklevel=2)
    for path in world_agreed([str(path) for _, path in steps_in(Path(root))], world):
        try:
            world.together(lambda path=path: checked(Path(path), world))  # type: ignore[misc]
        except CheckpointError:
            continue
        return Path(path)
    return None


def world_agreed(value: Any, world: World) -> Any:
    """What the first rank has. Collective."""
    box = [value]
    dist.broadcast_object_list(box, group=world.group, group_src=0)
    return box[0]


def checked(directory: Path, world: World) -> Manifest:
    """The manifest of a checkpoint whose files are what they were; each rank checks a part of them.

    Raises:
        CheckpointError: it is not whole.
    """
    manifest = read_manifest(directory)
    verify(directory, manifest, list(manifest.files)[world.rank :: world.size])
    return manifest


class Checkpointer:
    """Saves checkpoints of a run while it goes on; see [Note: asynchronous saving]. A context manager.

    All ranks call its methods together.

    Args:
        manager: whose state is saved.
        root: directory of the checkpoints, which are named by their steps.
        keep_last: how many to keep; None keeps all.
        keep_every: those of steps that are multiples of it are kept, too.
        asynchronous: whether training goes on while one is written.
        on_error: whether a checkpoint that cannot be written ends the training, or is told in a warning. Either way
            those that were there are.
        tokenizer: of Hugging Face, to be exported with the model.
    """

    def __init__(
        self,
        manager: StrategyManager,
        root: str | Path,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = True,
        on_error: OnError = "stop",
        tokenizer: Any = None,
    ) -> None:
        self._manager = manager
        self._root = Path(root)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._asynchronous = asynchronous
        self._on_error = on_error
        self._tokenizer = tokenizer
        self._group = dist.new_group(backend="gloo")
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        if manager.mesh.rank == 0:
            remove_leftovers(self._root)

    def save(self, step: int, *, scheduler: LRScheduler | None = None, extra: Mapping[str, Any] | None = None) -> None:
        """Save the state after `step` steps; see `save_checkpoint`. Collective.

        Raises:
            CheckpointError: this one, or the one before it, could not be written and `on_error` is "stop".
        """
        self.wait()
        directory = step_directory(self._root, step)
        try:
            saving = _Saving(
                self._manager,
                directory,
                self._group,
                step=step,
                scheduler=scheduler,
                tokenizer=self._tokenizer,
                extra=extra,
            )
        except CheckpointError as error:
            self._tell(error)
            return
        if not self._asynchronous:
            self._write(saving)
            self.wait()
            return
        saving.detach()
        self._thread = threading.Thread(target=self._write, args=(saving,), name="meshwright-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Collective.

        Raises:
            CheckpointError: as of `save`.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._tell(error)

    def close(self) -> None:
        """Wait, and end the process group. Collective."""
        try:
            self.wait()
        finally:
            dist.destroy_process_group(self._group)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error the peers may never reach this point.
        if error_type is None:
            self.close()

    def _write(self, saving: _Saving) -> None:
        try:
            saving.write()
            if self._manager.mesh.rank == 0:
                retain(self._root, keep_last=self._keep_last, keep_every=self._keep_every)
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            # A peer that is gone, or a disk that does not let go of old checkpoints.
            self._error = CheckpointError(f"a checkpoint failed: {type(error).__name__}: {error}")

    def _tell(self, error: CheckpointError) -> None:
        if self._on_error == "stop":
            raise error
        if self._manager.mesh.rank == 0:
            warnings.warn(f"{error} Training goes on (checkpoint.on_error=continue).", stacklevel=3)


class _Saving:
    """One checkpoint to be written: who writes what is agreed on when it is made. Collective.

    Raises:
        CheckpointError: the directory cannot be made, or a value is none of JSON; on all ranks.
    """

    def __init__(
        self,
        manager: StrategyManager,
        directory: Path,
        group: dist.ProcessGroup,
        *,
        step: int,
        scheduler: LRScheduler | None,
        tokenizer: Any,
        extra: Mapping[str, Any] | None,
        with_optimizer: bool = True,
    ) -> None:
        self._final = directory
        self._group = group
        self._world = manager.mesh.world
        state = manager.sharded_state()
        if not with_optimizer:
            state = ShardedState(state.model)
        tensors = {**_flat(state), f"{RANDOM}{dist.get_rank()}": _random_state()}
        self._tensors = _owned(tensors, group)
        groups, values = _merged(state.optimizer, group)
        manifest = Manifest(
            step=step,
            strategy=manager.strategy,
            mesh=asdict(manager.mesh.degrees),
            world_size=self._world.size,
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "meshwright": __version__,
            },
            groups=groups,
            values=values,
            scheduler=None if scheduler is None else scheduler.state_dict(),
            extra=dict(extra or {}),
        )
        self._manifest = self._world.together(lambda: _plain(manifest))
        self._writing = directory.with_name(f"{directory.name}.writing")
        config = getattr(manager.model_parts[0], "config", None)
        self._world.together(lambda: self._begin(config, tokenizer))

    def _begin(self, config: Any, tokenizer: Any) -> None:
        if self._world.rank != 0:
            return
        begin(self._final)
        try:
            for each in (config, tokenizer):
                if each is not None:
                    each.save_pretrained(self._writing / HUGGING_FACE)
        except OSError as error:
            raise CheckpointError(f"the checkpoint {self._final} cannot be written: {error}.") from error

    def detach(self) -> None:
        """Copy what this rank writes, so that training can go on."""
        self._tensors = {
            name: replace(sharded, pieces=tuple(_copied(piece) for piece in sharded.pieces))
            for name, sharded in self._tensors.items()
        }

    def write(self) -> None:
        """Write and complete the checkpoint. Collective.

        Raises:
            CheckpointError: on all ranks; what there is of it is removed.
        """
        error: str | None = None
        files: dict[str, StoredFile] = {}
        try:
            writer = FileSystemWriter(self._writing)
            dcp.save(self._tensors, storage_writer=writer, planner=PieceSavePlanner(), process_group=self._group)
            mine = [path.name for path in self._writing.iterdir() if path.name.startswith(f"__{dist.get_rank()}_")]
            if self._world.rank == 0:
                mine += [".metadata", *(str(p.relative_to(self._writing)) for p in self._writing.glob("*/*"))]
            files = digests(self._writing, sorted(mine))
        except Exception as caught:
            # torch tells what failed, on whatever rank, in exceptions of its own.
            error = f"{type(caught).__name__}: {caught}".strip()
        error = self._agreed(error, files)
        if error is not None:
            if self._world.rank == 0:
                discard(self._writing)
            raise CheckpointError(f"the checkpoint {self._final} could not be written: {error}")

    def _agreed(self, error: str | None, files: dict[str, StoredFile]) -> str | None:
        """Let the first rank complete the checkpoint if all ranks have written theirs; what went wrong otherwise."""
        found: list[Any] = [None] * self._world.size
        first = self._world.rank == 0
        dist.gather_object((error, files), found if first else None, group=self._group, group_dst=0)
        box: list[Any] = [None]
        if first:
            box[0] = next((each for each, _ in found if each is not None), None)
            if box[0] is None:
                every = {name: stored for _, each in found for name, stored in each.items()}
                try:
                    commit(self._writing, self._final, replace(self._manifest, files=every))
                except OSError as caught:
                    box[0] = str(caught)
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        result: str | None = box[0]
        return result


@contextlib.contextmanager
def _own_group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of all ranks, whatever the backend of the world."""
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


def _flat(state: ShardedState) -> dict[str, Sharded]:
    tensors = {f"{MODEL}{name}": sharded for name, sharded in state.model.items()}
    for name, values in (state.optimizer.tensors if state.optimizer is not None else {}).items():
        tensors.update({f"{OPTIMIZER}{name}.{key}": sharded for key, sharded in values.items()})
    return tensors


def _owned(tensors: Mapping[str, Sharded], group: dist.ProcessGroup) -> dict[str, Sharded]:
    """What this rank writes of what it has; see `ownership.divide`. Collective."""
    held = [
        Rectangle(name, piece.offsets, piece.sizes, piece.tensor.element_size())
        for name, sharded in tensors.items()
        for piece in sharded.pieces
    ]
    size, is_first = dist.get_world_size(group), dist.get_rank(group) == 0
    found: list[Any] = [None] * size
    dist.gather_object(held, found if is_first else None, group=group, group_dst=0)
    box: list[Any] = [None]
    dist.scatter_object_list(box, divide(found) if is_first else None, group=group, group_src=0)
    pieces: dict[str, list[Piece]] = {}
    for rectangle in box[0]:
        pieces.setdefault(rectangle.name, []).append(_cut(tensors[rectangle.name], rectangle))
    return {name: replace(tensors[name], pieces=tuple(each)) for name, each in pieces.items()}


def _cut(sharded: Sharded, rectangle: Rectangle) -> Piece:
    """The piece that holds a rectangle, narrowed to it."""
    for piece in sharded.pieces:
        starts = [a - b for a, b in zip(rectangle.offsets, piece.offsets, strict=True)]
        ends = [start + size for start, size in zip(starts, rectangle.sizes, strict=True)]
        if all(start >= 0 for start in starts) and all(e <= s for e, s in zip(ends, piece.sizes, strict=True)):
            part = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
            return Piece(rectangle.offsets, piece.tensor[part])
    raise CheckpointError(f"this rank has not the part of {rectangle.name} that it is to write.")


def _copied(piece: Piece) -> Piece:
    return replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format))


def _merged(
    optimizer: OptimizerState[Sharded] | None, group: dist.ProcessGroup
) -> tuple[list[dict[str, Any]] | None, dict[str, dict[str, Any]] | None]:
    """Groups and values of all ranks, on the first one; groups of equal settings are one. Collective."""
    mine = None if optimizer is None else (optimizer.groups, optimizer.values)
    is_first = dist.get_rank(group) == 0
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(mine, found if is_first else None, group=group, group_dst=0)
    states = [each for each in found if each is not None]
    if not is_first or not states:
        return None, None
    groups: dict[str, dict[str, Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for some_groups, some_values in states:
        values.update(some_values)
        for each in some_groups:
            settings = {key: value for key, value in each.items() if key != "params"}
            merged = groups.setdefault(repr(sorted(settings.items())), {**settings, "params": []})
            known = set(merged["params"])
            merged["params"] += [name for name in each["params"] if name not in known]
    return list(groups.values()), values


def _saved_optimizer(
    directory: Path, manifest: Manifest, stored: Mapping[str, TensorKind]
) -> OptimizerState[TensorKind]:
    if manifest.groups is None or manifest.values is None:
        raise CheckpointError(
            f"the checkpoint {directory} holds a model without an optimizer. Load it before build_optimizer."
        )
    tensors: dict[str, dict[str, TensorKind]] = {}
    for full, kind in stored.items():
        if full.startswith(OPTIMIZER):
            name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
            tensors.setdefault(name, {})[key] = kind
    return OptimizerState(tensors, _decoded(manifest.values), _decoded(manifest.groups))


def _check_model(
    directory: Path, tensors: Mapping[str, Sharded], stored: Mapping[str, TensorKind], world: World
) -> None:
    """Raise on all ranks where the checkpoint is not of this model."""
    error: str | None = None
    for name, sharded in tensors.items():
        if name not in stored:
            error = f"it lacks {name.partition('.')[2]}"
        elif stored[name][0] != sharded.shape:
            error = (
                f"{name.partition('.')[2]} has shape {tuple(stored[name][0])} in it, but {tuple(sharded.shape)} in the "
                f"model"
            )
    names = [name for name in stored if name.startswith(MODEL)]
    known = world.reduce_ints([int(name in tensors) for name in names], dist.ReduceOp.MAX)
    unknown = [name.removeprefix(MODEL) for name, is_known in zip(names, known, strict=True) if not is_known]
    if unknown:
        error = f"it holds {', '.join(unknown[:3])}{' and more' if unknown[3:] else ''}, which the model has not"
    message = f"the checkpoint {directory} is not of this model: {error}. Build the model that it was saved from."
    world.raise_together(None if error is None else CheckpointError(message))


# -- random generators


def _random_state() -> Sharded:
    """The state of this rank's generators: the CPU's, and its accelerator's behind it."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state().cpu())
    state = torch.cat(states)
    return Sharded(state.shape, state.dtype, (Piece((0,), state),))


def _random_to_load(stored: Mapping[str, TensorKind], rank: int) -> dict[str, Sharded]:
    name = f"{RANDOM}{rank}"
    expected = _random_state()
    if name not in stored or stored[name][0] != expected.shape:
        # Saved on another kind of device.
        return {}
    return {name: expected}


def _set_random_state(state: Tensor) -> None:
    count = torch.get_rng_state().numel()
    torch.set_rng_state(state[:count].clone())
    if state.numel() > count:
        torch.get_device_module().set_rng_state(state[count:].clone())


# -- values of JSON


def _plain(manifest: Manifest) -> Manifest:
    encoded = replace(
        manifest,
        groups=_encoded(manifest.groups),
        values=_encoded(manifest.values),
        scheduler=_encoded(manifest.scheduler),
        extra=_encoded(manifest.extra),
    )
    try:
        json.dumps(asdict(encoded))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"a setting of the optimizer, the schedule or `extra` cannot be written to a checkpoint: {error}. Use "
            f"numbers, strings, lists and mappings of them."
        ) from None
    return encoded


def _encoded(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return {"$tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {key: _encoded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(each) for each in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "$tensor" in value:
            return torch.tensor(value["$tensor"], dtype=getattr(torch, value["dtype"]))
        return {key: _decoded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    return value
