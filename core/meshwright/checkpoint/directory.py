"""Directories of checkpoints: complete ones under their names, with a manifest that tells whether they still are.

[Note: complete or absent] A checkpoint is written into `NAME.writing`. When all files are on disk, the manifest, with
the size and checksum of each, is added and the directory is renamed to NAME. So what bears a checkpoint's name was
complete once; a directory that lost or changed something since is found by its manifest, and never loaded.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MANIFEST = "checkpoint.json"
HUGGING_FACE = "huggingface"
"""Where a checkpoint has the model's configuration and the tokenizer."""
FORMAT = 1
_STEP = re.compile(r"step-(\d+)")


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
        groups, values: see `meshwright.state.OptimizerState`; None without an optimizer.
        scheduler: state of the learning-rate schedule; None without one.
        extra: what the caller has added; values of JSON.
        files: by name.
    """

    step: int
    strategy: str
    mesh: dict[str, int]
    world_size: int
    versions: dict[str, str]
    groups: list[dict[str, Any]] | None = None
    values: dict[str, dict[str, Any]] | None = None
    scheduler: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step:08d}"


def steps_in(root: Path) -> list[tuple[int, Path]]:
    """Step and directory of each checkpoint in `root`, whole or not, the newest first."""
    if not root.is_dir():
        return []
    found = [
        (int(match[1]), path) for path in root.iterdir() if path.is_dir() and (match := _STEP.fullmatch(path.name))
    ]
    return sorted(found, reverse=True)


def begin(final: Path) -> Path:
    """Make the empty directory that a checkpoint is written into.

    Raises:
        CheckpointError: it cannot be made.
    """
    writing = final.with_name(f"{final.name}.writing")
    try:
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {final} cannot be written: {error}.") from error
    return writing


def digests(directory: Path, names: Sequence[str]) -> dict[str, StoredFile]:
    """Size and checksum of files, as they are now."""
    return {name: _stored(directory / name) for name in names}


def commit(writing: Path, final: Path, manifest: Manifest) -> None:
    """Give a complete checkpoint its manifest and its name; see [Note: complete or absent].

    One of that name is replaced.
    """
    content = asdict(manifest)
    text = json.dumps({"format": FORMAT, "sha256": _digest(content), **content}, indent=1)
    with (writing / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    _sync(writing)
    if final.exists():
        remove(final)
    writing.rename(final)
    _sync(final.parent)


def discard(writing: Path) -> None:
    """Remove what could not be completed."""
    shutil.rmtree(writing, ignore_errors=True)


def remove(final: Path) -> None:
    """Remove a checkpoint, so that no part of it is ever seen under its name."""
    doomed = final.with_name(f"{final.name}.deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    final.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Remove what interrupted runs have left half written or half removed."""
    for path in (*root.glob("step-*.writing"), *root.glob("step-*.deleting")):
        shutil.rmtree(path, ignore_errors=True)


def retain(root: Path, *, keep_last: int | None, keep_every: int | None) -> None:
    """Remove all but the newest checkpoints, and those of steps that are multiples of `keep_every`."""
    if keep_last is None:
        return
    for step, path in steps_in(root)[keep_last:]:
        if keep_every is None or step % keep_every:
            remove(path)


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest, and check that its files are there and have their sizes.

    Raises:
        CheckpointError: it is no checkpoint, or no longer whole.
    """
    path = directory / MANIFEST
    if not path.is_file():
        what = "is no directory" if not directory.is_dir() else f"has no {MANIFEST}, so it was never completed"
        raise CheckpointError(f"{directory} is no checkpoint: it {what}.{_others(directory)}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, digest = content.pop("format"), content.pop("sha256")
        if version != FORMAT:
            raise CheckpointError(
                f"{directory} has format {version!r}, but this meshwright reads {FORMAT}. Load it with the version "
                f"that has written it: {content.get('versions')}."
            )
        if digest != _digest(content):
            raise ValueError("its checksum is another")
        files = {name: StoredFile(**each) for name, each in content.pop("files").items()}
        manifest = Manifest(**content, files=files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(directory, f"{MANIFEST} was altered or cut off ({error})") from None
    for name, stored in manifest.files.items():
        file = directory / name
        size = file.stat().st_size if file.is_file() else None
        if size != stored.size:
            told = "is missing" if size is None else f"has {size} bytes instead of {stored.size}"
            raise _broken(directory, f"{name} {told}")
    return manifest


def verify(directory: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Compare checksums of some of a checkpoint's files.

    Raises:
        CheckpointError: a file was altered.
    """
    for name in names:
        if _stored(directory / name) != manifest.files[name]:
            raise _broken(directory, f"the contents of {name} have changed since it was written")


def _broken(directory: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {directory} is not whole: {reason}.{_others(directory)}")


def _others(directory: Path) -> str:
    names = [path.name for _, path in steps_in(directory.parent) if path != directory]
    return f" Others beside it: {', '.join(names[:5])}." if names else ""


def _stored(path: Path) -> StoredFile:
    with path.open("rb") as file:
        return StoredFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(directory: Path) -> None:
    """Have the entries of a directory on disk, where the system can."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
