"""The manifest of a checkpoint: its files with sizes and checksums, and whether they are as they were written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ..base.errors import CheckpointError, TornCheckpointError
from .extra import check_extra
from .keys import ForeignCheckpointError, Key
from .opening import place_of
from .places import STEP, Folder, LocalFolder, Place, Where, steps_of

MANIFEST = "checkpoint.json"
SIGNATURE = "hmac_sha256"
"""Where it has the signature, if it has one; see `keys`."""
FORMAT, OF_ADAPTERS = 2, 3
"""Of what is written: of whole models, and of adapters without their base."""
PAYLOAD = "tensors-"
"""What the names of files begin with that hold tensors, and are read in part."""
CHUNK = 1 << 24
"""Bytes of a signed file that are verified together where it is read in part."""
_LARGEST = 1 << 28
"""Bytes of a manifest."""


def step_name(step: int) -> str:
    """What the checkpoint of a step is called."""
    return f"step-{step:08d}"


def step_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / step_name(step)


def steps_in(root: Path) -> list[tuple[int, Path]]:
    """Step and directory of each checkpoint in `root`, whole or not, the newest first.

    Raises:
        CheckpointError: `root` cannot be read.
    """
    return [(step, root / place.name) for step, place in _steps(LocalFolder(root))]


def all_in(folder: Folder) -> list[Folder]:
    """The checkpoints in a place, whole or not, the newest first.

    Raises:
        CheckpointError: it cannot be read.
    """
    return [place for _, place in _steps(folder)]


def exists(place: Place) -> bool:
    """Whether there is something in a place.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return place.sizes() is not None
    except OSError as error:
        raise unreadable(place, error) from None


