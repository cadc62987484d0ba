"""Which checkpoint, or copy in the memory of nodes, a run resumes from; and further copies.

[Note: going on] A run writes its summary last. Without one the same command resumes from its newest valid checkpoint
with the same numbers: state comes from the checkpoint; data, random numbers and rates follow from step and run file.

[Note: the course of a run] Each checkpoint in the directory of a run stems from the one before. Where a run resumes
from an earlier one, or from elsewhere, the later ones are set aside. A checkpoint remembers the one that `resume` named
when its course began, so that the same command resumes from what was saved since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from meshwright.plugin import (
    BAD_STEPS,
    STATE,
    CheckpointError,
    EarlyStopping,
    Folder,
    LocalFolder,
    Loop,
    Manifest,
    Place,
    StateCopies,
    StepResult,
    StrategyManager,
    TornCheckpointError,
    Watch,
    World,
    all_in,
    checked,
    exists,
    first_whole,
    get_registry,
    newest_checkpoint,
    read_manifest,
    tidy,
    unreadable,
    warn,
)

from .fate import AUTO, NEVER, Fate, began_from, named_before
from .journal import id_of, note
from .report import metrics_of
from .run_directory import METRICS, RunDirectory
from .run_file import RunConfig
from .run_sections import EvalConfig


@dataclass(frozen=True)
class Source:
    """A checkpoint that a run resumes from.

    `named` is the one that `resume` named when the course of the run began, and `changed` what differs from its run.
    Checkpoints up to the step `keeps` stay where they are. `metrics` is the folder with those of the steps before; None
    where the course begins with the checkpoint.
    """

    place: Place
    manifest: Manifest
    named: str | None
    changed: tuple[str, ...]
    keeps: int
    metrics: Folder | None

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def has_average(self) -> bool:
        return self.manifest.extra["identity"].get("ema") is not None

    @property
    def left_out(self) -> int:
        """Batches that rewinding has left out; see [Note: draws] in `monitors`."""
        return int(((self.watched or {}).get(BAD_STEPS) or {}).get("left_out", 0))

    @property
    def watched(self) -> Mapping[str, Any] | None:
        return _watched(self.manifest, self.changed)

    def earlier(self, steps: int) -> list[StepResult]:
        """Return the steps before it, of a run of `steps` steps."""
        if self.metrics is None:
            return []
        try:
            with self.metrics.open(METRICS) as file:
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self.metrics, error) from None
        return metrics_of(content, f"{self.metrics}/{METRICS}", until=self.step, steps=steps)

    def position(self) -> int:
        """Return where in the global stream of data the run resumes; see [Note: the global stream] in
        `data.order`."""
        if any(name == "seed" or name.startswith("data.") for name in self.changed):
            return 0
        batch_size = self.manifest.extra["identity"]["batch_size"]
        return int(self.manifest.extra.get("position", self.step * batch_size))


def find_source(
    config: RunConfig, fate: Fate, identity: Mapping[str, Any], world: World, *, steps: int, copies: MemoryCopies
) -> Source | None:
    """Return the checkpoint to resume from, if any; see [Note: the course of a run]. Collective; the directory is
    locked."""
    directory, source = RunDirectory.of(config), config.resumption.source
    if source == NEVER or (source == AUTO and fate is not Fate.GO_ON):
        return None
    root = directory.checkpoints
    if fate is Fate.GO_ON:
        world.from_first(lambda: tidy(root))
    given = None if source == AUTO else directory.place_of(source)
    asked = None if given is None else str(given)

    def on_disk() -> Folder | None:
        return newest_checkpoint(root, world) if given is None else _saved_since(root, given, identity, world)

    place: Place | None = on_disk() if fate is not Fate.GO_ON else copies.newest(on_disk, asked)
    if place is None and given is None:
        # A run that has begun with a checkpoint does not begin at step 0.
        if begun := world.from_first(lambda: str(named_before(directory) or "")):
            raise CheckpointError(
                f"the run in output_dir={directory.given!r} began with {begun}, and has saved no checkpoint since. "
                f"Give resume={begun} again; or start anew, with resume=never and overwrite=true."
            )
        return None
    if place is None:
        place = cast("Folder", given)
        world.together(lambda: checked(place, world))
    manifest = world.together(lambda: read_manifest(place))
    parent: Folder | None = getattr(place, "parent", None)
    # Among those that the run has saved or copied, and not set aside; what was set aside has its metrics beside it.
    is_own = parent is None or parent.is_same(root)
    beside = parent if parent is not None and parent.parent.is_same(root) else None
    return Source(
        place,
        manifest,
        named=asked or manifest.extra.get("named"),
        changed=world.together(lambda: changes(place, manifest, identity, config, steps)),
        keeps=manifest.step if is_own else -1,
        metrics=LocalFolder(directory.path) if is_own else beside,
    )


def _saved_since(root: Folder, given: Folder, identity: Mapping[str, Any], world: World) -> Folder | None:
    """Return the newest valid checkpoint that the same run has saved since it began with `given`. Collective."""

    def own() -> list[str]:
        found = []
        for place in all_in(root):
            try:
                extra = read_manifest(place).extra
            except TornCheckpointError:
                continue
            if extra.get("named") == str(given) and not _differences(extra.get("identity", {}), identity):
                found.append(place.name)
        return found

    return first_whole([root.at(name) for name in world.from_first(own)], world)[0]


def check_source(config: RunConfig, identity: Mapping[str, Any], steps: int) -> None:
    """Refuse early to resume from a checkpoint of another run, where the run file names one."""
    source = config.resumption.source
    if source in (AUTO, NEVER):
        return
    directory = RunDirectory.of(config)
    given = directory.place_of(source)
    if not exists(given) and began_from(directory, given):
        return
    manifest = read_manifest(given)
    changed = changes(source, manifest, identity, config, steps, least=1)
    if Watch(early_stopping(config.eval), None, _watched(manifest, changed)).is_exhausted:
        raise CheckpointError(
            f"the run that {source} is of has stopped early at step {manifest.step}, as eval.early_stopping says. "
            f"Raise its patience, leave it out, or go on from an earlier checkpoint."
        )


def changes(
    source: str | Place,
    manifest: Manifest,
    identity: Mapping[str, Any],
    config: RunConfig,
    steps: int,
    *,
    least: int = 0,
) -> tuple[str, ...]:
    """Return the names of what differs from the run of a checkpoint; at least so many steps must be left of the run."""
    saved = manifest.extra.get("identity")
    if saved is None:
        raise CheckpointError(
            f"the checkpoint {source} is not of a run of `meshwright train`. Load it in a script, or begin with its "
            f"weights alone: model.checkpoint={source}."
        )
    changed = _differences(saved, identity)
    allow = set(config.resumption.allow)
    refused = [name for name in changed if name not in allow and name.partition(".")[0] not in allow]
    if "model.base" in refused:
        raise CheckpointError(
            f"{source} holds adapters of another base: {(manifest.base or {}).get('path')}, fingerprint "
            f"{str((manifest.base or {}).get('fingerprint'))[:12]}. The model at model.path={config.model['path']!r} "
            f"has other weights. Give the base that the run was started with, or start anew in another output_dir."
        )
    if refused:
        raise CheckpointError(
            f"the run differs from the one that {source} is of: {', '.join(refused[:5])}. Give what it was started "
            f"with; or allow the change, where that can be (resume: {{from: ..., allow: [...]}}); or start anew, with "
            f"resume=never, or with its weights alone, in another output_dir: model.checkpoint={source}."
        )
    if manifest.step + least > steps:
        raise CheckpointError(
            f"{source} is of step {manifest.step}, but the run is to have {steps} steps. Raise steps, or start anew "
            f"with resume=never."
        )
    return tuple(changed)


def _differences(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs; sections that were not saved do not."""
    found = []
    for section, value in identity.items():
        before = saved.get(section, value)
        if before != value and isinstance(value, dict) and isinstance(before, dict):
            found += [f"{section}.{key}" for key in {**before, **value} if before.get(key) != value.get(key)]
        elif before != value:
            found.append(section)
    return found


