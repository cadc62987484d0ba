"""Write one checkpoint: divide the work between ranks, copy the state, write it, complete the checkpoint."""

from __future__ import annotations

import contextlib
import platform
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from .._compat.transformers import save_code
from ..base.errors import CheckpointError, CheckpointWriteError
from ..base.version import __version__
from ..mesh.world import new_group
from ..model.adapter import adapter_configs, adapter_folder, base_of, left_out
from ..model.model_files import GENERATION_CONFIG, generation_json, kept_files, without_replaced
from ..strategy.contract import StrategyManager
from ..tensors.ownership import Rectangle
from ..tensors.pieces import Sharded
from .agreement import Agreement
from .directory import HUGGING_FACE
from .drafts import draft_of
from .index import INDEX, payload_name
from .manifest import FORMAT, OF_ADAPTERS, Manifest, StoredFile
from .payload import write_tensors
from .places import Folder
from .schedule import note_rates
from .values import RANDOM, flat, plain, random_state, settings_name, settings_of


@dataclass
class Content:
    """What one rank writes of a checkpoint.

    Attributes:
        tensors: its part of the state. They are the state itself, which training changes.
        texts: its other files, by name.
        manifest: of the whole checkpoint, without files.
    """

    tensors: list[Tensor]
    texts: dict[str, bytes]
    manifest: Manifest

    def detach(self) -> None:
        """Copy the tensors to the CPU, so that training can continue."""
        self.tensors = [each.to("cpu", copy=True, memory_format=torch.contiguous_format) for each in self.tensors]


def content_of(
    manager: StrategyManager,
    group: dist.ProcessGroup,
    *,
    step: int,
    scheduler: LRScheduler | None,
    extra: Mapping[str, Any] | None,
    with_optimizer: bool = True,
    agreement: Agreement | None = None,
) -> Content:
    """Return what this rank writes of its state as it is now. Collective.

    Args:
        agreement: of the run's earlier checkpoints.

    Raises CheckpointError, on all ranks, if a value cannot be written as JSON.
    """
    world = manager.mesh.world
    if scheduler is not None:
        note_rates(scheduler)
    state = manager.sharded_state()
    if not with_optimizer:
        state = replace(state, optimizer=None)
    parts = manager.model_parts
    known, skipped = base_of(parts), left_out(parts)
    state.model = {name: each for name, each in state.model.items() if name not in skipped}
    tensors = {**flat(state), f"{RANDOM}{dist.get_rank()}": random_state()}
    share = (agreement or Agreement()).share(tensors, state.optimizer, group)
    values = {"scheduler": None if scheduler is None else scheduler.state_dict(), "extra": dict(extra or {})}
    settings, written = world.together(lambda: (settings_of(state.optimizer, share), plain(values)))
    texts = {settings_name(world.rank): settings, INDEX: share.index_json}
    return Content(
        [cut(tensors[each.name], each) for each in share.rectangles],
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
            format=FORMAT if known is None else OF_ADAPTERS,
            base=None if known is None else known.base.told(),
            **written,
        ),
    )


def cut(sharded: Sharded, rectangle: Rectangle) -> Tensor:
    """Return a rectangle as a view of the piece that holds it."""
    found = sharded.cut(rectangle.offsets, rectangle.sizes)
    if found is None:
        raise CheckpointError(f"this rank has not the part of {rectangle.name} that it is to write.")
    return found


class Saving:
    """One checkpoint to be written.

    Args:
        place: of the checkpoint.
        group: all ranks, with a backend for the CPU.
        content: what this rank writes.
        tokenizer: of Hugging Face, to be exported with the model.
    """

    def __init__(
        self, manager: StrategyManager, place: Folder, group: dist.ProcessGroup, content: Content, tokenizer: Any
    ) -> None:
        self._place, self._group, self._content = place, group, content
        self._world = manager.mesh.world
        self._draft = draft_of(place)
        self._model, self._tokenizer = manager.model_parts[0], tokenizer

    def write(self) -> None:
        """Write and complete the checkpoint, or remove it and raise CheckpointError on all ranks. Collective."""
        self._begin()
        error: str | None = None
        files: dict[str, StoredFile] = {}
        try:
            files = self._write_own()
        except Exception as caught:
            # File systems raise errors of many kinds.
            error = described(caught)
        error = self._completed(error, files)
        if error is not None:
            if self._world.rank == 0:
                self._draft.discard()
            raise CheckpointWriteError(f"the checkpoint {self._place} could not be written: {error}")

    def _begin(self) -> None:
        """Make room on the first rank. Collective; raises as `write`, but removes nothing."""
        box: list[CheckpointError | None] = [None]
        if self._world.rank == 0:
            try:
                self._draft.begin()
            except CheckpointError as error:
                box[0] = error
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        if box[0] is not None:
            raise box[0]

    def _write_own(self) -> dict[str, StoredFile]:
        """Write this rank's files, and on the first rank the files of Hugging Face."""
        texts = dict(self._content.texts)
        if self._world.rank == 0:
            texts |= self._hugging_face_files()
        payload = payload_name(self._world.rank)
        files = {payload: write_tensors(self._draft, payload, self._content.tensors)}
        return files | {name: self._draft.write(name, partial(list, [text])) for name, text in texts.items()}

    def _hugging_face_files(self) -> dict[str, bytes]:
        """Have Hugging Face's classes write their files into a temporary directory, and read them."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as made:
            directory = Path(made)
            save_code(self._model, directory)
            for each in (getattr(self._model, "config", None), self._tokenizer):
                if each is not None:
                    each.save_pretrained(directory)
            for name, config in adapter_configs(self._model).items():
                config.save_pretrained(directory / adapter_folder(name))
            paths = sorted(path for path in directory.rglob("*") if path.is_file())
            found = {path.relative_to(made).as_posix(): path.read_bytes() for path in paths}
        if self._content.manifest.base is None:
            found |= without_replaced(kept_files(self._model), found)
            generation = getattr(self._model, "generation_config", None)
            if generation is not None:
                found[GENERATION_CONFIG] = generation_json(generation)
        return {f"{HUGGING_FACE}/{name}": content for name, content in found.items()}

    def _completed(self, error: str | None, files: dict[str, StoredFile]) -> str | None:
        """Complete the checkpoint on the first rank if no rank failed; return what went wrong. Collective."""
        found: list[Any] = [None] * self._world.size
        first = self._world.rank == 0
        dist.gather_object((error, files), found if first else None, group=self._group, group_dst=0)
        box: list[Any] = [None]
        if first:
            failures = [f"rank {rank}: {each}" for rank, (each, _) in enumerate(found) if each is not None]
            box[0] = "; ".join(failures[:5]) or None
            if box[0] is None:
                every = {name: stored for _, each in found for name, stored in each.items()}
                try:
                    self._draft.commit(replace(self._content.manifest, files=every))
                except OSError as caught:
                    box[0] = str(caught)
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        result: str | None = box[0]
        return result


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def own_group() -> Iterator[dist.ProcessGroup]:
    """Create a gloo group of all ranks for the time of the context."""
    group = new_group("gloo")
    yield group
    dist.destroy_process_group(group)
