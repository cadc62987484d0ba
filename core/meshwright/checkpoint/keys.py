"""Signatures of checkpoints, which show who wrote a checkpoint and that it has not changed since.

The manifest holds checksums of all files and of itself. The signature is an HMAC-SHA256 of that checksum and of the
format, so it covers every byte. The key is in no checkpoint, message or run file. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import NoReturn

from ..base.errors import CheckpointError, ConfigError
from ..files.parsing import read_regular

LEAST_BYTES = 32


class ForeignCheckpointError(CheckpointError):
    """A checkpoint is not signed, or not with the key of its place."""


class Key:
    """A secret of at least 32 bytes. It is never printed or sent."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return "Key(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is sent to nobody: each process reads the file")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return self.fingerprint

    @property
    def fingerprint(self) -> int:
        """A number below 2**62 by which ranks compare keys without revealing them."""
        return int.from_bytes(self._signed(b"meshwright key")[:8]) >> 2

    def signature(self, version: int, checksum: str) -> str:
        """Sign a manifest of this format and checksum."""
        return self._signed(f"meshwright checkpoint {version} {checksum}".encode()).hex()

    def has_signed(self, version: int, checksum: str, signature: str | None) -> bool:
        own = self.signature(version, checksum)
        return isinstance(signature, str) and hmac.compare_digest(own.encode(), signature.encode())

    def _signed(self, text: bytes) -> bytes:
        return hmac.new(self._secret, text, hashlib.sha256).digest()


def read_key(path: str | Path, *, where: str) -> Key:
    """Read the key that a file holds: all of its bytes.

    Args:
        where: what names the file in errors, such as "checkpoint.key_file".

    Raises:
        ConfigError: the file cannot be read, or is too short for a secret.
    """
    try:
        secret = read_regular(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(
            f"{where}={str(path)!r} cannot be read: {error.strerror}. Name a file with a secret of at least "
            f"{LEAST_BYTES} bytes; openssl rand -out FILE {LEAST_BYTES} makes one."
        ) from None
    if len(secret) < LEAST_BYTES:
        raise ConfigError(
            f"{where}={str(path)!r} holds {len(secret)} bytes, which are too few for a secret: at least {LEAST_BYTES}. "
            f"openssl rand -out FILE {LEAST_BYTES} makes one."
        )
    return Key(secret)
