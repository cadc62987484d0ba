"""Directories of checkpoints: complete ones under their names, with a manifest that tells whether they still are.

[Note: complete or absent] A checkpoint is written into `NAME.writing`. When all files are on disk, the manifest, with
the size and checksum of each, is added and the directory is renamed to NAME. So what bears a checkpoint's name was
complete once; a directory that lost or changed something since is found by its manifest, and never loaded. Of the
manifest every byte counts, too: it holds its own checksum, and is what `json.dumps` makes of its contents. Files that
it does not name are never read.

[Note: swap, then remove] What is to be replaced is renamed to `NAME.replaced`, the new one is given its name, and only
then is the old one removed. After a crash in between, one of both lies beside the name whole, and `recover` gives it
the name. Readers do not: the writer may be alive.

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
from pathlib import Path, PurePath
from typing import Any

from ..base.errors import CheckpointError, CheckpointWriteError, TornCheckpointError

MANIFEST = "checkpoint.json"
HUGGING_FACE = "huggingface"
"""Where a checkpoint has the model's configuration and the tokenizer."""
FORMAT = 2
"""Of what is written; those before it are read, too."""
_STEP = re.compile(r"step-(\d+)")
_ABANDONED = re.compile(r"abandoned-(\d+)")


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
        raise _unreadable(root, error) from None
    return sorted(found, reverse=True)


def begin(final: Path) -> Path:
    """Make the empty directory that a checkpoint is written into.

    Raises:
        CheckpointError: it cannot be made.
    """
    writing = _beside(final, "writing")
    try:
        recover(final)
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
    except OSError as error:
        raise CheckpointWriteError(f"the checkpoint {final} cannot be written: {error}.") from error
    return writing


def digests(directory: Path, names: Sequence[str]) -> dict[str, StoredFile]:
    """Have files on disk; gives their sizes and checksums."""
    return {name: _stored(directory / name, sync=True) for name in names}


