"""Whether checkpoints are, byte for byte, what was written; and by whom, where a key is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..base.errors import CheckpointError, TornCheckpointError
from .index import INDEX
from .manifest import MANIFEST, Manifest, all_in, manifest_and_sizes, stored_in, unreadable, wrong_size
from .places import Folder, Place
from .read_index import read_index


@dataclass(frozen=True)
class Verified:
    """What has come of it.

    Attributes:
        manifest: None where it could not be read.
        nbytes: that were read and are what was written.
        problems: of its files, each by its name; or of the whole.
    """

    place: Place
    manifest: Manifest | None
    nbytes: int
    problems: tuple[str, ...]


def found_in(folder: Folder) -> list[Folder]:
    """The checkpoints that a directory holds, the newest first; or itself, if it is one.

    Raises:
        CheckpointError: there is none.
    """
    found = all_in(folder)
    try:
        if not found and not {MANIFEST, INDEX} & (folder.sizes() or {}).keys():
            # Says that it is none.
            manifest_and_sizes(folder)
    except OSError as error:
        raise unreadable(folder, error) from None
    return found or [folder]


def verified(folder: Folder) -> Iterator[Verified]:
    """Read every byte of the checkpoints that a directory holds, one after the other.

    Raises:
        CheckpointError: there is none; or one cannot be read, is of another version, or is foreign.
    """
    for place in found_in(folder):
        yield _verified(place)


def _verified(place: Place) -> Verified:
    try:
        manifest, sizes = manifest_and_sizes(place)
    except TornCheckpointError as error:
        return Verified(place, None, 0, (str(error),))
    problems, nbytes = [], 0
    for name, expected in manifest.files.items():
        problem = wrong_size(manifest, sizes, name)
        if problem is None:
            try:
                stored = stored_in(place, name)
            except OSError as error:
                raise unreadable(place, error) from None
            if stored != expected:
                problem = f"the contents of {name} have changed since it was written"
            nbytes += stored.size
        problems += [] if problem is None else [problem]
    if not problems:
        # Whether the index is one of these files.
        try:
            read_index(place, manifest)
        except CheckpointError as error:
            problems.append(str(error))
    return Verified(place, manifest, nbytes, tuple(problems))


def signed(manifest: Manifest, place: Place) -> str:
    """Who has signed a checkpoint, in words."""
    if not manifest.is_signed:
        return "not signed"
    return "signed, not checked" if place.access.key is None else "signed with this key"
