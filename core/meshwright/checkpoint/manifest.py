"""The manifest of a checkpoint: its files with sizes and checksums, and whether they are as they were written.

Whoever can write to a checkpoint's directory may exchange a file after it was verified. Where a key is given, the
manifest therefore has a checksum for each chunk of the files that are read in part, and a chunk is compared with its
checksum before its bytes are used. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Annotated, Any, BinaryIO, ClassVar

from pydantic import ConfigDict, Strict, TypeAdapter

from ..base.errors import CheckpointError, TornCheckpointError
from .extra import Count, check_extra, checked_by
from .places import STEP, Folder, Key, LocalFolder, Place, SeekableReader, Where, steps_of
from .remote import place_of

MANIFEST = "checkpoint.json"
"""Name of a checkpoint's manifest, which is written last."""
SIGNATURE = "hmac_sha256"
"""Key of the signature in the manifest, if there is one."""
FORMAT, OF_ADAPTERS = 2, 3
"""Formats of full models, and of adapters without their base."""
PAYLOAD = "tensors-"
"""Prefix of the files that hold tensors, which are read in part."""
CHUNK = 1 << 24
"""Bytes of a signed file that are verified together where it is read in part."""
BESIDE = (".writing", ".replaced", ".deleting")
"""Suffixes of checkpoints and models that are incomplete, or about to be removed."""
_LARGEST = 1 << 28
"""Bytes of a manifest."""
_STRICT = ConfigDict(strict=True, revalidate_instances="always")


class ForeignCheckpointError(CheckpointError):
    """A checkpoint is not signed, or not with the key of its place."""


def beside(final: Path, what: str) -> Path:
    return final.with_name(f"{final.name}.{what}")


def step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def steps_in(root: Path) -> list[tuple[int, Path]]:
    """List step and directory of each checkpoint in `root`, valid or not, the newest first. Raises CheckpointError."""
    return [(int(place.name.rpartition("-")[2]), root / place.name) for place in all_in(LocalFolder(root))]


def all_in(folder: Folder) -> list[Folder]:
    """List the checkpoints in a folder, valid or not, the newest first. Raises CheckpointError."""
    with reading(folder):
        return [place for _, place in steps_of(folder)]


def exists(place: Place) -> bool:
    """Return whether a place exists. Raises CheckpointError if it cannot be read."""
    with reading(place):
        return place.sizes() is not None


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 of a file; of each of its chunks, too, if it is signed and read in part."""

    __pydantic_config__: ClassVar = _STRICT
    size: Count
    sha256: str
    chunks: Annotated[tuple[str, ...], Strict(False)] = field(default=(), compare=False)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        step: number of optimizer steps done.
        strategy, mesh, world_size: layout it was saved under; `mesh` maps each axis to its degree.
        versions: of python, torch, transformers and meshwright.
        scheduler: state of the learning-rate schedule; None without one.
        extra: values of the caller, JSON.
        files: by name, relative to the checkpoint.
        base: of a checkpoint that holds adapters alone: see `meshwright.model.adapter.Base`.
        is_signed: whether it has a signature, which was checked if the place it was read from has a key.
    """

    __pydantic_config__: ClassVar = _STRICT
    step: Count
    strategy: str
    mesh: dict[str, int]
    world_size: Count
    versions: dict[str, str]
    has_optimizer: bool = False
    scheduler: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    files: dict[str, StoredFile] = field(default_factory=dict)
    format: int = FORMAT
    base: dict[str, Any] | None = None
    is_signed: bool = False


_MANIFEST = TypeAdapter(Manifest)


def read_manifest(where: Where) -> Manifest:
    """Read a checkpoint's manifest, and check that its files exist and have their sizes.

    Raises:
        TornCheckpointError: the checkpoint was never completed, or is no longer complete.
        ForeignCheckpointError: it is not signed with the key of its place.
        CheckpointError: it does not exist, cannot be read, or is of another version of meshwright.
    """
    place = place_of(where)
    manifest, sizes = manifest_and_sizes(place)
    for name in manifest.files:
        reason = wrong_size(manifest, sizes, name)
        if reason is not None:
            raise broken(place, reason)
    return manifest


