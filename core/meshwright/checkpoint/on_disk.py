"""Files of a checkpoint that packages want to read from a directory, wherever the checkpoint lies."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from .manifest import Manifest, read_verified
from .places import LocalFolder, Place


class OnDisk:
    """A directory with some of a checkpoint's files.

    Args:
        path: of the directory.
        is_copy: whether it is removed when this goes.
    """

    def __init__(self, path: Path, *, is_copy: bool) -> None:
        self.path = path
        if is_copy:
            weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)


def on_this_machine(place: Place, manifest: Manifest, names: Iterable[str]) -> OnDisk:
    """Some of a checkpoint's files: where they are, or copies of them, where they are elsewhere or signed: a file
    could be exchanged after it was verified.

    Raises:
        CheckpointError: one was altered, or cannot be read.
    """
    if isinstance(place, LocalFolder) and place.access.key is None:
        return OnDisk(place.path, is_copy=False)
    held = OnDisk(Path(tempfile.mkdtemp(prefix="meshwright-")), is_copy=True)
    for name in names:
        path = held.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(read_verified(place, manifest, name))
    return held
