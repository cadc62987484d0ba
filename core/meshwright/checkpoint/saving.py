"""Write one checkpoint: divide the work between ranks, copy the state, write it, complete the checkpoint.

[Note: agreement] What a rank has of the state changes with the model and the optimizer, not between saves. So ranks
remember how they divided the work, and a save only asks, by one integer, whether all ranks still have the same. The
first save, and one after a change, gathers an inventory of each rank to the first one, which divides the work and makes
the index.
"""

from __future__ import annotations

import contextlib
import json
import platform
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .._compat.transformers import save_model_code
from ..base.errors import CheckpointError, CheckpointWriteError
from ..base.version import __version__
from ..mesh.world import new_group
from ..model.adapter import find_frozen_base_parameters, get_adapter_configs, get_adapter_subfolder, get_base
from ..model.model_files import GENERATION_CONFIG, drop_replaced_files, format_generation_config, get_extra_files
from ..strategy.contract import StrategyManager
from ..tensors.chunks import ChunkedTensor, Rectangle, assign_owners
from ..tensors.state import OptimizerState
from .index import INDEX_FILE, build_index, format_dtype, tensors_file_name, write_tensors
from .lifecycle import HUGGING_FACE_FOLDER, create_writer
from .manifest import ADAPTER_FORMAT, FORMAT, Manifest, StoredFile
from .storage import Storage
from .training_state import (
    RNG_PREFIX,
    encode_values,
    flatten_state,
    get_rng_state,
    settings_file_name,
    store_base_rates,
)


class SavePlan(NamedTuple):
    """What one rank writes: rectangles, in this order, groups and values of these parameters, the index if it is first.

    `grouped` and `valued` name the parameters whose optimizer groups and values it writes.
    """

    rectangles: tuple[Rectangle, ...]
    params_with_groups: frozenset[str]
    params_with_values: frozenset[str]
    index_json: bytes | None = None


class SaveInventory(NamedTuple):
    """What one rank has, in the terms of `Share`; `kinds` are name, shape and dtype of each tensor."""

    rectangles: tuple[Rectangle, ...]
    metas: tuple[tuple[str, tuple[int, ...], str], ...]
    params_with_groups: tuple[str, ...]
    params_with_values: tuple[str, ...]


class SavePlanner:
    """The last division of the work, see [Note: agreement]; `times` is how often it was divided, equal on all ranks."""

    def __init__(self) -> None:
        self.num_plans = 0
        self._inventory: SaveInventory | None = None
        self._plan: SavePlan | None = None

    def plan(
        self,
        tensors: Mapping[str, ChunkedTensor],
        optimizer: OptimizerState[ChunkedTensor] | None,
        group: dist.ProcessGroup,
    ) -> SavePlan:
        """Return what this rank writes of its tensors, by their names in the checkpoint. Collective."""
        held = build_inventory(tensors, optimizer)
        same = torch.tensor([int(held == self._inventory)])
        dist.all_reduce(same, op=dist.ReduceOp.MIN, group=group)
        if self._plan is None or not same.item():
            self._plan, self._inventory = _divide_work(held, group), held
            self.num_plans += 1
        return self._plan


def build_inventory(tensors: Mapping[str, ChunkedTensor], optimizer: OptimizerState[Any] | None) -> SaveInventory:
    """Return this rank's inventory, which holds names and numbers alone."""
    rectangles = (
        Rectangle(name, tuple(piece.offsets), piece.sizes, piece.tensor.element_size())
        for name, sharded in tensors.items()
        for piece in sharded.chunks
    )
    kinds = ((name, tuple(sharded.shape), format_dtype(sharded.dtype)) for name, sharded in tensors.items())
    grouped = (name for each in (optimizer.groups if optimizer is not None else ()) for name in each["params"])
    return SaveInventory(tuple(rectangles), tuple(kinds), tuple(grouped), tuple(optimizer.values if optimizer else ()))


