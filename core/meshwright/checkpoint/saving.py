"""Write one checkpoint: agree on who writes what, copy it, write it, complete it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from .._compat.transformers import save_code
from ..base.errors import CheckpointWriteError
from ..mesh.world import new_group
from ..model.adapter_base import adapter_configs, adapter_folder
from ..model.base_files import GENERATION_CONFIG, generation_json, kept_files, without_replaced
from ..strategy.contract import StrategyManager
from .agreement import Agreement
from .content import content_of
from .directory import HUGGING_FACE
from .drafts import draft_of
from .index import payload_name
from .manifest import StoredFile
from .payload import write_tensors
from .places import Folder


class Saving:
    """One checkpoint to be written: who writes what is agreed on when it is made. Collective.

    Args:
        agreement: of the checkpoints before it, of the same run.

    Raises:
        CheckpointError: a value is none of JSON; on all ranks.
    """

    def __init__(
        self,
        manager: StrategyManager,
        place: Folder,
        group: dist.ProcessGroup,
        *,
        step: int,
        scheduler: LRScheduler | None,
        tokenizer: Any,
        extra: Mapping[str, Any] | None,
        with_optimizer: bool = True,
        agreement: Agreement | None = None,
    ) -> None:
        self._place = place
        self._group = group
        self._world = manager.mesh.world
        self._content = content_of(
            manager,
            group,
            step=step,
            scheduler=scheduler,
            extra=extra,
            with_optimizer=with_optimizer,
            agreement=agreement,
        )
        self._draft = draft_of(place)
        parts = manager.model_parts
        self._describing = [getattr(parts[0], "config", None), tokenizer]
        self._model, self._adapters = parts[0], adapter_configs(parts[0])

    def detach(self) -> None:
        """Copy what this rank writes, so that training can go on."""
        self._content.detach()

    def write(self) -> None:
        """Write and complete the checkpoint. Collective.

        Raises:
            CheckpointError: on all ranks; what there is of it is removed.
        """
        self._begin()
        error: str | None = None
        files: dict[str, StoredFile] = {}
        try:
            files = self._write_own()
        except Exception as caught:
            # A disk fails in as many ways as there are file systems.
            error = told(caught)
        error = self._agreed(error, files)
        if error is not None:
            if self._world.rank == 0:
                self._draft.discard()
            raise CheckpointWriteError(f"the checkpoint {self._place} could not be written: {error}")

    def _begin(self) -> None:
        """Have the first rank make room. Collective; raises as `write`, and nothing is removed then."""
        box: list[CheckpointWriteError | None] = [None]
        if self._world.rank == 0:
            try:
                self._draft.begin()
            except CheckpointWriteError as error:
                box[0] = error
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        if box[0] is not None:
            raise box[0]

    def _write_own(self) -> dict[str, StoredFile]:
        """Write this rank's files, and on the first rank those that there is one of."""
        rank, texts = self._world.rank, dict(self._content.texts)
        if rank == 0:
            texts |= self._described()
        payload = payload_name(rank)
        files = {payload: write_tensors(self._draft, payload, self._content.tensors)}
        return files | {name: self._draft.write(name, partial(list, [text])) for name, text in texts.items()}

    def _described(self) -> dict[str, bytes]:
        """The files of Hugging Face, which its classes write into a directory of this machine."""
        with tempfile.TemporaryDirectory(prefix="meshwright-") as made:
            directory = Path(made)
            save_code(self._model, directory)
            for each in self._describing:
                if each is not None:
                    each.save_pretrained(directory)
            for name, each in self._adapters.items():
                each.save_pretrained(directory / adapter_folder(name))
            paths = sorted(path for path in directory.rglob("*") if path.is_file())
            found = {path.relative_to(made).as_posix(): path.read_bytes() for path in paths}
        if self._content.manifest.base is None:
            found |= without_replaced(kept_files(self._model), found)
            generation = getattr(self._model, "generation_config", None)
            if generation is not None:
                found[GENERATION_CONFIG] = generation_json(generation)
        return {f"{HUGGING_FACE}/{name}": content for name, content in found.items()}

    def _agreed(self, error: str | None, files: dict[str, StoredFile]) -> str | None:
        """Let the first rank complete the checkpoint if all ranks have written theirs; what went wrong otherwise."""
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


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def own_group() -> Iterator[dist.ProcessGroup]:
    """A gloo group of all ranks, whatever the backend of the world."""
    group = new_group("gloo")
    yield group
    dist.destroy_process_group(group)
