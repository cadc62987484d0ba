"""Check that a directory can hold the results of a run: what checkpoints and metrics need of a file system."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from .finding import Finding, failed

_AREA = "directory"
FREE = 10 * 2**30
"""Bytes; a checkpoint may not fit into less."""
WRITTEN = 64 * 2**20
"""Bytes of the test file."""
SLOW = 50e6
"""Bytes per second; below this a checkpoint takes long."""


@contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """Make a temporary directory in it; raise OSError if that fails."""
    directory.mkdir(parents=True, exist_ok=True)
    own = directory / f".meshwright-doctor-{uuid.uuid4().hex[:12]}"
    own.mkdir()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)


def directory_findings(directory: Path) -> Iterator[Finding]:
    """Check a directory as one rank; see `together` for several."""
    try:
        with workplace(directory) as own:
            yield Finding(_AREA, "writable", "ok", str(directory))
            yield _renames(own)
            yield _locks(own)
            yield _free(own)
            yield _speed(own)
    except OSError as error:
        mend = "Name a directory that this user may write to, on a disk that is not full."
        yield Finding(_AREA, "writable", "wrong", f"{directory}: {error.strerror or error}", mend)


def _renames(own: Path) -> Finding:
    """Rename a file over another, and a directory, as checkpoints and summaries are published."""
    new, old = own / "new", own / "old"
    new.write_text("new", encoding="utf-8")
    old.write_text("old", encoding="utf-8")
    os.replace(new, old)
    (own / "writing").mkdir()
    (own / "writing" / "file").write_text("whole", encoding="utf-8")
    os.rename(own / "writing", own / "written")
    if old.read_text(encoding="utf-8") == "new" and (own / "written" / "file").is_file() and not new.exists():
        return Finding(_AREA, "renaming", "ok", "files and directories appear at once")
    mend = "Use a file system with POSIX renames, such as NFS or Lustre; mounted object stores have none."
    return failed(_AREA, "renaming", "what was renamed is not there under its new name", mend)


def _locks(own: Path) -> Finding:
    mend = "Mount it with locks (NFS: without nolock; Lustre: with flock), or use another file system."
    path = own / "lock"
    try:
        with FileLock(path, timeout=5):
            try:
                with FileLock(path, timeout=0):
                    return failed(_AREA, "locks", "two have the same lock", mend)
            except Timeout:
                return Finding(_AREA, "locks", "ok", "a second one waits")
    except (OSError, NotImplementedError, Timeout) as error:
        return failed(_AREA, "locks", f"none can be had: {error}", mend)


def _free(own: Path) -> Finding:
    free = shutil.disk_usage(own).free
    said = f"{free / 2**30:,.1f} GiB"
    if free < FREE:
        mend = "Free some, or keep fewer checkpoints (checkpoint.keep_last): one takes 12 bytes for each parameter."
        return Finding(_AREA, "free", "warning", said, mend)
    return Finding(_AREA, "free", "ok", said)


def _speed(own: Path) -> Finding:
    path, part = own / "large", os.urandom(1 << 20)
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(WRITTEN // len(part)):
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    rate = WRITTEN / (time.perf_counter() - began)
    said = f"{rate / 1e6:,.0f} MB/s to write and keep {WRITTEN >> 20} MiB"
    if rate < SLOW:
        mend = "Checkpoints are written while training goes on; save them less often, or use a faster disk."
        return Finding(_AREA, "speed", "warning", said, mend)
    return Finding(_AREA, "speed", "ok", said)