def _steps(folder: Folder) -> list[tuple[int, Folder]]:
    try:
        return steps_of(folder)
    except OSError as error:
        raise unreadable(folder, error) from None


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 of a file.

    Attributes:
        chunks: SHA-256 of each `CHUNK` bytes, where it is signed and is read in part; see `signed_reading`.
    """

    size: int
    sha256: str
    chunks: tuple[str, ...] = field(default=(), compare=False)


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
        is_signed: whether it has a signature, which has been checked if the place that it was read from has a key.
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
    is_signed: bool = False


def read_manifest(where: Where) -> Manifest:
    """Read a checkpoint's manifest, and check that its files are there and have their sizes.

    Raises:
        TornCheckpointError: it was never completed, or is no longer whole.
        ForeignCheckpointError: it is not signed with the key that its place has.
        CheckpointError: it is no directory, cannot be read, or is of another version of meshwright.
    """
    place = place_of(where)
    manifest, sizes = manifest_and_sizes(place)
    for name in manifest.files:
        reason = wrong_size(manifest, sizes, name)
        if reason is not None:
            raise broken(place, reason)
    return manifest


def manifest_and_sizes(place: Place) -> tuple[Manifest, dict[str, int]]:
    """The manifest of a checkpoint, and bytes of the files that there are; raises as `read_manifest`."""
    try:
        sizes = place.sizes()
        if sizes is None:
            raise CheckpointError(f"{place} is no checkpoint: it is no directory.{place.hint()}")
        if MANIFEST not in sizes:
            raise TornCheckpointError(
                f"{place} is no checkpoint: it has no {MANIFEST}, so it was never completed.{place.hint()}"
            )
        if sizes[MANIFEST] > _LARGEST:
            raise broken(place, f"{MANIFEST} has {sizes[MANIFEST]} bytes, and no manifest has more than {_LARGEST}")
        with place.open(MANIFEST) as file:
            content = file.read()
    except OSError as error:
        raise unreadable(place, error) from None
    return _parsed(place, content), sizes


def _parsed(place: Place, text: bytes) -> Manifest:
    try:
        content = json.loads(text.decode())
        is_whole = text.decode() == text_of(content)
        version = content.pop("format")
        if version not in (FORMAT, OF_ADAPTERS):
            raise CheckpointError(
                f"{place} has format {version!r:.20}, but this meshwright reads {FORMAT} and {OF_ADAPTERS}. Load it "
                f"with the version that has written it: {content.get('versions')!r:.200}."
            )
        signature = content.pop(SIGNATURE, None)
        checksum = content.pop("sha256")
        if not is_whole or checksum != digest(content):
            raise ValueError("its checksum is another")
        files = {_plain_name(name): _stored(**each) for name, each in content.pop("files").items()}
        manifest = Manifest(**content, files=files, format=version, is_signed=signature is not None)
        _check_types(manifest)
        if (manifest.base is None) is (version == OF_ADAPTERS):
            raise ValueError("only one of adapters names a base")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken(place, f"{MANIFEST} was altered or cut off ({error})") from None
    key = place.access.key
    if key is not None and not key.has_signed(version, checksum, signature):
        told = "is not signed" if signature is None else "is signed with another key"
        raise ForeignCheckpointError(
            f"the checkpoint {place} {told}, and a key is given (checkpoint.key_file, or --key-file). Give the key "
            f"that it was signed with, or none if you trust it; or go on from another. It was neither changed nor "
            f"removed."
        )
    _check_step(place, manifest)
    return manifest


def _check_step(place: Place, manifest: Manifest) -> None:
    """Refuse a checkpoint whose name is that of another step: one that was put in a newer one's place.

    Raises:
        CheckpointError: both steps are named.
    """
    named = STEP.fullmatch(place.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"the checkpoint {place} is of step {manifest.step}, and not of the step that it is called by. Give it its "
            f"own name, {step_name(manifest.step)}, if you have renamed it; else somebody has replaced it."
        )


def _check_types(manifest: Manifest) -> None:
    """ValueError: a value is of another type than what is written."""
    told = (manifest.mesh, manifest.versions, manifest.extra, manifest.scheduler or {}, manifest.base or {})
    is_right = (
        all(isinstance(each, dict) for each in told)
        and all(type(each) is int and 0 <= each < 1 << 62 for each in (manifest.step, manifest.world_size))
        and all(type(each) is int for each in manifest.mesh.values())
        and isinstance(manifest.strategy, str)
        and isinstance(manifest.has_optimizer, bool)
    )
    if not is_right:
        raise ValueError("it has values of other types")
    check_extra(manifest.extra)


def _stored(size: int, sha256: str, chunks: Sequence[str] = ()) -> StoredFile:
    """A file as the manifest has it. ValueError or TypeError: it has something else."""
    is_size = type(size) is int and 0 <= size < 1 << 62
    if not is_size or not isinstance(sha256, str) or not isinstance(chunks, list | tuple):
        raise ValueError("it has no size and checksum of a file")
    return StoredFile(size, sha256, tuple(chunks))


def wrong_size(manifest: Manifest, sizes: Mapping[str, int], name: str) -> str | None:
    """What is wrong with a file of a checkpoint by its size; None if nothing is."""
    size, expected = sizes.get(name), manifest.files[name].size
    if size == expected:
        return None
    return f"{name} is missing" if size is None else f"{name} has {size} bytes instead of {expected}"


def verify(where: Where, manifest: Manifest, names: Sequence[str]) -> None:
    """Compare checksums of some of a checkpoint's files.

    Raises:
        TornCheckpointError: a file was altered.
        CheckpointError: a file cannot be read.
    """
    directory = place_of(where)
    for name in names:
        try:
            stored = stored_in(directory, name)
        except OSError as error:
            raise unreadable(directory, error) from None
        if stored != manifest.files[name]:
            raise changed(directory, name)


def read_verified(where: Where, manifest: Manifest, name: str) -> bytes:
    """The contents of one of a checkpoint's files, which are what was written.

    Raises:
        TornCheckpointError: the file was altered, or is none of the checkpoint.
        CheckpointError: it cannot be read.
    """
    place = place_of(where)
    if name not in manifest.files:
        raise broken(place, f"{MANIFEST} names no {name}")
    try:
        with place.open(name) as file:
            content = file.read()
    except OSError as error:
        raise unreadable(place, error) from None
    if StoredFile(len(content), hashlib.sha256(content).hexdigest()) != manifest.files[name]:
        raise changed(place, name)
    return content


def broken(where: Where, reason: str) -> TornCheckpointError:
    """The error for a checkpoint that is not what was written."""
    place = place_of(where)
    return TornCheckpointError(f"the checkpoint {place} is not whole: {reason}.{place.hint()}")


def unreadable(where: Where, error: OSError) -> CheckpointError:
    """Not torn: it may be whole once the file system is well again."""
    return CheckpointError(
        f"{where} cannot be read: {error}. See to it that it can; or move it away, if it is not to be used."
    )


def changed(place: Place, name: str) -> TornCheckpointError:
    """The error for a file that is not what was written."""
    return broken(place, f"the contents of {name} have changed since it was written")


def _plain_name(name: str) -> str:
    """A name of a file within the checkpoint."""
    path = PurePath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it names {name!r}, which is not within it")
    return name


def stored_in(place: Place, name: str) -> StoredFile:
    """Size and checksum of a file as it is. OSError: it cannot be read."""
    with place.open(name) as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return StoredFile(file.tell(), checksum)


def sealed(manifest: Manifest, key: Key | None) -> str:
    """A manifest as it is written, with its checksum and, if there is a key, a signature."""
    content = asdict(manifest)
    version = content.pop("format")
    del content["is_signed"]
    if manifest.base is None:
        del content["base"]
    for stored in content["files"].values():
        if not stored["chunks"]:
            del stored["chunks"]
    checksum = digest(content)
    signature = {} if key is None else {SIGNATURE: key.signature(version, checksum)}
    return text_of({"format": version, "sha256": checksum, **signature, **content})


def text_of(content: Mapping[str, Any]) -> str:
    """A manifest as it is written; what was altered in any way is no such text, though it may mean the same."""
    return json.dumps(content, indent=1) + "\n"


def digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


BESIDE = (".writing", ".replaced", ".deleting")
"""What names of checkpoints and models end in that are not complete, or on their way out."""


def beside(final: Path, what: str) -> Path:
    return final.with_name(f"{final.name}.{what}")
