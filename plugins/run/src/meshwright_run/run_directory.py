"""The directory of a run: paths, lock, names that runs have created, and checkpoint storage. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from meshwright.plugin import ConfigError, open_regular_file, parse_json, read_json_object, write_atomically

from .profile.config import FAULT_DIRECTORY
from .profile.config import PROFILE_DIRECTORY as PROFILE
from .run_file_values import CREATED_NAMES as CREATED_NAMES
from .run_sections import CheckpointConfig

if TYPE_CHECKING:
    from meshwright.plugin import Storage, StorageOptions, World

    from .run_file import RunConfig

METRICS, LOSS_CURVE, MODEL, SUMMARY, RUN_FILE = "metrics.jsonl", "loss.png", "model", "summary.json", "run.yaml"
AVERAGED_MODEL = f"{MODEL}-ema"
CHECKPOINTS, EVENTS, RANK_LOGS, REFERENCE = "checkpoints", "events.jsonl", "ranks", "reference.npz"
TIMELINE, PLANNED_SCHEDULE = "timeline", "planned.json"
LOCK, LOCK_OWNER = ".lock", ".lock.json"
"""The locked file, and a separate file that names the owner, since an attempt to lock may truncate the locked file."""
IN_PROGRESS = (f"{MODEL}.checkpoint", f"{MODEL}.writing", f"{AVERAGED_MODEL}.writing")
"""Directories of an export in progress: the checkpoint to export, and the models to rename."""
OUTPUT_DIRECTORIES = (CHECKPOINTS, MODEL, AVERAGED_MODEL, RANK_LOGS, TIMELINE, PROFILE, FAULT_DIRECTORY, *IN_PROGRESS)
OUTPUT_FILES = (METRICS, LOSS_CURVE, EVENTS, REFERENCE, SUMMARY, RUN_FILE)
ALL_OUTPUTS = (*OUTPUT_DIRECTORIES, *OUTPUT_FILES)
"""Directories and files that a run creates, and removes if it overwrites another run."""
_MAX_LIST_BYTES = 1 << 16
"""Maximum bytes of CREATED_NAMES that are read."""


class RunDirectory:
    def __init__(self, path: str | Path, checkpoint: CheckpointConfig | None = None) -> None:
        self.path = Path(path)
        self.configured_path, self.checkpoint = str(path), checkpoint or CheckpointConfig()
        self.metrics, self.loss_curve, self.events = self.path / METRICS, self.path / LOSS_CURVE, self.path / EVENTS
        self.rank_logs, self.reference_log_probs = self.path / RANK_LOGS, self.path / REFERENCE
        self.timeline = self.path / TIMELINE
        self.planned_schedule = self.timeline / PLANNED_SCHEDULE
        self.summary, self.run_file, self.lock_owner = self.path / SUMMARY, self.path / RUN_FILE, self.path / LOCK_OWNER
        self.model, self.averaged_model = self.path / MODEL, self.path / AVERAGED_MODEL
        self.faults, self.local_checkpoints = self.path / FAULT_DIRECTORY, self.path / CHECKPOINTS

    @classmethod
    def from_config(cls, config: RunConfig) -> RunDirectory:
        return cls(config.output_dir, config.checkpoint)

    def __str__(self) -> str:
        return str(self.path)

    def get_rank_log_path(self, rank: int) -> Path:
        return self.rank_logs / f"{rank:05}.jsonl"

    def is_same(self, path: str) -> bool:
        return Path(path).resolve() == self.path.resolve()

    # -- checkpoints

    @cached_property
    def storage_options(self) -> StorageOptions:
        from meshwright.plugin import StorageOptions, read_signing_key

        file = self.checkpoint.key_file
        return StorageOptions(
            None if file is None else read_signing_key(file, where="checkpoint.key_file"), self.checkpoint.retries
        )

    @cached_property
    def checkpoint_storage(self) -> Storage:
        from meshwright.plugin import is_url, open_storage

        to = self.checkpoint.path
        where = self.local_checkpoints if to is None else to if is_url(to) else Path(to).expanduser()
        return open_storage(where, self.storage_options)

    @property
    def has_external_storage(self) -> bool:
        return self.checkpoint.path is not None

    def resolve_checkpoint(self, source: str) -> Storage:
        from meshwright.plugin import is_url, open_storage

        return open_storage(source if is_url(source) else Path(source).expanduser().resolve(), self.storage_options)

    def check_checkpoint_storage(self, world_size: int) -> None:
        """Raise ConfigError for a storage that not all ranks can reach. Does not access it."""
        if str(self.checkpoint_storage).startswith("memory:") and world_size > 1:
            raise ConfigError(
                f"checkpoint.path={self.checkpoint.path!r} is in the memory of one process, but the run has "
                f"{world_size} ranks. Name a location that all of them reach: a directory, or s3://bucket/prefix."
            )

    def check_same_key(self, world: World) -> None:
        """Raise ConfigError on all ranks if their signing keys differ. Collective."""
        key = world.run_on_all_ranks(lambda: self.storage_options).key
        number = 0 if key is None else key.fingerprint
        highest, lowest = world.reduce_sum_and_max((), (number, -number))[1]
        if highest != -lowest:
            world.raise_on_all_ranks(
                ConfigError(
                    f"checkpoint.key_file={self.checkpoint.key_file!r} differs between nodes. "
                    f"Give all of them the same file."
                )
            )

    # -- lock, and names that runs have created

    @contextmanager
    def lock(self, *, timeout_s: float) -> Iterator[None]:
        """Lock the directory, and create it if missing. The system releases the lock when the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._check_no_links()
            lock = FileLock(self.path / LOCK)
            lock.acquire(timeout=timeout_s)
        except Timeout:
            raise ConfigError(
                f"output_dir={str(self.path)!r} is in use by another run{self._describe_lock_owner()}. Wait until it "
                "has ended, end it, or name another directory."
            ) from None
        except (OSError, NotImplementedError) as error:
            raise ConfigError(
                f"output_dir={str(self.path)!r} cannot be locked: {error}. Name another directory."
            ) from None
        try:
            started = datetime.now().astimezone().isoformat(timespec="seconds")
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
            write_atomically(self.lock_owner, json.dumps(owner) + "\n")
            yield
        finally:
            self.lock_owner.unlink(missing_ok=True)
            lock.release()

    def _describe_lock_owner(self) -> str:
        try:
            owner = read_json_object(self.lock_owner)
            return f": process {owner['pid']} on {owner['host']}, started {owner['started']}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""

    def _check_no_links(self) -> None:
        from meshwright.plugin import TEMPORARY_SUFFIXES

        # A finished checkpoint may be a link to elsewhere: it is read, but not written again.
        below = [
            path
            for name in (CHECKPOINTS, RANK_LOGS, TIMELINE, PROFILE, FAULT_DIRECTORY)
            if (self.path / name).is_dir() and not (self.path / name).is_symlink()
            for path in (self.path / name).iterdir()
            if name != CHECKPOINTS or path.suffix in TEMPORARY_SUFFIXES
        ]
        # Trackers choose their own names. Files that are not yet renamed (.tmp) are replaced.
        own = [path for path in self.path.iterdir() if path.suffix != ".tmp"]
        for path in (*own, *below):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                link_text = "is a link, and a run does not write through links"
                problem = link_text if stat.S_ISLNK(mode) else "is neither a file nor a directory"
                raise ConfigError(
                    f"{path} {problem}. Remove it, or name another output_dir; to store checkpoints elsewhere, set "
                    "checkpoint.path."
                )

    def is_empty(self) -> bool:
        own = (LOCK, LOCK_OWNER, CREATED_NAMES)
        return not self.path.is_dir() or all(path.name in own for path in self.path.iterdir())

    def read_created_names(self) -> set[str]:
        """Return the recorded names that runs have created here."""
        try:
            with open_regular_file(self.path / CREATED_NAMES) as file:
                names = parse_json(file.read(_MAX_LIST_BYTES).decode())
        except (OSError, ValueError):
            return set()
        return {each for each in names if each in ALL_OUTPUTS} if isinstance(names, list) else set()

    def record_created_names(self) -> set[str]:
        """Record all outputs that do not exist yet as created by runs, and return all recorded names."""
        mine = self.read_created_names() | {name for name in ALL_OUTPUTS if not (self.path / name).exists()}
        write_atomically(self.path / CREATED_NAMES, json.dumps(sorted(mine)) + "\n")
        return mine

    def check_only_created(self) -> None:
        known = self.read_created_names()
        others = [name for name in ALL_OUTPUTS if name not in known and (self.path / name).exists()]
        if others:
            raise ConfigError(
                f"overwrite=true would remove {', '.join(others)} in output_dir={str(self.path)!r}, which no run "
                f"created there ({CREATED_NAMES} lists what runs created). Move it away, or name another directory."
            )

    def prepare(self, run_file_text: str, *, overwrite: bool) -> None:
        """Prepare the directory for an unfinished run; with `overwrite`, remove earlier results."""
        from meshwright.plugin import remove_checkpoints

        try:
            if overwrite:
                if self.has_external_storage:
                    remove_checkpoints(self.checkpoint_storage)
                self.check_only_created()
                for name in OUTPUT_DIRECTORIES:
                    if (self.path / name).is_dir():
                        shutil.rmtree(self.path / name)
                for name in OUTPUT_FILES:
                    if name not in (SUMMARY, RUN_FILE):
                        (self.path / name).unlink(missing_ok=True)
            mine = self.record_created_names()
            for name in IN_PROGRESS:
                if name in mine:
                    shutil.rmtree(self.path / name, ignore_errors=True)
            # As long as there is a summary, the directory counts as that of a finished run.
            self.summary.unlink(missing_ok=True)
            write_atomically(self.run_file, run_file_text)
        except OSError as error:
            raise ConfigError(f"output_dir={self.configured_path!r} cannot be written: {error}.") from error