def manifest_and_sizes(place: Place) -> tuple[Manifest, dict[str, int]]:
    """Return the manifest, and the size of each file that exists. Raises as `read_manifest`."""
    with reading(place):
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
    return _parsed(place, content), sizes


def _parsed(place: Place, text: bytes) -> Manifest:
    try:
        content = json.loads(text.decode())
        # A text that was altered differs from what is written, though it may mean the same.
        is_as_written = text.decode() == _text_of(content)
        version = content.pop("format")
        if version not in (FORMAT, OF_ADAPTERS):
            raise CheckpointError(
                f"{place} has format {version!r:.20}, but this meshwright reads {FORMAT} and {OF_ADAPTERS}. Load it "
                f"with the version that has written it: {content.get('versions')!r:.200}."
            )
        signature = content.pop(SIGNATURE, None)
        checksum = content.pop("sha256")
        if not is_as_written or checksum != _digest(content):
            raise ValueError("its checksum is another")
        files = {_plain_name(name): StoredFile(**each) for name, each in content.pop("files").items()}
        manifest = Manifest(**content, files=files, format=version, is_signed=signature is not None)
        manifest = checked_by(_MANIFEST.validate_python, manifest)
        check_extra(manifest.extra)
        if (manifest.base is None) is (version == OF_ADAPTERS):
            raise ValueError("only one of adapters names a base")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise broken(place, f"{MANIFEST} was altered or cut off ({error})") from None
    key = place.access.key
    if key is not None and not key.has_signed(version, checksum, signature):
        reason = "is not signed" if signature is None else "is signed with another key"
        raise ForeignCheckpointError(
            f"the checkpoint {place} {reason}, and a key is given (checkpoint.key_file, or --key-file). Give the key "
            f"that it was signed with, or none if you trust it; or go on from another. It was neither changed nor "
            f"removed."
        )
    # Somebody may have put an older checkpoint in the place of a newer one.
    named = STEP.fullmatch(place.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(
            f"the checkpoint {place} is of step {manifest.step}, and not of the step that it is called by. Give it its "
            f"own name, {step_name(manifest.step)}, if you have renamed it; else somebody has replaced it."
        )
    return manifest


def _plain_name(name: str) -> str:
    path = PurePath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it names {name!r}, which is not within it")
    return name


def wrong_size(manifest: Manifest, sizes: Mapping[str, int], name: str) -> str | None:
    """Say what is wrong with the size of a file; None if nothing is."""
    size, expected = sizes.get(name), manifest.files[name].size
    if size == expected:
        return None
    return f"{name} is missing" if size is None else f"{name} has {size} bytes instead of {expected}"


def verify(where: Where, manifest: Manifest, names: Sequence[str]) -> None:
    """Compare the checksums of some of a checkpoint's files. Raises TornCheckpointError or CheckpointError."""
    place = place_of(where)
    for name in names:
        stored = stored_in(place, name)
        if stored != manifest.files[name]:
            raise changed(place, name)


def read_and_verified(where: Where) -> Manifest:
    """Read the manifest, and verify all files. Raises as `read_manifest` and `verify`."""
    manifest = read_manifest(where)
    verify(where, manifest, list(manifest.files))
    return manifest


def read_verified(where: Where, manifest: Manifest, name: str) -> bytes:
    """Read one of a checkpoint's files, and compare its checksum. Raises TornCheckpointError or CheckpointError."""
    place = place_of(where)
    if name not in manifest.files:
        raise broken(place, f"{MANIFEST} names no {name}")
    with reading(place), place.open(name) as file:
        content = file.read()
    if StoredFile(len(content), hashlib.sha256(content).hexdigest()) != manifest.files[name]:
        raise changed(place, name)
    return content


def stored_in(place: Place, name: str) -> StoredFile:
    """Compute size and checksum of a file as it is. Raises CheckpointError if it cannot be read."""
    with reading(place), place.open(name) as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return StoredFile(file.tell(), checksum)


def broken(where: Where, reason: str) -> TornCheckpointError:
    place = place_of(where)
    return TornCheckpointError(f"the checkpoint {place} is not whole: {reason}.{place.hint()}")


def changed(place: Place, name: str) -> TornCheckpointError:
    return broken(place, f"the contents of {name} have changed since it was written")


def unreadable(where: Where, error: OSError) -> CheckpointError:
    """Return the error of a file of a checkpoint that cannot be read."""
    # Not a TornCheckpointError: the checkpoint may be complete once the file system works again.
    return CheckpointError(
        f"{where} cannot be read: {error}. See to it that it can; or move it away, if it is not to be used."
    )


@contextmanager
def reading(where: Where) -> Iterator[None]:
    """Turn an OSError into a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise unreadable(where, error) from None


def sealed(manifest: Manifest, key: Key | None) -> str:
    """Return the text of a manifest, with its checksum and, if there is a key, a signature."""
    content = asdict(manifest)
    version = content.pop("format")
    del content["is_signed"]
    if manifest.base is None:
        del content["base"]
    for stored in content["files"].values():
        if not stored["chunks"]:
            del stored["chunks"]
    checksum = _digest(content)
    signature = {} if key is None else {SIGNATURE: key.signature(version, checksum)}
    return _text_of({"format": version, "sha256": checksum, **signature, **content})


def _text_of(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Chunks:
    """Checksums of the chunks of a file that is written in parts."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._digest, self._room = hashlib.sha256(), CHUNK

    def update(self, part: Any) -> None:
        rest = memoryview(part).cast("B")
        while rest:
            some, rest = rest[: self._room], rest[self._room :]
            self._digest.update(some)
            self._room -= some.nbytes
            if not self._room:
                self._end()

    def digests(self) -> tuple[str, ...]:
        """Return the checksums of all chunks, the last of which may be shorter. Nothing can be added afterwards."""
        if self._room < CHUNK:
            self._end()
        return tuple(self._done)

    def _end(self) -> None:
        self._done.append(self._digest.hexdigest())
        self._digest, self._room = hashlib.sha256(), CHUNK


def open_verified(place: Place, manifest: Manifest, name: str) -> AbstractContextManager[BinaryIO]:
    """Open a file of a checkpoint to read parts of it; signed chunks are verified as they are read. Raises OSError."""
    file, stored = place.open(name), manifest.files[name]
    if place.access.key is None or not stored.chunks:
        return file
    return io.BufferedReader(_Verified(file, stored, place, name), 1)


class _Verified(SeekableReader):
    """A file whose chunks are compared with their checksums; reading one that changed raises CheckpointError."""

    def __init__(self, file: BinaryIO, stored: StoredFile, place: Place, name: str) -> None:
        super().__init__(name)
        self._file, self._stored, self._place = file, stored, place
        self._number, self._chunk = -1, b""

    def _size(self) -> int:
        return self._stored.size

    def _read_at(self, position: int, buffer: memoryview) -> int:
        number, begin = divmod(position, CHUNK)
        if not buffer or position >= self._stored.size:
            return 0
        if number != self._number:
            self._chunk, self._number = self._read_chunk(number), number
        some = self._chunk[begin : begin + buffer.nbytes]
        buffer[: len(some)] = some
        return len(some)

    def _read_chunk(self, number: int) -> bytes:
        self._file.seek(number * CHUNK)
        found = self._file.read(min(CHUNK, self._stored.size - number * CHUNK))
        expected = self._stored.chunks[number : number + 1]
        if (hashlib.sha256(found).hexdigest(),) != expected:
            raise changed(self._place, self.name)
        return found

    def close(self) -> None:
        self._file.close()
        super().close()
