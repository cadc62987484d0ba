"""Copies of a run's state in memory: which one it goes on from, and the making of further ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..base.errors import CheckpointError
from ..checkpoint.loading import checked
from ..checkpoint.manifest import all_in, read_manifest
from ..checkpoint.places import Folder
from ..files.terminal import warn
from ..memory.copier import Copier
from ..memory.keepers import Keepers, open_keepers
from ..memory.place import MemoryPlace, places_of
from ..memory.room import memory_of_host
from ..mesh.world import World
from ..strategy.contract import StrategyManager
from .journal import id_of, note
from .loop_options import Loop
from .run_file import RunConfig
from .saved import access_of, saved_by


def keepers_of(config: RunConfig, world: World) -> Keepers | None:
    """Who holds copies of the state of a run, if it is to be copied. Collective; raises as `open_keepers`."""
    return None if config.checkpoint.copies is None else open_keepers(world)


def newest_of(
    config: RunConfig, keepers: Keepers | None, on_disk: Callable[[], Folder | None], named: str | None, world: World
) -> Folder | MemoryPlace | None:
    """What a run goes on from: the newest step that is whole in memory, or what is on disk if that is newer.

    Checkpoints on disk are not read where none there is called by a later step. Collective.

    Args:
        on_disk: finds the newest there.
        named: the checkpoint that `resume` names, of which the copies must be; None: none.

    Warns:
        UserWarning: on the first rank, of copies that are not what they were.

    Raises:
        CheckpointError: as `on_disk`, where nothing is in memory.
    """
    copy = None if keepers is None else _newest_copy(config, keepers, named, world)
    if copy is None:
        return on_disk()
    if named is None and copy.step >= world.from_first(lambda: _newest_name(saved_by(config))):
        return copy
    try:
        found = on_disk()
    except CheckpointError:
        return copy
    if found is None:
        return copy
    step = world.together(lambda: read_manifest(found)).step
    return found if step > copy.step else copy


def _newest_copy(config: RunConfig, keepers: Keepers, named: str | None, world: World) -> MemoryPlace | None:
    run = world.from_first(lambda: id_of(Path(config.output_dir)))
    access = world.together(lambda: access_of(config))
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


def _newest_name(root: Folder) -> int:
    """The latest step that a checkpoint on disk is called by; -1: there is none."""
    try:
        return max((int(place.name.rpartition("-")[2]) for place in all_in(root)), default=-1)
    except CheckpointError:
        # What is in memory is all that there is, for now.
        return -1


@contextmanager
def copying(
    manager: StrategyManager, config: RunConfig, keepers: Keepers | None, loop: Loop, run: str
) -> Iterator[Loop]:
    """The loop, with state copied to memory if the run asks for it; let go of when the context is left in order.

    Args:
        run: its id.
    """
    settings = config.checkpoint.copies
    if settings is None or keepers is None:
        yield loop
        return
    with Copier(
        manager,
        keepers,
        run=run,
        step=loop.start,
        every=settings.every,
        bandwidth=settings.bytes_per_s,
        key=access_of(config).key,
        memory_bytes=memory_of_host(),
        tell=partial(note, Path(config.output_dir), "copies"),
    ) as copier:
        yield replace(loop, copier=copier)
