"""Which checkpoint, or copy in the memory of nodes, a run resumes from; and further copies.

[Note: continuing] A run writes its summary last. Without one the same command resumes from its newest valid checkpoint
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
    BAD_STEPS_KEY,
    LOOP_STATE_KEY,
    CheckpointError,
    EarlyStopping,
    IncompleteCheckpointError,
    LocalStorage,
    Loop,
    Manifest,
    MetricMonitor,
    StateReplication,
    StepResult,
    Storage,
    StorageReader,
    StrategyManager,
    World,
    cleanup,
    find_first_valid,
    find_newest_checkpoint,
    get_registry,
    list_checkpoints,
    read_and_verify_share,
    read_manifest,
    storage_exists,
    unreadable_error,
    warn,
)

from .metrics_report import parse_metrics
from .run_action import AUTO, NEVER, RunAction, find_previously_named, has_started_from
from .run_directory import METRICS, RunDirectory
from .run_file import RunConfig
from .run_logs import get_run_id, log_event
from .run_sections import EvalConfig


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that a run resumes from.

    `resumed_from` is the one that `resume` named when the course of the run began, and `changed_settings` what differs
    from its run. Checkpoints up to the step `keep_until_step` stay where they are. `metrics_storage` is the folder with
    those of the steps before; None where the course begins with the checkpoint.
    """

    checkpoint: StorageReader
    manifest: Manifest
    resumed_from: str | None
    changed_settings: tuple[str, ...]
    keep_until_step: int
    metrics_storage: Storage | None

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def has_ema(self) -> bool:
        return self.manifest.extra["identity"].get("ema") is not None

    @property
    def num_skipped_batches(self) -> int:
        """Batches that rolling back has left out; see [Note: draws] in `monitors`."""
        return int(((self.loop_state or {}).get(BAD_STEPS_KEY) or {}).get("left_out", 0))

    @property
    def loop_state(self) -> Mapping[str, Any] | None:
        return _get_loop_state(self.manifest, self.changed_settings)

    def load_previous_results(self, num_steps: int) -> list[StepResult]:
        """Return the steps before it, of a run of `num_steps` steps."""
        if self.metrics_storage is None:
            return []
        try:
            with self.metrics_storage.open(METRICS) as file:
                content = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable_error(self.metrics_storage, error) from None
        return parse_metrics(content, f"{self.metrics_storage}/{METRICS}", last_step=self.step, num_steps=num_steps)

    def compute_data_position(self) -> int:
        """Return where in the global stream of data the run resumes; see [Note: the global stream] in
        `data.order`."""
        if any(name == "seed" or name.startswith("data.") for name in self.changed_settings):
            return 0
        batch_size = self.manifest.extra["identity"]["batch_size"]
        return int(self.manifest.extra.get("position", self.step * batch_size))


def find_resume_point(
    config: RunConfig,
    action: RunAction,
    identity: Mapping[str, Any],
    world: World,
    *,
    num_steps: int,
    replicas: RunReplicas,
) -> ResumePoint | None:
    """Return the checkpoint to resume from, if any; see [Note: the course of a run]. Collective; the directory is
    locked."""
    directory, source = RunDirectory.from_config(config), config.resume_config.source
    if source == NEVER or (source == AUTO and action is not RunAction.RESUME):
        return None
    root = directory.checkpoint_storage
    if action is RunAction.RESUME:
        world.run_on_first_rank(lambda: cleanup(root))
    given = None if source == AUTO else directory.resolve_checkpoint(source)
    asked = None if given is None else str(given)

    def on_disk() -> Storage | None:
        return (
            find_newest_checkpoint(root, world) if given is None else _find_newest_since(root, given, identity, world)
        )

    place: StorageReader | None = on_disk() if action is not RunAction.RESUME else replicas.find_newest(on_disk, asked)
    if place is None and given is None:
        # A run that has started with a checkpoint does not begin at step 0.
        if started := world.run_on_first_rank(lambda: str(find_previously_named(directory) or "")):
            raise CheckpointError(
                f"the run in output_dir={directory.configured_path!r} began with {started}, and has saved no "
                f"checkpoint since. Give resume={started} again; or start over, with resume=never and overwrite=true."
            )
        return None
    if place is None:
        place = cast("Storage", given)
        world.run_on_all_ranks(lambda: read_and_verify_share(place, world))
    manifest = world.run_on_all_ranks(lambda: read_manifest(place))
    parent: Storage | None = getattr(place, "parent", None)
    # Among those that the run has saved or copied, and not set aside; what was set aside has its metrics beside it.
    is_own = parent is None or parent.is_same_as(root)
    beside = parent if parent is not None and parent.parent.is_same_as(root) else None
    return ResumePoint(
        place,
        manifest,
        resumed_from=asked or manifest.extra.get("named"),
        changed_settings=world.run_on_all_ranks(
            lambda: find_changed_settings(place, manifest, identity, config, num_steps)
        ),
        keep_until_step=manifest.step if is_own else -1,
        metrics_storage=LocalStorage(directory.path) if is_own else beside,
    )


