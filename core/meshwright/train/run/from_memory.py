"""Copies of a run's state in the memory of nodes: resume from the newest one, and make further ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ...base.errors import CheckpointError
from ...checkpoint.loading import checked
from ...checkpoint.manifest import all_in, read_manifest
from ...checkpoint.places import Folder, Place
from ...events.step import StepResult
from ...files.terminal import warn
from ...memory.copier import Copier
from ...memory.keepers import open_keepers
from ...memory.place import MemoryPlace, places_of
from ...memory.room import memory_of_host
from ...mesh.world import World
from ...strategy.contract import StrategyManager
from ..loop.extension import LoopExtension
from ..loop.options import Loop
from ..loop.stopwatch import marked
from .journal import id_of, note
from .run_directory import RunDirectory


class MemoryCopies:
    """Copies of the state of one run. Collective, as are all methods; raises as `open_keepers`."""

    def __init__(self, directory: RunDirectory, world: World) -> None:
        self._directory, self._world = directory, world
        self._keepers = None if directory.checkpoint.copies is None else open_keepers(world)

    def newest(self, on_disk: Callable[[], Folder | None], named: str | None) -> Folder | MemoryPlace | None:
        """Return what the run resumes from: the newest step that is valid in memory, or a newer one on disk.

        Checkpoints on disk are not read unless one has the name of a later step.

        Args:
            on_disk: finds the newest there.
            named: the checkpoint that `resume` names, from which the copies must stem; None: none.

        Warns:
            UserWarning: on the first rank, of copies that have changed.

        Raises:
            CheckpointError: as `on_disk`, where nothing is in memory.
        """
        world, copy = self._world, self._newest_copy(named)
        if copy is None:
            return on_disk()
        if named is None and copy.step >= world.from_first(lambda: _newest_name(self._directory.checkpoints)):
            return copy
        try:
            found = on_disk()
        except CheckpointError:
            return copy
        if found is None:
            return copy
        step = world.together(lambda: read_manifest(found)).step
        return found if step > copy.step else copy

    def _newest_copy(self, named: str | None) -> MemoryPlace | None:
        world, keepers = self._world, self._keepers
        if keepers is None:
            return None
        run = world.from_first(lambda: id_of(self._directory.events))
        access = world.together(lambda: self._directory.access)
        for place in places_of(keepers, keepers.listed(world), run, access):
            try:
                manifest = world.together(lambda place=place: checked(place, world))  # type: ignore[misc]
            except CheckpointError as error:
                if world.rank == 0:
                    warn(f"step {place.step} in memory is of no use: {error}", stacklevel=2)
                continue
            if named is None or manifest.extra.get("named") == named:
                return place
        return None

    @contextmanager
    def copying(self, manager: StrategyManager, loop: Loop, run: str) -> Iterator[Loop]:
        """Return the loop, with state copied to memory if the run asks for it.

        Args:
            run: its id.
        """
        settings = self._directory.checkpoint.copies
        if settings is None or self._keepers is None:
            yield loop
            return
        with Copier(
            manager,
            self._keepers,
            run=run,
            step=loop.start,
            every=settings.every,
            bandwidth=settings.bytes_per_s,
            key=self._directory.access.key,
            memory_bytes=memory_of_host(),
            tell=partial(note, self._directory.events, "copies"),
        ) as copier:
            yield replace(loop, extensions=[*loop.extensions, _Copies(manager, copier, loop.scheduler)])


def is_in_memory(place: Place) -> bool:
    return isinstance(place, MemoryPlace)


def _newest_name(root: Folder) -> int:
    """Return the latest step that a checkpoint on disk is named for; -1: there is none."""
    try:
        return max((int(place.name.rpartition("-")[2]) for place in all_in(root)), default=-1)
    except CheckpointError:
        # What is in memory is all that there is, for now.
        return -1


class _Copies(LoopExtension):
    """Copies the state after the steps that are due, and reports the time with the step after."""

    def __init__(self, manager: StrategyManager, copier: Copier, scheduler: Any) -> None:
        self._progress, self._copier, self._scheduler = manager.mesh.world.progress, copier, scheduler
        self._times: dict[str, float] = {}

    def after_step(self, result: StepResult) -> StepResult:
        times, self._times = self._times, {}
        return replace(result, times={**result.times, **times}) if times else result

    def end_step(self, step: int, extra: Callable[[], dict[str, Any]]) -> None:
        if not self._copier.is_due(step):
            return
        start = time.perf_counter()
        self._progress.enter("copy")
        with marked("copy"):
            self._copier.copy(step, scheduler=self._scheduler, extra=extra)
        self._times = {"copy": time.perf_counter() - start}
