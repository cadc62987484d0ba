"""The socket by which a node's ranks find their keeper, in a directory that other users cannot enter.

Anyone may take the name of an abstract socket first; a directory of mode 0700 keeps out all but its owner and root.
This module imports no torch.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_LONGEST = 100
"""Characters of a socket's path; systems allow 104 or 108."""
_BACKLOG = 128


def socket_path(name: str) -> Path:
    """Return the path of a socket of this user, in XDG_RUNTIME_DIR or the directory for temporary files.

    Raises OSError if the directory is another user's, or open to others, or its path is too long.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    parent = runtime if runtime and _is_private(Path(runtime)) else tempfile.gettempdir()
    directory = Path(parent) / f"meshwright-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(directory):
        raise OSError(
            f"{directory} belongs to another user, is a link, or is open to other users; set XDG_RUNTIME_DIR to a "
            f"directory of your own (chmod 700)"
        )
    path = directory / f"{name}.sock"
    if len(str(path)) > _LONGEST:
        raise OSError(f"{path} is too long for a socket; set XDG_RUNTIME_DIR to a directory with a shorter path")
    return path


def listen_at(path: Path) -> socket.socket | None:
    """Listen at a path; return None if a living process does so, as its lock file shows.

    Removes what dead processes left in the directory.
    """
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not _locked(lock):
        os.close(lock)
        return None
    # The lock is held as long as this process lives.
    for other in path.parent.glob("*.lock"):
        if other != path.with_suffix(".lock"):
            _remove_if_dead(other)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(_BACKLOG)
    return listener


def remove(path: Path) -> None:
    """Remove the files that `listen_at` has made."""
    for each in (path, path.with_suffix(".lock")):
        with suppress(OSError):
            each.unlink()


def _is_private(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_if_dead(lock: Path) -> None:
    with suppress(OSError):
        file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if _locked(file):
                remove(lock.with_suffix(".sock"))
        finally:
            os.close(file)