def _find_newest_since(
    storage: Storage, checkpoint: Storage, identity: Mapping[str, Any], world: World
) -> Storage | None:
    """Return the newest valid checkpoint that the same run has saved since it began with `checkpoint`. Collective."""

    def own() -> list[str]:
        found = []
        for place in list_checkpoints(storage):
            try:
                extra = read_manifest(place).extra
            except IncompleteCheckpointError:
                continue
            if extra.get("named") == str(checkpoint) and not _find_differences(extra.get("identity", {}), identity):
                found.append(place.name)
        return found

    return find_first_valid([storage.child(name) for name in world.run_on_first_rank(own)], world)[0]


def check_resume_checkpoint(config: RunConfig, identity: Mapping[str, Any], num_steps: int) -> None:
    """Refuse early to resume from a checkpoint of another run, where the run file names one."""
    source = config.resume_config.source
    if source in (AUTO, NEVER):
        return
    directory = RunDirectory.from_config(config)
    given = directory.resolve_checkpoint(source)
    if not storage_exists(given) and has_started_from(directory, given):
        return
    manifest = read_manifest(given)
    changed = find_changed_settings(source, manifest, identity, config, num_steps, min_steps_left=1)
    if MetricMonitor(build_early_stopping(config.eval), None, _get_loop_state(manifest, changed)).should_stop:
        raise CheckpointError(
            f"the run that {source} is of has stopped early at step {manifest.step}, as eval.early_stopping says. "
            f"Raise its patience, leave it out, or resume from an earlier checkpoint."
        )


def find_changed_settings(
    checkpoint: str | StorageReader,
    manifest: Manifest,
    identity: Mapping[str, Any],
    config: RunConfig,
    num_steps: int,
    *,
    min_steps_left: int = 0,
) -> tuple[str, ...]:
    """Return the names of what differs from the run of a checkpoint; at least so many steps must be left of the run."""
    saved = manifest.extra.get("identity")
    if saved is None:
        raise CheckpointError(
            f"the checkpoint {checkpoint} is not of a run of `meshwright train`. Load it in a script, or begin with "
            f"its weights alone: model.checkpoint={checkpoint}."
        )
    changed = _find_differences(saved, identity)
    allow = set(config.resume_config.allow)
    refused = [name for name in changed if name not in allow and name.partition(".")[0] not in allow]
    if "model.base" in refused:
        raise CheckpointError(
            f"{checkpoint} holds adapters of another base: {(manifest.base or {}).get('path')}, fingerprint "
            f"{str((manifest.base or {}).get('fingerprint'))[:12]}. The model at model.path={config.model['path']!r} "
            f"has other weights. Give the base that the run was started with, or start over in another output_dir."
        )
    if refused:
        raise CheckpointError(
            f"the run differs from the one that {checkpoint} is of: {', '.join(refused[:5])}. Give what it was started "
            f"with; or allow the change, where that can be (resume: {{from: ..., allow: [...]}}); or start over, with "
            f"resume=never, or with its weights alone, in another output_dir: model.checkpoint={checkpoint}."
        )
    if manifest.step + min_steps_left > num_steps:
        raise CheckpointError(
            f"{checkpoint} is of step {manifest.step}, but the run is to have {num_steps} steps. Raise steps, or start "
            "over with resume=never."
        )
    return tuple(changed)


