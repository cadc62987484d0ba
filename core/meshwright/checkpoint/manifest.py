"""The manifest of a checkpoint: its files with sizes and checksums, and their verification.

Any process that can write to a checkpoint's directory may replace a file after it was verified. If a key is given, the
manifest therefore holds a checksum for each block of the files that are read in part. A block is verified before its
bytes are used. This module imports no torch.
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

from ..base.errors import CheckpointError, IncompleteCheckpointError
from .extra_schema import Count, check_extra, validate_with
from .remote_storage import open_storage
from .storage import (
    STEP_PATTERN,
    LocalStorage,
    SeekableReader,
    SigningKey,
    Storage,
    StorageLike,
    StorageReader,
    list_step_checkpoints,
)

MANIFEST_FILE = "checkpoint.json"
"""Name of a checkpoint's manifest, which is written last."""
SIGNATURE_KEY = "hmac_sha256"
"""Key of the signature in the manifest, if there is one."""
FORMAT, ADAPTER_FORMAT = 2, 3
"""Format versions of full models, and of adapters without their base."""
TENSORS_PREFIX = "tensors-"
"""Name prefix of the files that hold tensors. These files are read in part."""
BLOCK_BYTES = 1 << 24
"""Size in bytes of the blocks in which signed tensor files are verified."""
TEMPORARY_SUFFIXES = (".writing", ".replaced", ".deleting")
"""Name suffixes of checkpoints and models that are incomplete or about to be removed."""
_MAX_MANIFEST_BYTES = 1 << 28
_STRICT = ConfigDict(strict=True, revalidate_instances="always")


class CheckpointSignatureError(CheckpointError):
    """A checkpoint is unsigned or not signed with the key of its storage."""


def sibling_path(final: Path, suffix: str) -> Path:
    return final.with_name(f"{final.name}.{suffix}")


