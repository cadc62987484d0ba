"""Save one checkpoint: divide the work over ranks, copy the state, write it, and complete the checkpoint.

[Note: agreement] The tensors of a rank's state change when the model or the optimizer changes, not between saves. So
ranks reuse their division of the work, and a save only checks, with an all-reduce of one integer, that no rank's
inventory has changed. The first save, and the first after a change, gathers an inventory of each rank on rank 0, which
divides the work and builds the index.
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
    """What one rank writes.

    Attributes:
        rectangles: rectangles of tensors, in this order.
        params_with_groups: parameters whose membership in optimizer groups it writes.
        params_with_values: parameters whose other optimizer values it writes.
        index_json: the index, on rank 0.
    """

    rectangles: tuple[Rectangle, ...]
    params_with_groups: frozenset[str]
    params_with_values: frozenset[str]
    index_json: bytes | None = None


class SaveInventory(NamedTuple):
    """What one rank has, with the fields of `SavePlan`. `metas`: name, shape and dtype of each tensor."""

    rectangles: tuple[Rectangle, ...]
    metas: tuple[tuple[str, tuple[int, ...], str], ...]
    params_with_groups: tuple[str, ...]
    params_with_values: tuple[str, ...]


class SavePlanner:
    """The last division of the work, see [Note: agreement]; `num_plans` counts divisions, equal on all ranks."""

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
        """Return what this rank writes of its tensors, which are given by their names in the checkpoint. Collective."""
        inventory = build_inventory(tensors, optimizer)
        is_unchanged = torch.tensor([int(inventory == self._inventory)])
        dist.all_reduce(is_unchanged, op=dist.ReduceOp.MIN, group=group)
        if self._plan is None or not is_unchanged.item():
            self._plan, self._inventory = _divide_work(inventory, group), inventory
            self.num_plans += 1
        return self._plan


def build_inventory(tensors: Mapping[str, ChunkedTensor], optimizer: OptimizerState[Any] | None) -> SaveInventory:
    """Return this rank's inventory, which holds only names and numbers."""
    rectangles = (
        Rectangle(name, tuple(chunk.offsets), chunk.sizes, chunk.tensor.element_size())
        for name, sharded in tensors.items()
        for chunk in sharded.chunks
    )
    metas = ((name, tuple(sharded.shape), format_dtype(sharded.dtype)) for name, sharded in tensors.items())
    grouped_names = (name for each in (optimizer.groups if optimizer is not None else ()) for name in each["params"])
    return SaveInventory(
        tuple(rectangles), tuple(metas), tuple(grouped_names), tuple(optimizer.values if optimizer else ())
    )


def _divide_work(inventory: SaveInventory, group: dist.ProcessGroup) -> SavePlan:
    """Divide the work on rank 0 and send each rank its plan. Collective."""
    is_first = dist.get_rank(group) == 0
    inventories: list[Any] = [None] * dist.get_world_size(group)
    dist.gather_object(inventory, inventories if is_first else None, group=group, group_dst=0)
    plans, index = build_save_plans(inventories) if is_first else (None, None)
    received: list[Any] = [None]
    dist.scatter_object_list(received, plans, group=group, group_src=0)
    plan: SavePlan = received[0]
    return plan._replace(index_json=index)


def build_save_plans(inventories: list[SaveInventory]) -> tuple[list[SavePlan], bytes]:
    """Return the plan of each rank, without the index, and the index."""
    owned = assign_owners([inventory.rectangles for inventory in inventories])
    metas = {name: (shape, dtype) for inventory in inventories for name, shape, dtype in inventory.metas}
    group_names = _assign_to_first_rank(inventory.params_with_groups for inventory in inventories)
    value_names = _assign_to_first_rank(inventory.params_with_values for inventory in inventories)
    plans = [
        SavePlan(tuple(rectangles), *names)
        for rectangles, names in zip(owned, zip(group_names, value_names, strict=True), strict=True)
    ]
    return plans, build_index(owned, metas)


def _assign_to_first_rank(named: Iterable[Iterable[str]]) -> list[frozenset[str]]:
    """Return, for each rank, the names that no lower rank has."""
    seen: set[str] = set()
    first = []
    for names in named:
        first.append(frozenset(names) - seen)
        seen |= first[-1]
    return first