def _divide_work(inventory: SaveInventory, group: dist.ProcessGroup) -> SavePlan:
    """Divide the work on the first rank, and send each rank its share. Collective."""
    is_first = dist.get_rank(group) == 0
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(inventory, found if is_first else None, group=group, group_dst=0)
    shares, index = build_save_plans(found) if is_first else (None, None)
    box: list[Any] = [None]
    dist.scatter_object_list(box, shares, group=group, group_src=0)
    share: SavePlan = box[0]
    return share._replace(index_json=index)


def build_save_plans(inventories: list[SaveInventory]) -> tuple[list[SavePlan], bytes]:
    """Return each rank's share, without the index; and the index."""
    owned = assign_owners([held.rectangles for held in inventories])
    kinds = {name: (shape, dtype) for held in inventories for name, shape, dtype in held.metas}
    grouped = _assign_to_first_rank(held.params_with_groups for held in inventories)
    valued = _assign_to_first_rank(held.params_with_values for held in inventories)
    shares = [
        SavePlan(tuple(rows), *names) for rows, names in zip(owned, zip(grouped, valued, strict=True), strict=True)
    ]
    return shares, build_index(owned, kinds)


def _assign_to_first_rank(named: Iterable[Iterable[str]]) -> list[frozenset[str]]:
    """Return, for each rank, the names that no rank before it has."""
    seen: set[str] = set()
    first = []
    for names in named:
        first.append(frozenset(names) - seen)
        seen |= first[-1]
    return first


def encode_optimizer_settings(optimizer: OptimizerState[Any] | None, plan: SavePlan) -> bytes | None:
    """Return what this rank writes of the optimizer besides tensors; None if nothing. Raises CheckpointError."""
    if optimizer is None:
        return None
    groups = [
        {**each, "params": [name for name in each["params"] if name in plan.params_with_groups]}
        for each in optimizer.groups
    ]
    content = {
        "groups": [each for each in groups if each["params"]],
        "values": {name: each for name, each in optimizer.values.items() if name in plan.params_with_values},
    }
    return json.dumps(encode_values(content)).encode() if any(content.values()) else None


@dataclass
class CheckpointContent:
    """What one rank writes of a checkpoint.

    Attributes:
        tensors: its part of the state. They are the state itself, which training changes.
        other_files: its other files, by name.
        manifest: of the whole checkpoint, without files.
    """

    tensors: list[Tensor]
    other_files: dict[str, bytes]
    manifest: Manifest

    def copy_to_cpu(self) -> None:
        """Copy the tensors to the CPU, so that training can continue."""
        self.tensors = [each.to("cpu", copy=True, memory_format=torch.contiguous_format) for each in self.tensors]


def collect_content(
    manager: StrategyManager,
    group: dist.ProcessGroup,
    *,
    step: int,
    scheduler: LRScheduler | None,
    extra: Mapping[str, Any] | None,
    with_optimizer: bool = True,
    planner: SavePlanner | None = None,
) -> CheckpointContent:
    """Return what this rank writes of its state as it is now; `planner` is of the run's earlier checkpoints.

    Collective. Raises CheckpointError, on all ranks, if a value cannot be written as JSON.
    """
    world = manager.mesh.world
    if scheduler is not None:
        store_base_rates(scheduler)
    state = manager.sharded_state()
    if not with_optimizer:
        state = replace(state, optimizer=None)
    parts = manager.model_parts
    known, skipped = get_base(parts), find_frozen_base_parameters(parts)
    state.model = {name: each for name, each in state.model.items() if name not in skipped}
    tensors = {**flatten_state(state), f"{RNG_PREFIX}{dist.get_rank()}": get_rng_state()}
    share = (planner or SavePlanner()).plan(tensors, state.optimizer, group)
    values = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": dict(extra or {})}
    settings, written = world.run_on_all_ranks(
        lambda: (encode_optimizer_settings(state.optimizer, share), encode_values(values))
    )
    texts = {settings_file_name(world.rank): settings, INDEX_FILE: share.index_json}
    return CheckpointContent(
        [cut_rectangle(tensors[each.name], each) for each in share.rectangles],
        {name: text for name, text in texts.items() if text is not None},
        Manifest(
            step=step,
            strategy=manager.strategy,
            mesh=asdict(manager.mesh.degrees),
            world_size=world.size,
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "meshwright": __version__,
            },
            has_optimizer=state.optimizer is not None,
            format=FORMAT if known is None else ADAPTER_FORMAT,
            base=None if known is None else asdict(known.base),
            **written,
        ),
    )


