"""The protocol of ranks and keepers: JSON messages after their length, followed by bytes or with an open file.

Processes of one node meet at a socket in a directory of mode 0700 (anyone may take the name of an abstract socket
first), and know each other by their user, which the system tells. Across nodes both sides prove that they know the
run's token, without sending it. Until then a side reads at most `_MAX_UNAUTHENTICATED_BYTES` bytes and waits
`AUTH_TIMEOUT_S` seconds in all. This module imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_LENGTH_HEADER = struct.Struct(">Q")
_UCRED = struct.Struct("3i")
_MAX_MESSAGE_BYTES = 1 << 28  # Bytes of a message
_MAX_UNAUTHENTICATED_BYTES = 1 << 12
_RECEIVE_BYTES = 1 << 16
AUTH_TIMEOUT_S = 5.0  # Time in which a stranger has to prove that it knows the token
IO_TIMEOUT_S = 60.0  # Time to wait for the other side


def send_message(sock: socket.socket, message: Mapping[str, Any], fd: int | None = None) -> None:
    """Send a message, with an open file if the other process is on this node."""
    text = json.dumps(message).encode()
    head = _LENGTH_HEADER.pack(len(text))
    if fd is None:
        sock.sendall(head)
    else:
        socket.send_fds(sock, [head], [fd])
    sock.sendall(text)


def receive_message(
    sock: socket.socket, *, max_bytes: int = _MAX_MESSAGE_BYTES, deadline_s: float | None = None
) -> tuple[dict[str, Any], int | None]:
    """Receive a message, and the open file that came with it; raise OSError if that fails or comes too late."""
    _set_deadline(sock, deadline_s)
    head, files, _, _ = socket.recv_fds(sock, _LENGTH_HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
    file = files[0] if files else None
    try:
        while len(head) < _LENGTH_HEADER.size:
            head += _receive_some(sock, _LENGTH_HEADER.size - len(head), deadline_s)
        (length,) = _LENGTH_HEADER.unpack(head)
        if length > max_bytes:
            raise OSError(f"a message of {length} bytes")
        text = bytearray()
        while len(text) < length:
            text += _receive_some(sock, min(length - len(text), _RECEIVE_BYTES), deadline_s)
        message = json.loads(text)
        if not isinstance(message, dict):
            raise OSError("a message that is none")
    except (OSError, ValueError, RecursionError) as error:
        if file is not None:
            os.close(file)
        raise error if isinstance(error, OSError) else OSError("a message that cannot be read") from error
    return message, file


def _set_deadline(sock: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is not None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no proof in time")
        sock.settimeout(left_s)


def _receive_some(sock: socket.socket, max_bytes: int, deadline_s: float | None) -> bytes:
    _set_deadline(sock, deadline_s)
    found = sock.recv(max_bytes)
    if not found:
        raise ConnectionResetError("the connection has ended")
    return found


def receive_into(sock: socket.socket, buffer: memoryview) -> None:
    """Receive as many bytes as there is room for. Raises OSError if there are fewer."""
    while buffer.nbytes:
        count = sock.recv_into(buffer)
        if not count:
            raise ConnectionResetError("the connection has ended")
        buffer = buffer[count:]


class Connection:
    """A rank's connection to a keeper. Its methods raise OSError if the keeper is gone, or refuses."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(IO_TIMEOUT_S)

    def request(self, command: str, fd: int | None = None, chunks: Iterable[Any] = (), **values: Any) -> dict[str, Any]:
        """Send a request, with an open file or bytes, and return the answer."""
        answer, handed = self._request(command, fd, chunks, values)
        if handed is not None:
            os.close(handed)
        return answer

    def request_file(self, command: str, **values: Any) -> int:
        """Return the open file of the answer, which the caller must close."""
        handed = self._request(command, None, (), values)[1]
        if handed is None:
            raise OSError("the keeper gives no file")
        return handed

    def request_into(self, buffer: memoryview, command: str, **values: Any) -> None:
        """Receive the bytes that follow the answer, as many as there is room for."""
        self.request(command, **values)
        receive_into(self._socket, buffer)

    def _request(
        self, command: str, fd: int | None, chunks: Iterable[Any], values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int | None]:
        send_message(self._socket, {"command": command, **values}, fd)
        for part in chunks:
            self._socket.sendall(part)
        answer, handed = receive_message(self._socket)
        if "error" in answer:
            raise OSError(f"the keeper refuses: {answer['error']}")
        return answer, handed

    def close(self) -> None:
        self._socket.close()