def format_step_name(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def list_steps(root: Path) -> list[tuple[int, Path]]:
    """List step and directory of each checkpoint in `root`, valid or not, newest first. Raises CheckpointError."""
    return [
        (int(checkpoint.name.rpartition("-")[2]), root / checkpoint.name)
        for checkpoint in list_checkpoints(LocalStorage(root))
    ]


def list_checkpoints(storage: Storage) -> list[Storage]:
    """List the checkpoints in a directory, valid or not, newest first. Raises CheckpointError."""
    with convert_read_errors(storage):
        return [checkpoint for _, checkpoint in list_step_checkpoints(storage)]


def storage_exists(storage: StorageReader) -> bool:
    """Return whether a storage exists. Raises CheckpointError if it cannot be read."""
    with convert_read_errors(storage):
        return storage.list_file_sizes() is not None


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes and SHA-256 of a file. `chunks`: SHA-256 of each block of a signed tensor file."""

    __pydantic_config__: ClassVar = _STRICT
    size: Count
    sha256: str
    chunks: Annotated[tuple[str, ...], Strict(False)] = field(default=(), compare=False)


@dataclass(frozen=True)
class Manifest:
    """Metadata of a checkpoint.

    Attributes:
        step: number of optimizer steps done.
        strategy, mesh, world_size: layout it was saved under; `mesh` maps each axis to its degree.
        versions: versions of python, torch, transformers and meshwright.
        scheduler: state of the learning-rate scheduler; None without one.
        extra: JSON values of the caller.
        files: the files by name, relative to the checkpoint.
        base: base of a checkpoint that holds only adapters; see `meshwright.model.adapter.BaseModelRef`.
        is_signed: whether it has a signature. The signature was verified if the storage has a key.
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


_MANIFEST_ADAPTER = TypeAdapter(Manifest)


def read_manifest(checkpoint: StorageLike) -> Manifest:
    """Read a checkpoint's manifest, and check that its files exist and have their recorded sizes.

    Raises:
        IncompleteCheckpointError: the checkpoint was never completed, or is no longer complete.
        CheckpointSignatureError: it is not signed with the key of its storage.
        CheckpointError: it does not exist, cannot be read, or is of another version of meshwright.
    """
    storage = open_storage(checkpoint)
    manifest, sizes = read_manifest_and_sizes(storage)
    for name in manifest.files:
        reason = find_size_error(manifest, sizes, name)
        if reason is not None:
            raise incomplete_error(storage, reason)
    return manifest


def read_manifest_and_sizes(storage: StorageReader) -> tuple[Manifest, dict[str, int]]:
    """Return the manifest and the size of each existing file. Raises like `read_manifest`."""
    with convert_read_errors(storage):
        sizes = storage.list_file_sizes()
        if sizes is None:
            raise CheckpointError(f"{storage} is no checkpoint: it is no directory.{storage.format_hint()}")
        if MANIFEST_FILE not in sizes:
            raise IncompleteCheckpointError(
                f"{storage} is no checkpoint: it has no {MANIFEST_FILE}, so it was never "
                f"completed.{storage.format_hint()}"
            )
        if sizes[MANIFEST_FILE] > _MAX_MANIFEST_BYTES:
            raise incomplete_error(
                storage,
                f"{MANIFEST_FILE} has {sizes[MANIFEST_FILE]} bytes, and no manifest has more than "
                f"{_MAX_MANIFEST_BYTES}",
            )
        with storage.open(MANIFEST_FILE) as file:
            content = file.read()
    return _parse_manifest(storage, content), sizes


def _parse_manifest(storage: StorageReader, text: bytes) -> Manifest:
    try:
        content = json.loads(text.decode())
        # An altered text differs from the canonical one, even if both parse to the same values.
        is_as_written = text.decode() == _to_text(content)
        version = content.pop("format")
        if version not in (FORMAT, ADAPTER_FORMAT):
            raise CheckpointError(
                f"{storage} has format {version!r:.20}, but this meshwright reads {FORMAT} and {ADAPTER_FORMAT}. Load "
                f"it with the version that has written it: {content.get('versions')!r:.200}."
            )
        signature = content.pop(SIGNATURE_KEY, None)
        checksum = content.pop("sha256")
        if not is_as_written or checksum != _compute_checksum(content):
            raise ValueError("its checksum is another")
        files = {_check_relative_name(name): StoredFile(**each) for name, each in content.pop("files").items()}
        manifest = Manifest(**content, files=files, format=version, is_signed=signature is not None)
        manifest = validate_with(_MANIFEST_ADAPTER.validate_python, manifest)
        check_extra(manifest.extra)
        if (manifest.base is None) is (version == ADAPTER_FORMAT):
            raise ValueError("only one of adapters names a base")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise incomplete_error(storage, f"{MANIFEST_FILE} was altered or cut off ({error})") from None
    key = storage.options.key
    if key is not None and not key.verify(version, checksum, signature):
        reason = "is not signed" if signature is None else "is signed with another key"
        raise CheckpointSignatureError(
            f"the checkpoint {storage} {reason}, and a key is given (checkpoint.key_file, or --key-file). Give the key "
            f"that it was signed with, or none if you trust it; or resume from another. It was neither changed nor "
            f"removed."
        )
    # An older checkpoint may have been renamed to a newer step.
    step_match = STEP_PATTERN.fullmatch(storage.name)
    if step_match and int(step_match[1]) != manifest.step:
        raise CheckpointError(
            f"the checkpoint {storage} is of step {manifest.step}, and not of the step that it is called by. Give it "
            f"its own name, {format_step_name(manifest.step)}, if you have renamed it; else somebody has replaced it."
        )
    return manifest


def _check_relative_name(name: str) -> str:
    path = PurePath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it names {name!r}, which is not within it")
    return name


def find_size_error(manifest: Manifest, sizes: Mapping[str, int], name: str) -> str | None:
    """Describe a missing file or a wrong size; return None if the file has its recorded size."""
    size, expected = sizes.get(name), manifest.files[name].size
    if size == expected:
        return None
    return f"{name} is missing" if size is None else f"{name} has {size} bytes instead of {expected}"


def verify_files(checkpoint: StorageLike, manifest: Manifest, names: Sequence[str]) -> None:
    """Verify the checksums of the named files. Raises IncompleteCheckpointError or CheckpointError."""
    storage = open_storage(checkpoint)
    for name in names:
        stored = compute_stored_file(storage, name)
        if stored != manifest.files[name]:
            raise checksum_error(storage, name)


def read_and_verify(checkpoint: StorageLike) -> Manifest:
    """Read the manifest and verify all files. Raises like `read_manifest` and `verify_files`."""
    manifest = read_manifest(checkpoint)
    verify_files(checkpoint, manifest, list(manifest.files))
    return manifest


def read_verified_file(checkpoint: StorageLike, manifest: Manifest, name: str) -> bytes:
    """Read a file of a checkpoint and verify its checksum. Raises IncompleteCheckpointError or CheckpointError."""
    storage = open_storage(checkpoint)
    if name not in manifest.files:
        raise incomplete_error(storage, f"{MANIFEST_FILE} names no {name}")
    with convert_read_errors(storage), storage.open(name) as file:
        content = file.read()
    if StoredFile(len(content), hashlib.sha256(content).hexdigest()) != manifest.files[name]:
        raise checksum_error(storage, name)
    return content


def compute_stored_file(storage: StorageReader, name: str) -> StoredFile:
    """Compute size and checksum of a file. Raises CheckpointError if it cannot be read."""
    with convert_read_errors(storage), storage.open(name) as file:
        checksum = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        return StoredFile(file.tell(), checksum)


def incomplete_error(checkpoint: StorageLike, reason: str) -> IncompleteCheckpointError:
    storage = open_storage(checkpoint)
    return IncompleteCheckpointError(f"the checkpoint {storage} is not whole: {reason}.{storage.format_hint()}")


def checksum_error(storage: StorageReader, name: str) -> IncompleteCheckpointError:
    return incomplete_error(storage, f"the contents of {name} have changed since it was written")


def unreadable_error(checkpoint: StorageLike, error: OSError) -> CheckpointError:
    """Return the error for a checkpoint whose files cannot be read."""
    # Not an IncompleteCheckpointError: the checkpoint may be complete once the file system works again.
    return CheckpointError(
        f"{checkpoint} cannot be read: {error}. See to it that it can; or move it away, if it is not to be used."
    )


@contextmanager
def convert_read_errors(checkpoint: StorageLike) -> Iterator[None]:
    """Convert an OSError to a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise unreadable_error(checkpoint, error) from None


def serialize_manifest(manifest: Manifest, key: SigningKey | None) -> str:
    """Return the text of a manifest with its checksum and, given a key, its signature."""
    content = asdict(manifest)
    version = content.pop("format")
    del content["is_signed"]
    if manifest.base is None:
        del content["base"]
    for stored in content["files"].values():
        if not stored["chunks"]:
            del stored["chunks"]
    checksum = _compute_checksum(content)
    signature = {} if key is None else {SIGNATURE_KEY: key.sign(version, checksum)}
    return _to_text({"format": version, "sha256": checksum, **signature, **content})


def _to_text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def _compute_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class BlockHasher:
    """Compute the checksum of each block of a file that is written in parts."""

    def __init__(self) -> None:
        self._digests: list[str] = []
        self._digest, self._remaining_bytes = hashlib.sha256(), BLOCK_BYTES

    def update(self, part: Any) -> None:
        rest = memoryview(part).cast("B")
        while rest:
            block_part, rest = rest[: self._remaining_bytes], rest[self._remaining_bytes :]
            self._digest.update(block_part)
            self._remaining_bytes -= block_part.nbytes
            if not self._remaining_bytes:
                self._finish_block()

    def digests(self) -> tuple[str, ...]:
        """Return the checksums of all blocks, of which the last may be shorter. Ends the computation."""
        if self._remaining_bytes < BLOCK_BYTES:
            self._finish_block()
        return tuple(self._digests)

    def _finish_block(self) -> None:
        self._digests.append(self._digest.hexdigest())
        self._digest, self._remaining_bytes = hashlib.sha256(), BLOCK_BYTES


def open_verified(storage: StorageReader, manifest: Manifest, name: str) -> AbstractContextManager[BinaryIO]:
    """Open a file for partial reads; blocks of a signed file are verified as they are read. Raises OSError."""
    file, stored = storage.open(name), manifest.files[name]
    if storage.options.key is None or not stored.chunks:
        return file
    return io.BufferedReader(_VerifyingReader(file, stored, storage, name), 1)


class _VerifyingReader(SeekableReader):
    """A file whose blocks are verified as they are read; a changed block raises CheckpointError."""

    def __init__(self, file: BinaryIO, stored: StoredFile, storage: StorageReader, name: str) -> None:
        super().__init__(name)
        self._file, self._stored, self._storage = file, stored, storage
        self._block_index, self._block = -1, b""

    def _size(self) -> int:
        return self._stored.size

    def _read_at(self, position: int, buffer: memoryview) -> int:
        number, begin = divmod(position, BLOCK_BYTES)
        if not buffer or position >= self._stored.size:
            return 0
        if number != self._block_index:
            self._block, self._block_index = self._read_block(number), number
        content = self._block[begin : begin + buffer.nbytes]
        buffer[: len(content)] = content
        return len(content)

    def _read_block(self, number: int) -> bytes:
        self._file.seek(number * BLOCK_BYTES)
        content = self._file.read(min(BLOCK_BYTES, self._stored.size - number * BLOCK_BYTES))
        expected = self._stored.chunks[number : number + 1]
        if (hashlib.sha256(content).hexdigest(),) != expected:
            raise checksum_error(self._storage, self.name)
        return content

    def close(self) -> None:
        self._file.close()
        super().close()