def cut_rectangle(sharded: ChunkedTensor, rectangle: Rectangle) -> Tensor:
    """Return a rectangle as a view of the piece that holds it."""
    found = sharded.find_view(rectangle.offsets, rectangle.sizes)
    if found is None:
        raise CheckpointError(f"this rank has not the part of {rectangle.name} that it is to write.")
    return found


class CheckpointSave:
    """One checkpoint to be written at a place by a group of all ranks, with a backend for the CPU."""

    def __init__(
        self,
        manager: StrategyManager,
        storage: Storage,
        group: dist.ProcessGroup,
        content: CheckpointContent,
        tokenizer: Any,
    ) -> None:
        self._storage, self._group, self._content = storage, group, content
        self._world = manager.mesh.world
        self._writer = create_writer(storage)
        self._model, self._tokenizer = manager.model_parts[0], tokenizer

    def write(self) -> None:
        """Write and complete the checkpoint, or remove it and raise CheckpointError on all ranks. Collective."""
        refused = run_on_first(self._group, self._writer.prepare)
        if refused is not None:
            raise refused
        problem: str | None = None
        files: dict[str, StoredFile] = {}
        try:
            files = self._write_share()
        except Exception as caught:
            # File systems raise errors of many kinds.
            problem = format_exception(caught)
        is_first = self._world.rank == 0
        found: list[Any] = [None] * self._world.size
        dist.gather_object((problem, files), found if is_first else None, group=self._group, group_dst=0)
        error = run_on_first(self._group, partial(self._commit, found))
        if error is not None:
            if is_first:
                self._writer.discard()
            raise CheckpointWriteError(f"the checkpoint {self._storage} could not be written: {error}")

    def _write_share(self) -> dict[str, StoredFile]:
        texts = dict(self._content.other_files)
        if self._world.rank == 0:
            texts |= self._build_hugging_face_files()
        payload = tensors_file_name(self._world.rank)
        files = {payload: write_tensors(self._writer, payload, self._content.tensors)}
        return files | {name: self._writer.write_file(name, partial(list, [text])) for name, text in texts.items()}

    def _build_hugging_face_files(self) -> dict[str, bytes]:
        """Have Hugging Face's classes write their files into a temporary directory, and read them."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as made:
            directory = Path(made)
            save_model_code(self._model, directory)
            for each in (getattr(self._model, "config", None), self._tokenizer):
                if each is not None:
                    each.save_pretrained(directory)
            for name, config in get_adapter_configs(self._model).items():
                config.save_pretrained(directory / get_adapter_subfolder(name))
            paths = sorted(path for path in directory.rglob("*") if path.is_file())
            found = {path.relative_to(made).as_posix(): path.read_bytes() for path in paths}
        if self._content.manifest.base is None:
            found |= drop_replaced_files(get_extra_files(self._model), found)
            generation = getattr(self._model, "generation_config", None)
            if generation is not None:
                found[GENERATION_CONFIG] = format_generation_config(generation)
        return {f"{HUGGING_FACE_FOLDER}/{name}": content for name, content in found.items()}

    def _commit(self, found: list[tuple[str | None, dict[str, StoredFile]]]) -> None:
        failures = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(found) if problem is not None]
        if failures:
            raise CheckpointWriteError("; ".join(failures[:5]))
        every = {name: stored for _, files in found for name, stored in files.items()}
        self._writer.commit(replace(self._content.manifest, files=every))


def run_on_first(group: dist.ProcessGroup, work: Callable[[], None]) -> CheckpointError | None:
    """Call `work` on the first rank of a group, and return its error on all ranks. Collective."""
    box: list[CheckpointError | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            work()
        except CheckpointError as error:
            box[0] = error
        except OSError as error:
            box[0] = CheckpointWriteError(str(error))
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def format_exception(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def temporary_group() -> Iterator[dist.ProcessGroup]:
    """Create a gloo group of all ranks for the time of the context."""
    group = new_group("gloo")
    yield group
    dist.destroy_process_group(group)