def check_user(sock: socket.socket) -> None:
    """Raise PermissionError if the process at the other end belongs to another user of this node."""
    _, user, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if user != os.geteuid():
        raise PermissionError(f"a process of user {user}")


def authenticate_client(sock: socket.socket, token: str) -> None:
    """Prove to each other that both sides know the token, on the keeper's side; raise OSError if not in time."""
    until_s, mine = time.monotonic() + AUTH_TIMEOUT_S, secrets.token_hex(32)
    sock.settimeout(AUTH_TIMEOUT_S)
    send_message(sock, {"nonce": mine})
    answer, file = receive_message(sock, max_bytes=_MAX_UNAUTHENTICATED_BYTES, deadline_s=until_s)
    if file is not None:
        os.close(file)
    theirs = str(answer.get("nonce"))
    if not _is_valid_proof(answer, token, "client", mine, theirs):
        send_message(sock, {"error": "the token is another"})
        raise PermissionError("somebody without the token")
    send_message(sock, {"proof": _compute_proof(token, "server", mine, theirs)})


def authenticate_to_server(sock: socket.socket, token: str) -> None:
    """Prove to the keeper that this rank knows the token, and check the keeper's proof. Raises OSError."""
    until_s = time.monotonic() + IO_TIMEOUT_S
    theirs = str(receive_message(sock, max_bytes=_MAX_UNAUTHENTICATED_BYTES, deadline_s=until_s)[0].get("nonce"))
    mine = secrets.token_hex(32)
    send_message(sock, {"nonce": mine, "proof": _compute_proof(token, "client", theirs, mine)})
    answer, _ = receive_message(sock, max_bytes=_MAX_UNAUTHENTICATED_BYTES, deadline_s=until_s)
    if not _is_valid_proof(answer, token, "server", theirs, mine):
        raise PermissionError("the keeper has another token")


def _is_valid_proof(answer: Mapping[str, Any], token: str, role: str, *nonces: str) -> bool:
    own, theirs = _compute_proof(token, role, *nonces), str(answer.get("proof"))
    return hmac.compare_digest(own.encode(), theirs.encode(errors="replace"))


def _compute_proof(token: str, role: str, *nonces: str) -> str:
    return hmac.new(token.encode(), " ".join((role, *nonces)).encode(errors="replace"), hashlib.sha256).hexdigest()


_MAX_PATH_LENGTH = 100  # Characters of a socket's path; systems allow 104 or 108
_BACKLOG = 128


def get_socket_path(name: str) -> Path:
    """Return the path of a socket in a private directory of this user; raise OSError if there is none."""
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
    if len(str(path)) > _MAX_PATH_LENGTH:
        raise OSError(f"{path} is too long for a socket; set XDG_RUNTIME_DIR to a directory with a shorter path")
    return path


def listen_on_socket(path: Path) -> socket.socket | None:
    """Listen at a path, and remove what dead processes left there; return None if a living process listens."""
    lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if not _try_lock(lock):
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


def remove_socket(path: Path) -> None:
    """Remove the files that `listen_on_socket` has made."""
    for each in (path, path.with_suffix(".lock")):
        with suppress(OSError):
            each.unlink()


def _is_private(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_if_dead(lock: Path) -> None:
    with suppress(OSError):
        file = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if _try_lock(file):
                remove_socket(lock.with_suffix(".sock"))
        finally:
            os.close(file)
