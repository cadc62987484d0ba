"""Which checkpoint a run resumes from.

[Note: going on] A run writes its summary last. Without one it is unfinished, and the same command resumes from its
newest valid checkpoint with the same numbers: state comes from the checkpoint; data, random numbers and learning rates
follow from the step and the run file.

[Note: the course of a run] Each checkpoint in the directory of a run stems from the one before. Where a run resumes
from an earlier one, or from one that lies elsewhere, the later ones are set aside. A checkpoint remembers the one that
`resume` named when its course began, so that the same command resumes from what was saved since.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ...base.errors import CheckpointError, TornCheckpointError
from ...checkpoint import Manifest, first_whole, newest_checkpoint, read_manifest
from ...checkpoint.directory import tidy
from ...checkpoint.loading import checked
from ...checkpoint.manifest import all_in, exists, unreadable
from ...checkpoint.places import Folder, LocalFolder, Place
from ...events.step import StepResult
from ...mesh.world import World
from ..loop.bad_steps import BAD_STEPS
from ..loop.watch import STATE, EarlyStopping, Watch
from .fate import AUTO, NEVER, Fate, began_from, named_before
from .from_memory import MemoryCopies, is_in_memory
from .report import metrics_of
from .run_directory import METRICS, RunDirectory
from .run_file import RunConfig


@dataclass(frozen=True)
class Source:
    """A checkpoint that a run resumes from.

    Attributes:
        named: the checkpoint that `resume` named when the course of the run began; None if none was.
        changed: names of what differs from the run of the checkpoint.
        keeps: checkpoints up to this step stay where they are.
        metrics: the folder with the metrics of the steps before; None where the course begins with the checkpoint.
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
        """Whether it has an average of the weights."""
        return self.manifest.extra["identity"].get("ema") is not None

    @property
    def left_out(self) -> int:
        """Batches that rewinding has left out; see [Note: draws] in `bad_steps`."""
        return int(((self.watched or {}).get(BAD_STEPS) or {}).get("left_out", 0))

    @property
    def watched(self) -> Mapping[str, Any] | None:
        """What the loop remembers."""
        return _watched(self.manifest, self.changed)

    def earlier(self, steps: int) -> list[StepResult]:
        """Return the steps before it, of a run of `steps` steps.

        Raises:
            CheckpointError: the file of metrics cannot be read.
        """
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
        `data.rows.order`."""
        if any(name == "seed" or name.startswith("data.") for name in self.changed):
            return 0
        batch_size = self.manifest.extra["identity"]["batch_size"]
        return int(self.manifest.extra.get("position", self.step * batch_size))


def find_source(
    config: RunConfig,
    fate: Fate,
    identity: Mapping[str, Any],
    world: World,
    *,
    steps: int,
    copies: MemoryCopies | None = None,
) -> Source | None:
    """Return the checkpoint to resume from, if any; see [Note: the course of a run]. Collective; the directory is
    locked.

    Args:
        identity, steps: of the run.
        copies: of its state in memory; None: there are none.

    Raises:
        CheckpointError: there are checkpoints, but none can be loaded, or the run is another; on all ranks.
    """
    directory, source = RunDirectory.of(config), config.resumption.source
    if source == NEVER or (source == AUTO and fate is not Fate.GO_ON):
        return None
    root = directory.checkpoints
    if fate is Fate.GO_ON:
        world.from_first(lambda: tidy(root))
    given = None if source == AUTO else directory.place_of(source)

    def on_disk() -> Folder | None:
        return newest_checkpoint(root, world) if given is None else _saved_since(root, given, identity, world)

    place: Place | None
    if copies is not None and fate is Fate.GO_ON:
        place = copies.newest(on_disk, None if given is None else str(given))
    else:
        place = on_disk()
    if place is None and given is None:
        world.from_first(lambda: _check_begins_at_zero(directory))
        return None
    if place is None:
        place = cast("Folder", given)
        world.together(lambda: checked(place, world))
    manifest = world.together(lambda: read_manifest(place))
    return Source(
        place,
        manifest,
        named=manifest.extra.get("named") if given is None else str(given),
        changed=world.together(lambda: changes(place, manifest, identity, config, steps)),
        keeps=manifest.step if _is_own(directory, place) else -1,
        metrics=_metrics_until(directory, place),
    )


def _check_begins_at_zero(directory: RunDirectory) -> None:
    """Refuse to begin at step 0 if the run has begun with a checkpoint and has saved none since."""
    named = named_before(directory)
    if named is not None:
        raise CheckpointError(
            f"the run in output_dir={directory.given!r} began with {named}, and has saved no checkpoint since. Give "
            f"resume={named} again; or start anew, with resume=never and overwrite=true."
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


def _is_own(directory: RunDirectory, source: Place) -> bool:
    """Whether a checkpoint is among those that the run has saved or copied, and was not set aside."""
    return is_in_memory(source) or cast("Folder", source).parent.is_same(directory.checkpoints)


def _metrics_until(directory: RunDirectory, source: Place) -> Folder | None:
    """Return where the metrics of the steps up to a checkpoint are."""
    if _is_own(directory, source):
        return LocalFolder(directory.path)
    # What was set aside has a copy beside it.
    parent = cast("Folder", source).parent
    return parent if parent.parent.is_same(directory.checkpoints) else None


def check_source(config: RunConfig, identity: Mapping[str, Any], steps: int) -> None:
    """Refuse early to resume from a checkpoint of another run, where the run file names one.

    Args:
        identity, steps: of the run.

    Raises:
        CheckpointError: names what differs; or there is nothing left to be done.
    """
    source = config.resumption.source
    if source in (AUTO, NEVER):
        return
    directory = RunDirectory.of(config)
    given = directory.place_of(source)
    if not exists(given) and began_from(directory, given):
        return
    manifest = read_manifest(given)
    changed = changes(source, manifest, identity, config, steps)
    if manifest.step == steps:
        raise _too_few_steps(source, steps, manifest.step)
    if Watch(early_stopping(config), None, _watched(manifest, changed)).is_exhausted:
        raise CheckpointError(
            f"the run that {source} is of has stopped early at step {manifest.step}, as eval.early_stopping says. "
            f"Raise its patience, leave it out, or go on from an earlier checkpoint."
        )


def changes(
    source: str | Place, manifest: Manifest, identity: Mapping[str, Any], config: RunConfig, steps: int
) -> tuple[str, ...]:
    """Return the names of what differs from the run of a checkpoint.

    Raises:
        CheckpointError: more than `resume.allow` allows.
    """
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
    if manifest.step > steps:
        raise _too_few_steps(source, steps, manifest.step)
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


def early_stopping(config: RunConfig) -> EarlyStopping | None:
    section = config.eval.early_stopping
    return None if section is None else EarlyStopping(section.set, section.patience, section.min_delta)


def _too_few_steps(source: str | Place, steps: int, done: int) -> CheckpointError:
    return CheckpointError(
        f"{source} is of step {done}, but the run is to have {steps} steps. Raise steps, or start anew with "
        f"resume=never."
    )
