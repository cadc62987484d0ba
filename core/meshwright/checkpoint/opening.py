"""Find the place that a path or a URL names. No torch in this module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import overload

from .places import DEFAULT, Access, Folder, LocalFolder, Place

# Chained ones, such as "simplecache::s3://bucket", are URLs, too, and refused.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::.*)?://", re.DOTALL)


def is_url(where: object) -> bool:
    """Whether something names a place by a URL, such as s3://bucket/prefix."""
    return isinstance(where, str) and _URL.match(where) is not None


@overload
def place_of(where: str | Path | Folder, access: Access = ...) -> Folder: ...
@overload
def place_of(where: str | Path | Place, access: Access = ...) -> Place: ...
def place_of(where: str | Path | Place, access: Access = DEFAULT) -> Place:
    """The place that a path or a URL names; a place stays itself, and is reached as it was.

    Raises:
        ConfigError: a URL is of a kind that is unknown, or whose package is not installed.
    """
    if isinstance(where, Path):
        return LocalFolder(where, access)
    if not isinstance(where, str):
        return where
    if not is_url(where):
        return LocalFolder(Path(where), access)
    from .remote import remote_folder

    return remote_folder(where, access)