def _find_differences(saved: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs; sections that were not saved do not."""
    found = []
    for section, current in identity.items():
        value, before = (_use_current_names(each, section) for each in (current, saved.get(section, current)))
        if before != value and isinstance(value, dict) and isinstance(before, dict):
            found += [f"{section}.{key}" for key in {**before, **value} if before.get(key) != value.get(key)]
        elif before != value:
            found.append(section)
    return found


_EARLIER_NAMES: Mapping[str, Mapping[str, str]] = {
    "ema": {"start": "start_step"},
    "optimizer": {"matrices": "matrices_only"},
    "objective": {
        "log_entropy": "report_entropy",
        "entropy": "entropy_coef",
        "importance": "importance_level",
        "center": "center_coefficient",
        "sums": "extra_sums",
        "rest": "tail",
    },
}
"""By section of an identity, names in checkpoints of earlier versions, and what they are now."""


def _use_current_names(value: Any, section: str) -> Any:
    if isinstance(value, list):
        return [_use_current_names(each, section) for each in value]
    if not isinstance(value, dict):
        return value
    names = {old: new for old, new in _EARLIER_NAMES.get(section, {}).items() if new not in value}
    return {names.get(key, key): _use_current_names(each, section) for key, each in value.items()}


def _get_loop_state(manifest: Manifest, changed_settings: Sequence[str]) -> Mapping[str, Any] | None:
    """Return what the loop of a checkpoint remembers. Losses of other data, or of another objective, cannot be compared
    with those before, and patience starts over; the position in the data stays if they are the same."""
    state: Mapping[str, Any] | None = manifest.extra.get(LOOP_STATE_KEY)
    sections = {name.partition(".")[0] for name in changed_settings}
    if "data" in sections or state is None:
        return None
    if "objective" not in sections:
        return state
    known = state.get(BAD_STEPS_KEY) or {}
    return {BAD_STEPS_KEY: {name: known[name] for name in ("left_out", "count") if name in known}}


def build_early_stopping(config: EvalConfig) -> EarlyStopping | None:
    section = config.early_stopping
    return None if section is None else EarlyStopping(section.eval_set, section.patience, section.min_delta)


class RunReplicas:
    """Copies of the state of one run. Collective, as are all methods; raises as the hook `open_state_replication`."""

    def __init__(self, directory: RunDirectory, world: World) -> None:
        self._directory, self._world = directory, world
        self._replication: StateReplication | None = None
        if directory.checkpoint.replicate_config is not None:
            self._replication = get_registry().hook.open_state_replication(world=world)

    def find_newest(self, find_on_disk: Callable[[], Storage | None], resumed_from: str | None) -> StorageReader | None:
        """Return what the run resumes from: the newest step that is valid in memory, or a newer one on disk.

        Checkpoints on disk are not read unless one has the name of a later step.
        """
        world, (step, copy) = self._world, self._find_newest_replica(resumed_from)
        if copy is None:
            return find_on_disk()
        if resumed_from is None and step >= world.run_on_first_rank(
            lambda: _find_newest_step(self._directory.checkpoint_storage)
        ):
            return copy
        found = None
        with suppress(CheckpointError):
            found = find_on_disk()
        if found is None or world.run_on_all_ranks(lambda: read_manifest(found)).step <= step:
            return copy
        return found

    def _find_newest_replica(self, resumed_from: str | None) -> tuple[int, StorageReader | None]:
        world = self._world
        if self._replication is None:
            return -1, None
        run = world.run_on_first_rank(lambda: get_run_id(self._directory.events))
        access = world.run_on_all_ranks(lambda: self._directory.storage_options)
        for step, place in self._replication.list_replicas(world, run, access):
            try:
                manifest = world.run_on_all_ranks(lambda place=place: read_and_verify_share(place, world))  # type: ignore[misc]
            except CheckpointError as error:
                if world.rank == 0:
                    warn(f"step {step} in memory is of no use: {error}", stacklevel=2)
                continue
            if resumed_from is None or manifest.extra.get("named") == resumed_from:
                return step, place
        return -1, None

    @contextmanager
    def replicate(self, manager: StrategyManager, loop: Loop, run_id: str) -> Iterator[Loop]:
        settings = self._directory.checkpoint.replicate_config
        if settings is None or self._replication is None:
            yield loop
            return
        with self._replication.replicate(
            manager,
            loop.scheduler,
            run_id=run_id,
            start_step=loop.start_step,
            every=settings.every,
            bandwidth=settings.bytes_per_s,
            signing_key=self._directory.storage_options.key,
            report=partial(log_event, self._directory.events, "replication"),
        ) as extension:
            yield replace(loop, extensions=[*loop.extensions, extension])


def _find_newest_step(storage: Storage) -> int:
    """Return the latest step that a checkpoint on disk is named for; -1: there is none."""
    try:
        return max((int(place.name.rpartition("-")[2]) for place in list_checkpoints(storage)), default=-1)
    except CheckpointError:
        # What is in memory is all that there is, for now.
        return -1
