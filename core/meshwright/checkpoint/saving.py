"""Write one checkpoint: agree on who writes what, copy it, write it, complete it."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim.lr_scheduler import LRScheduler

from .. import __version__
from ..contract import StrategyManager
from ..errors import CheckpointError
from ..mesh import new_group
from ..pieces import Piece, Sharded
from ..state import OptimizerState, ShardedState
from .directory import (
    HUGGING_FACE,
    Manifest,
    StoredFile,
    begin,
    commit,
    digests,
    discard,
)
from .ownership import Rectangle, divide
from .planner import PieceSavePlanner
from .schedule import note_rates
from .values import RANDOM, flat, plain, random_state


class Saving:
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
        if scheduler is not None:
            note_rates(scheduler)
        state = manager.sharded_state()
        if not with_optimizer:
            state = ShardedState(state.model)
        tensors = {**flat(state), f"{RANDOM}{dist.get_rank()}": random_state()}
        self._tensors = _owned(tensors, group)
        groups, values = _merged(state.optimizer, group)
        settings = {
            "groups": groups,
            "values": values,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "extra": dict(extra or {}),
        }
        self._manifest = Manifest(
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
            **self._world.together(lambda: plain(settings)),
        )
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
        except dcp.CheckpointException as caught:
            error = "; ".join(f"rank {rank}: {told(each)}" for rank, (each, _) in caught.failures.items())
        except Exception as caught:
            # A disk fails in as many ways as there are file systems, and a peer that is gone in others.
            error = told(caught)
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


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def own_group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of all ranks, whatever the backend of the world."""
    group = new_group("gloo")
    yield group
    dist.destroy_process_group(group)


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
