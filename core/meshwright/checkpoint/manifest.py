"""The manifest of a checkpoint: its files with sizes and checksums, and whether they are as they were written."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ..base.errors import CheckpointError, TornCheckpointError

MANIFEST = "checkpoint.json"
FORMAT, OF_ADAPTERS = 2, 3
"""Of what is written: of whole models, and of adapters without their base. Those before them are read, too."""
_STEP = re.compile(r"step-(\d+)")


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> list[tuple[int, Path]]:
    """Step and directory of each checkpoint in `root`, whole or not, the newest first.

    Raises:
        CheckpointError: `root` cannot be read.
    """
    try:
        if not root.is_dir():
            return []
        found = [
            (int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name)) and path.is_dir()
        ]
    except OSError as error:
        raise unreadable(root, error) from None
    return sorted(found, reverse=True)


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint tells about itself, without its tensors.

    Attributes:
        step: optimizer steps done.
        strategy, mesh, world_size: under which it was saved; `mesh` holds the degree of each axis.
        versions: of python, torch, transformers and meshwright.
        has_optimizer: whether the optimizer's state is in it.
        scheduler: state of the learning-rate schedule; None without one.
        extra: what the caller has added; values of JSON.
        files: by name, relative to the checkpoint.
        format: of the checkpoint.
        base: of a checkpoint that holds adapters alone: see `meshwright.model.adapter_base.Base`.
    """

    step: int
    strategy: str
    mesh: dict[str, int]
    world_size: int
    versions: dict[str, str]
    has_optimizer: bool = False
    scheduler: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    format: int = FORMAT
    base: dict[str, Any] | None = None


def digests(directory: Path, names: Sequence[str]) -> dict[str, StoredFile]:
    """Have files on disk; gives their sizes and checksums."""
    return {name: _stored(directory / name, sync=True) for name in names}


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest, and check that its files are there and have their sizes.

    Raises:
        TornCheckpointError: it was never completed, or is no longer whole.
        CheckpointError: it is no directory, cannot be read, or is of another version of meshwright.
    """
    try:
        return _manifest(directory)
    except OSError as error:
        raise unreadable(directory, error) from None


def _manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no checkpoint: it is no directory.{_others(directory)}")
    if not path.is_file():
        raise TornCheckpointError(
            f"{directory} is no checkpoint: it has no {MANIFEST}, so it was never completed.{_others(directory)}"
        )
    try:
        text = path.read_bytes().decode()
        content = json.loads(text)
        is_whole = text == text_of(content)
        version = content.pop("format")
        if version not in range(1, OF_ADAPTERS + 1):
            raise CheckpointError(
                f"{directory} has format {version!r}, but this meshwright reads those up to {OF_ADAPTERS}. Load it "
                f"with the version that has written it: {content.get('versions')}."
            )
        checksum = content.pop("sha256")
        if not is_whole or checksum != digest(content):
            raise ValueError("its checksum is another")
        if version == 1:
            content["has_optimizer"] = None not in (content.pop("groups"), content.pop("values"))
        files = {_plain_name(name): StoredFile(**each) for name, each in content.pop("files").items()}
        manifest = Manifest(**content, files=files, format=version)
        if (manifest.base is None) is (version == OF_ADAPTERS):
            raise ValueError("only one of adapters names a base")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken(directory, f"{MANIFEST} was altered or cut off ({error})") from None
    for name, stored in manifest.files.items():
        file = directory / name
        size = file.stat().st_size if file.is_file() else None
        if size != stored.size:
            told = "is missing" if size is None else f"has {size} bytes instead of {stored.size}"
            raise broken(directory, f"{name} {told}")
    return manifest


def verify(directory: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Compare checksums of some of a checkpoint's files.

    Raises:
        TornCheckpointError: a file was altered.
        CheckpointError: a file cannot be read.
    """
    for name in names:
        try:
            stored = _stored(directory / name)
        except OSError as error:
            raise unreadable(directory, error) from None
        if stored != manifest.files[name]:
            raise _changed(directory, name)


def read_verified(directory: Path, manifest: Manifest, name: str) -> bytes:
    """The contents of one of a checkpoint's files, which are what was written.

    Raises:
        TornCheckpointError: the file was altered, or is none of the checkpoint.
        CheckpointError: it cannot be read.
    """
    if name not in manifest.files:
        raise broken(directory, f"{MANIFEST} names no {name}")
    try:
        content = (directory / name).read_bytes()
    except OSError as error:
        raise unreadable(directory, error) from None
    if StoredFile(len(content), hashlib.sha256(content).hexdigest()) != manifest.files[name]:
        raise _changed(directory, name)
    return content


def broken(directory: Path, reason: str) -> TornCheckpointError:
    """The error for a checkpoint that is not what was written."""
    return TornCheckpointError(f"the checkpoint {directory} is not whole: {reason}.{_others(directory)}")


def unreadable(directory: Path, error: OSError) -> CheckpointError:
    """Not torn: it may be whole once the file system is well again."""
    return CheckpointError(
        f"{directory} cannot be read: {error}. See to it that it can; or move it away, if it is not to be used."
    )


def _changed(directory: Path, name: str) -> CheckpointError:
    return broken(directory, f"the contents of {name} have changed since it was written")


def _plain_name(name: str) -> str:
    """A name of a file within the checkpoint."""
    path = PurePath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it names {name!r}, which is not within it")
    return name


def _others(directory: Path) -> str:
    """What else there is, for the end of a message."""
    told = ""
    if beside(directory, "replaced").is_dir() and not directory.exists():
        told = f" A save over it was interrupted: its former contents are {beside(directory, 'replaced').name}."
    names = [path.name for _, path in steps_in(directory.parent) if path != directory]
    return told + (f" Others beside it: {', '.join(names[:5])}." if names else "")


def _stored(path: Path, *, sync: bool = False) -> StoredFile:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return StoredFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def text_of(content: Mapping[str, Any]) -> str:
    """A manifest as it is written; what was altered in any way is no such text, though it may mean the same."""
    return json.dumps(content, indent=1) + "\n"


def digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def beside(final: Path, what: str) -> Path:
    return final.with_name(f"{final.name}.{what}")