def encode_optimizer_settings(optimizer: OptimizerState[Any] | None, plan: SavePlan) -> bytes | None:
    """Return this rank's optimizer settings as JSON; None if it has none to write. Raises CheckpointError."""
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
        tensors: its tensors. Until `copy_to_cpu` they share memory with the state, which training changes.
        other_files: contents of its other files, by name.
        manifest: manifest of the checkpoint, without files.
    """

    tensors: list[Tensor]
    other_files: dict[str, bytes]
    manifest: Manifest

    def copy_to_cpu(self) -> None:
        """Copy the tensors to the CPU so that training can continue."""
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
    """Return what this rank writes of its current state. `planner` is reused by later checkpoints of the run.

    Collective. Raises CheckpointError on all ranks if a value cannot be encoded as JSON.
    """
    world = manager.mesh.world
    if scheduler is not None:
        store_base_rates(scheduler)
    state = manager.sharded_state()
    if not with_optimizer:
        state = replace(state, optimizer=None)
    parts = manager.model_parts
    base, skipped = get_base(parts), find_frozen_base_parameters(parts)
    state.model = {name: each for name, each in state.model.items() if name not in skipped}
    tensors = {**flatten_state(state), f"{RNG_PREFIX}{dist.get_rank()}": get_rng_state()}
    plan = (planner or SavePlanner()).plan(tensors, state.optimizer, group)
    values = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": dict(extra or {})}
    settings, written = world.run_on_all_ranks(
        lambda: (encode_optimizer_settings(state.optimizer, plan), encode_values(values))
    )
    texts = {settings_file_name(world.rank): settings, INDEX_FILE: plan.index_json}
    return CheckpointContent(
        [cut_rectangle(tensors[each.name], each) for each in plan.rectangles],
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
            format=FORMAT if base is None else ADAPTER_FORMAT,
            base=None if base is None else asdict(base.base),
            **written,
        ),
    )


def cut_rectangle(sharded: ChunkedTensor, rectangle: Rectangle) -> Tensor:
    """Return a rectangle as a view of the local chunk that holds it."""
    view = sharded.find_view(rectangle.offsets, rectangle.sizes)
    if view is None:
        raise CheckpointError(f"this rank has not the part of {rectangle.name} that it is to write.")
    return view


class CheckpointSave:
    """The save of one checkpoint by all ranks. `group` has all ranks and a CPU backend."""

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
        """Write and complete the checkpoint. Raises CheckpointError on all ranks after removing it. Collective."""
        prepare_error = run_on_first(self._group, self._writer.prepare)
        if prepare_error is not None:
            raise prepare_error
        problem: str | None = None
        files: dict[str, StoredFile] = {}
        try:
            files = self._write_share()
        except Exception as caught:
            # File systems raise errors of several types.
            problem = format_exception(caught)
        is_first = self._world.rank == 0
        results: list[Any] = [None] * self._world.size
        dist.gather_object((problem, files), results if is_first else None, group=self._group, group_dst=0)
        error = run_on_first(self._group, partial(self._commit, results))
        if error is not None:
            if is_first:
                self._writer.discard()
            raise CheckpointWriteError(f"the checkpoint {self._storage} could not be written: {error}")

    def _write_share(self) -> dict[str, StoredFile]:
        texts = dict(self._content.other_files)
        if self._world.rank == 0:
            texts |= self._build_hugging_face_files()
        tensors_file = tensors_file_name(self._world.rank)
        files = {tensors_file: write_tensors(self._writer, tensors_file, self._content.tensors)}
        return files | {name: self._writer.write_file(name, partial(list, [text])) for name, text in texts.items()}

    def _build_hugging_face_files(self) -> dict[str, bytes]:
        """Let Hugging Face classes write their files to a temporary directory, and read them."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as temporary:
            directory = Path(temporary)
            save_model_code(self._model, directory)
            for each in (getattr(self._model, "config", None), self._tokenizer):
                if each is not None:
                    each.save_pretrained(directory)
            for name, config in get_adapter_configs(self._model).items():
                config.save_pretrained(directory / get_adapter_subfolder(name))
            paths = sorted(path for path in directory.rglob("*") if path.is_file())
            files = {path.relative_to(temporary).as_posix(): path.read_bytes() for path in paths}
        if self._content.manifest.base is None:
            files |= drop_replaced_files(get_extra_files(self._model), files)
            generation = getattr(self._model, "generation_config", None)
            if generation is not None:
                files[GENERATION_CONFIG] = format_generation_config(generation)
        return {f"{HUGGING_FACE_FOLDER}/{name}": content for name, content in files.items()}

    def _commit(self, found: list[tuple[str | None, dict[str, StoredFile]]]) -> None:
        failures = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(found) if problem is not None]
        if failures:
            raise CheckpointWriteError("; ".join(failures[:5]))
        files_by_name = {name: stored for _, files in found for name, stored in files.items()}
        self._writer.commit(replace(self._content.manifest, files=files_by_name))


def run_on_first(group: dist.ProcessGroup, work: Callable[[], None]) -> CheckpointError | None:
    """Call `work` on the first rank of a group and return its error on all ranks. Collective."""
    result: list[CheckpointError | None] = [None]
    if dist.get_rank(group) == 0:
        try:
            work()
        except CheckpointError as error:
            result[0] = error
        except OSError as error:
            result[0] = CheckpointWriteError(str(error))
    dist.broadcast_object_list(result, group=group, group_src=0)
    return result[0]


def format_exception(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def temporary_group() -> Iterator[dist.ProcessGroup]:
    """Create a gloo group of all ranks for the duration of the context."""
    group = new_group("gloo")
    yield group
    dist.destroy_process_group(group)
