"""Find the checkpoint or in-memory replica that a run resumes from, and write further replicas.

[Note: resuming] A run writes its summary last. Without one, the same command resumes from the newest valid checkpoint
with the same numbers: state comes from the checkpoint; data, random numbers and rates follow from step and run file.

[Note: lineage] Each checkpoint in the directory of a run continues from the one before. If a run resumes from an
earlier one, or from elsewhere, the later ones are archived. A checkpoint records the one that `resume` named when its
lineage began, so that the same command resumes from what was saved since.
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

from .changed_settings import find_changed_settings, find_differences
from .metrics_report import parse_metrics
from .run_action import AUTO, NEVER, RunAction, find_previously_named, has_started_from
from .run_directory import METRICS, RunDirectory
from .run_file import RunConfig
from .run_logs import get_run_id, log_event
from .run_sections import EvalConfig


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that a run resumes from; see [Note: lineage].

    `resumed_from`: the checkpoint that `resume` named when the lineage began. `changed_settings`: what differs from the
    checkpoint's run. `keep_until_step`: checkpoints of later steps are archived. `metrics_storage`: the directory with
    the metrics of earlier steps; None if the lineage begins with this checkpoint.
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
        """Number of batches that rollbacks have skipped; see [Note: draws] in `meshwright.training.loop.monitors`."""
        return int(((self.loop_state or {}).get(BAD_STEPS_KEY) or {}).get("left_out", 0))

    @property
    def loop_state(self) -> Mapping[str, Any] | None:
        return _get_loop_state(self.manifest, self.changed_settings)

    def load_previous_results(self, num_steps: int) -> list[StepResult]:
        """Return the results of the steps up to this checkpoint; `num_steps` is the length of the run."""
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
        """Return the position in the global stream of data at which the run resumes; see [Note: the global stream] in
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
    """Return the checkpoint to resume from, if any; see [Note: lineage]. Collective. The directory must be locked."""
    directory, source = RunDirectory.from_config(config), config.resume_config.source
    if source == NEVER or (source == AUTO and action is not RunAction.RESUME):
        return None
    root = directory.checkpoint_storage
    if action is RunAction.RESUME:
        world.run_on_first_rank(lambda: cleanup(root))
    given = None if source == AUTO else directory.resolve_checkpoint(source)
    requested = None if given is None else str(given)

    def on_disk() -> Storage | None:
        return (
            find_newest_checkpoint(root, world) if given is None else _find_newest_since(root, given, identity, world)
        )

    checkpoint: StorageReader | None = (
        on_disk() if action is not RunAction.RESUME else replicas.find_newest(on_disk, requested)
    )
    if checkpoint is None and given is None:
        # A run that started from a checkpoint does not start over at step 0.
        if started := world.run_on_first_rank(lambda: str(find_previously_named(directory) or "")):
            raise CheckpointError(
                f"the run in output_dir={directory.configured_path!r} started from {started} and has saved no "
                f"checkpoint since. Set resume={started} again, or start over with resume=never and overwrite=true."
            )
        return None
    if checkpoint is None:
        checkpoint = cast("Storage", given)
        world.run_on_all_ranks(lambda: read_and_verify_share(checkpoint, world))
    manifest = world.run_on_all_ranks(lambda: read_manifest(checkpoint))
    parent: Storage | None = getattr(checkpoint, "parent", None)
    # A checkpoint or replica of this run that is not archived. An archive has a copy of the metrics.
    is_own = parent is None or parent.is_same_as(root)
    archive = parent if parent is not None and parent.parent.is_same_as(root) else None
    return ResumePoint(
        checkpoint,
        manifest,
        resumed_from=requested or manifest.extra.get("named"),
        changed_settings=world.run_on_all_ranks(
            lambda: find_changed_settings(checkpoint, manifest, identity, config, num_steps)
        ),
        keep_until_step=manifest.step if is_own else -1,
        metrics_storage=LocalStorage(directory.path) if is_own else archive,
    )


def _find_newest_since(
    storage: Storage, checkpoint: Storage, identity: Mapping[str, Any], world: World
) -> Storage | None:
    """Return the newest valid checkpoint that the same run has saved since it started from `checkpoint`. Collective."""

    def own() -> list[str]:
        names = []
        for each in list_checkpoints(storage):
            try:
                extra = read_manifest(each).extra
            except IncompleteCheckpointError:
                continue
            if extra.get("named") == str(checkpoint) and not find_differences(extra.get("identity", {}), identity):
                names.append(each.name)
        return names

    return find_first_valid([storage.child(name) for name in world.run_on_first_rank(own)], world)[0]


def check_resume_checkpoint(config: RunConfig, identity: Mapping[str, Any], num_steps: int) -> None:
    """Raise CheckpointError early if the run file names a checkpoint that the run cannot resume from."""
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
            f"the run of {source} stopped early at step {manifest.step}, by its eval.early_stopping. "
            f"Raise its patience, leave it out, or resume from an earlier checkpoint."
        )


def _get_loop_state(manifest: Manifest, changed_settings: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the loop state in a checkpoint. After a change of data or objective, losses cannot be compared with
    earlier ones, so only counts are kept: those of bad steps, and only if the data are the same."""
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
    """In-memory replicas of the state of one run. The constructor and all methods are collective. Raises what the hook
    `open_state_replication` raises."""

    def __init__(self, directory: RunDirectory, world: World) -> None:
        self._directory, self._world = directory, world
        self._replication: StateReplication | None = None
        if directory.checkpoint.replicate_config is not None:
            self._replication = get_registry().hook.open_state_replication(world=world)

    def find_newest(self, find_on_disk: Callable[[], Storage | None], resumed_from: str | None) -> StorageReader | None:
        """Return the newest valid replica, or a newer checkpoint on disk.

        Without `resumed_from`, checkpoints on disk are read only if one has the name of a later step.
        """
        world, (step, replica) = self._world, self._find_newest_replica(resumed_from)
        if replica is None:
            return find_on_disk()
        if resumed_from is None and step >= world.run_on_first_rank(
            lambda: _find_newest_step(self._directory.checkpoint_storage)
        ):
            return replica
        on_disk = None
        with suppress(CheckpointError):
            on_disk = find_on_disk()
        if on_disk is None or world.run_on_all_ranks(lambda: read_manifest(on_disk)).step <= step:
            return replica
        return on_disk

    def _find_newest_replica(self, resumed_from: str | None) -> tuple[int, StorageReader | None]:
        world = self._world
        if self._replication is None:
            return -1, None
        run = world.run_on_first_rank(lambda: get_run_id(self._directory.events))
        access = world.run_on_all_ranks(lambda: self._directory.storage_options)
        for step, replica in self._replication.list_replicas(world, run, access):
            try:
                manifest = world.run_on_all_ranks(lambda replica=replica: read_and_verify_share(replica, world))  # type: ignore[misc]
            except CheckpointError as error:
                if world.rank == 0:
                    warn(f"the replica of step {step} in memory cannot be used: {error}", stacklevel=2)
                continue
            if resumed_from is None or manifest.extra.get("named") == resumed_from:
                return step, replica
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
    """Return the latest step in the names of checkpoints on disk; -1 if there is none."""
    try:
        return max((int(checkpoint.name.rpartition("-")[2]) for checkpoint in list_checkpoints(storage)), default=-1)
    except CheckpointError:
        # The storage cannot be listed at present, so only replicas can be used.
        return -1