def commit(writing: Path, final: Path, manifest: Manifest) -> None:
    """Give a complete checkpoint its manifest and its name; see [Note: complete or absent].

    One of that name is replaced. OSError: nothing has changed, or `recover` mends what has.
    """
    content = asdict(manifest)
    version = content.pop("format")
    with (writing / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(_text({"format": version, "sha256": _digest(content), **content}))
        file.flush()
        os.fsync(file.fileno())
    for directory in {(writing / name).parent for name in (MANIFEST, *manifest.files)}:
        _sync(directory)
    put_in_place(writing, final)


def put_in_place(new: Path, final: Path) -> None:
    """Give a complete directory its name; one that bears it is replaced, see [Note: swap, then remove]."""
    old = _beside(final, "replaced")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    try:
        new.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(final: Path) -> None:
    """Complete what a crash has interrupted in `put_in_place`: the new checkpoint gets the name, or the old one back.

    Only for who writes it, and nobody else does.
    """
    old, new = _beside(final, "replaced"), _beside(final, "writing")
    if old.exists() and not final.exists():
        (new if _is_whole(new) else old).rename(final)


def discard(writing: Path) -> None:
    """Remove what could not be completed."""
    shutil.rmtree(writing, ignore_errors=True)


def remove(final: Path) -> None:
    """Remove a checkpoint, so that no part of it is ever seen under its name."""
    doomed = _beside(final, "deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    final.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Remove what interrupted runs have left half written or half removed, but for what `recover` can mend.

    Raises:
        CheckpointWriteError: what can be mended cannot be renamed.
    """
    for path in root.glob("step-*.replaced"):
        try:
            recover(path.with_suffix(""))
        except OSError as error:
            raise CheckpointWriteError(f"{path} cannot be given its name back: {error}.") from error
    for kind in ("writing", "deleting", "replaced"):
        for path in root.glob(f"step-*.{kind}"):
            shutil.rmtree(path, ignore_errors=True)


def retain(root: Path, *, newest: int, keep_last: int | None, keep_every: int | None) -> None:
    """Remove older checkpoints.

    Args:
        root: directory of the checkpoints.
        newest: the step that was saved last. What is of later steps is of another course of the run: it neither counts
            nor is removed.
        keep_last: how many to keep; None keeps all. Only whole ones count, and only whole ones are removed.
        keep_every: those of steps that are multiples of it are kept, too.
    """
    if keep_last is None:
        return
    kept = 0
    for step, path in steps_in(root):
        if step > newest or (kept >= keep_last and keep_every is not None and step % keep_every == 0):
            continue
        if _is_whole(path):
            kept += 1
            if kept > keep_last:
                remove(path)


def set_aside(root: Path, *, after: int, copies: Sequence[Path] = ()) -> Path | None:
    """Move the checkpoints of later steps than `after` to `root`/abandoned-N, where a run goes on without them.

    Args:
        root: directory of the checkpoints.
        after: the step that the run goes on from; -1 moves all.
        copies: files that are copied there, if they exist.

    Returns:
        The new directory; None where nothing was to be moved.

    Raises:
        CheckpointWriteError: they cannot be moved; those that could be are there.
    """
    later = [path for step, path in steps_in(root) if step > after]
    if not later:
        return None
    numbers = [int(match[1]) for path in root.iterdir() if (match := _ABANDONED.fullmatch(path.name))]
    aside = root / f"abandoned-{max(numbers, default=0) + 1}"
    try:
        aside.mkdir()
        for file in copies:
            if file.is_file():
                shutil.copy2(file, aside / file.name)
        for path in later:
            path.rename(aside / path.name)
    except OSError as error:
        raise CheckpointWriteError(f"checkpoints of later steps cannot be moved to {aside}: {error}.") from error
    _sync(root)
    return aside


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest, and check that its files are there and have their sizes.

    Raises:
        TornCheckpointError: it was never completed, or is no longer whole.
        CheckpointError: it is no directory, cannot be read, or is of another version of meshwright.
    """
    try:
        return _manifest(directory)
    except OSError as error:
        raise _unreadable(directory, error) from None


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
        is_whole = text == _text(content)
        version = content.pop("format")
        if version not in range(1, FORMAT + 1):
            raise CheckpointError(
                f"{directory} has format {version!r}, but this meshwright reads those up to {FORMAT}. Load it with the "
                f"version that has written it: {content.get('versions')}."
            )
        digest = content.pop("sha256")
        if not is_whole or digest != _digest(content):
            raise ValueError("its checksum is another")
        if version == 1:
            content["has_optimizer"] = None not in (content.pop("groups"), content.pop("values"))
        files = {_plain_name(name): StoredFile(**each) for name, each in content.pop("files").items()}
        manifest = Manifest(**content, files=files, format=version)
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
            raise _unreadable(directory, error) from None
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
        raise _unreadable(directory, error) from None
    if StoredFile(len(content), hashlib.sha256(content).hexdigest()) != manifest.files[name]:
        raise _changed(directory, name)
    return content


def broken(directory: Path, reason: str) -> TornCheckpointError:
    """The error for a checkpoint that is not what was written."""
    return TornCheckpointError(f"the checkpoint {directory} is not whole: {reason}.{_others(directory)}")


def _is_whole(directory: Path) -> bool:
    """Whether a checkpoint has all that its manifest names, in size; not so where that cannot be read."""
    try:
        read_manifest(directory)
    except CheckpointError:
        return False
    return True


def _unreadable(directory: Path, error: OSError) -> CheckpointError:
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
    if _beside(directory, "replaced").is_dir() and not directory.exists():
        told = f" A save over it was interrupted: its former contents are {_beside(directory, 'replaced').name}."
    names = [path.name for _, path in steps_in(directory.parent) if path != directory]
    return told + (f" Others beside it: {', '.join(names[:5])}." if names else "")


def _beside(final: Path, what: str) -> Path:
    return final.with_name(f"{final.name}.{what}")


def _stored(path: Path, *, sync: bool = False) -> StoredFile:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return StoredFile(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _text(content: Mapping[str, Any]) -> str:
    """A manifest as it is written; what was altered in any way is no such text, though it may mean the same."""
    return json.dumps(content, indent=1) + "\n"


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