def _watched(manifest: Manifest, changed: Sequence[str]) -> Mapping[str, Any] | None:
    """Return what the loop of a checkpoint remembers. Losses of other data, or of another objective, cannot be compared
    with those before, and patience begins anew; the position in the data stays if they are the same."""
    state: Mapping[str, Any] | None = manifest.extra.get(STATE)
    sections = {name.partition(".")[0] for name in changed}
    if "data" in sections or state is None:
        return None
    if "objective" not in sections:
        return state
    known = state.get(BAD_STEPS) or {}
    return {BAD_STEPS: {name: known[name] for name in ("left_out", "count") if name in known}}


def early_stopping(config: EvalConfig) -> EarlyStopping | None:
    section = config.early_stopping
    return None if section is None else EarlyStopping(section.set, section.patience, section.min_delta)


class MemoryCopies:
    """Copies of the state of one run. Collective, as are all methods; raises as the hook `open_state_copies`."""

    def __init__(self, directory: RunDirectory, world: World) -> None:
        self._directory, self._world = directory, world
        self._copies: StateCopies | None = None
        if directory.checkpoint.copies is not None:
            self._copies = get_registry().hook.open_state_copies(world=world)

    def newest(self, on_disk: Callable[[], Folder | None], named: str | None) -> Place | None:
        """Return what the run resumes from: the newest step that is valid in memory, or a newer one on disk.

        Checkpoints on disk are not read unless one has the name of a later step.
        """
        world, (step, copy) = self._world, self._newest_copy(named)
        if copy is None:
            return on_disk()
        if named is None and step >= world.from_first(lambda: _newest_name(self._directory.checkpoints)):
            return copy
        found = None
        with suppress(CheckpointError):
            found = on_disk()
        if found is None or world.together(lambda: read_manifest(found)).step <= step:
            return copy
        return found

    def _newest_copy(self, named: str | None) -> tuple[int, Place | None]:
        world = self._world
        if self._copies is None:
            return -1, None
        run = world.from_first(lambda: id_of(self._directory.events))
        access = world.together(lambda: self._directory.access)
        for step, place in self._copies.places(world, run, access):
            try:
                manifest = world.together(lambda place=place: checked(place, world))  # type: ignore[misc]
            except CheckpointError as error:
                if world.rank == 0:
                    warn(f"step {step} in memory is of no use: {error}", stacklevel=2)
                continue
            if named is None or manifest.extra.get("named") == named:
                return step, place
        return -1, None

    @contextmanager
    def copying(self, manager: StrategyManager, loop: Loop, run: str) -> Iterator[Loop]:
        settings = self._directory.checkpoint.copies
        if settings is None or self._copies is None:
            yield loop
            return
        with self._copies.copying(
            manager,
            loop.scheduler,
            run=run,
            start=loop.start,
            every=settings.every,
            bandwidth=settings.bytes_per_s,
            key=self._directory.access.key,
            tell=partial(note, self._directory.events, "copies"),
        ) as extension:
            yield replace(loop, extensions=[*loop.extensions, extension])


def _newest_name(root: Folder) -> int:
    """Return the latest step that a checkpoint on disk is named for; -1: there is none."""
    try:
        return max((int(place.name.rpartition("-")[2]) for place in all_in(root)), default=-1)
    except CheckpointError:
        # What is in memory is all that there is, for now.
        return -1
