"""Protocol between ranks and replica servers: JSON messages with a length prefix, with a descriptor or trailing bytes.

Processes of one node connect by a Unix socket in a directory of mode 0700 (any user could take the name of an abstract
socket first), and check the user at the other end, which the kernel reports. Across nodes, both sides prove that they
know the run's token, without sending it. Before that, a side reads at most `_MAX_UNAUTHENTICATED_BYTES` bytes, and a
server waits at most `AUTH_TIMEOUT_S` seconds in total. This module imports no torch.
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
_MAX_MESSAGE_BYTES = 1 << 28  # Maximum size of a message
_MAX_UNAUTHENTICATED_BYTES = 1 << 12
_RECEIVE_BYTES = 1 << 16
AUTH_TIMEOUT_S = 5.0  # Time in which a client must prove that it knows the token
IO_TIMEOUT_S = 60.0  # Time to wait for the other side


def send_message(sock: socket.socket, message: Mapping[str, Any], fd: int | None = None) -> None:
    """Send a message, with a file descriptor if the other process is on this node."""
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
    """Receive a message and its file descriptor, if it has one. Raises OSError, also after the deadline."""
    _set_deadline(sock, deadline_s)
    head, files, _, _ = socket.recv_fds(sock, _LENGTH_HEADER.size, 1, socket.MSG_CMSG_CLOEXEC)
    file = files[0] if files else None
    try:
        while len(head) < _LENGTH_HEADER.size:
            head += _receive_some(sock, _LENGTH_HEADER.size - len(head), deadline_s)
        (length,) = _LENGTH_HEADER.unpack(head)
        if length > max_bytes:
            raise OSError(f"the message is too long: {length} bytes")
        text = bytearray()
        while len(text) < length:
            text += _receive_some(sock, min(length - len(text), _RECEIVE_BYTES), deadline_s)
        message = json.loads(text)
        if not isinstance(message, dict):
            raise OSError("the message is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        if file is not None:
            os.close(file)
        raise error if isinstance(error, OSError) else OSError("the message is not valid JSON") from error
    return message, file


def _set_deadline(sock: socket.socket, deadline_s: float | None) -> None:
    if deadline_s is not None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("authentication timed out")
        sock.settimeout(left_s)


def _receive_some(sock: socket.socket, max_bytes: int, deadline_s: float | None) -> bytes:
    _set_deadline(sock, deadline_s)
    received = sock.recv(max_bytes)
    if not received:
        raise ConnectionResetError("the connection was closed")
    return received


def receive_into(sock: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer with received bytes. Raises OSError if the connection is closed before."""
    while buffer.nbytes:
        count = sock.recv_into(buffer)
        if not count:
            raise ConnectionResetError("the connection was closed")
        buffer = buffer[count:]


class Connection:
    """A rank's connection to a replica server. Methods raise OSError if the server is gone or rejects a request."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.settimeout(IO_TIMEOUT_S)

    def request(self, command: str, fd: int | None = None, chunks: Iterable[Any] = (), **values: Any) -> dict[str, Any]:
        """Send a request, with a file descriptor or bytes, and return the response."""
        response, fd_received = self._request(command, fd, chunks, values)
        if fd_received is not None:
            os.close(fd_received)
        return response

    def request_file(self, command: str, **values: Any) -> int:
        """Send a request, and return the file descriptor of the response, which the caller must close."""
        fd_received = self._request(command, None, (), values)[1]
        if fd_received is None:
            raise OSError("the replica server sent no file")
        return fd_received

    def request_into(self, buffer: memoryview, command: str, **values: Any) -> None:
        """Send a request, and fill a buffer with the bytes that follow the response."""
        self.request(command, **values)
        receive_into(self._socket, buffer)

    def _request(
        self, command: str, fd: int | None, chunks: Iterable[Any], values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int | None]:
        send_message(self._socket, {"command": command, **values}, fd)
        for chunk in chunks:
            self._socket.sendall(chunk)
        response, fd_received = receive_message(self._socket)
        if "error" in response:
            raise OSError(f"the replica server rejected the request: {response['error']}")
        return response, fd_received

    def close(self) -> None:
        self._socket.close()


def check_user(sock: socket.socket) -> None:
    """Raise PermissionError if the process at the other end belongs to another user of this node."""
    _, user, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if user != os.geteuid():
        raise PermissionError(f"the other process belongs to user {user}")


def authenticate_client(sock: socket.socket, token: str) -> None:
    """Check that a client knows the token, and prove it to the client. Raises OSError, also after a timeout."""
    until_s, mine = time.monotonic() + AUTH_TIMEOUT_S, secrets.token_hex(32)
    sock.settimeout(AUTH_TIMEOUT_S)
    send_message(sock, {"nonce": mine})
    response, file = receive_message(sock, max_bytes=_MAX_UNAUTHENTICATED_BYTES, deadline_s=until_s)
    if file is not None:
        os.close(file)
    theirs = str(response.get("nonce"))
    if not _is_valid_proof(response, token, "client", mine, theirs):
        send_message(sock, {"error": "the token is wrong"})
        raise PermissionError("the client does not know the token")
    send_message(sock, {"proof": _compute_proof(token, "server", mine, theirs)})


def authenticate_to_server(sock: socket.socket, token: str) -> None:
    """Prove to a server that this rank knows the token, and check that the server does. Raises OSError."""
    until_s = time.monotonic() + IO_TIMEOUT_S
    theirs = str(receive_message(sock, max_bytes=_MAX_UNAUTHENTICATED_BYTES, deadline_s=until_s)[0].get("nonce"))
    mine = secrets.token_hex(32)
    send_message(sock, {"nonce": mine, "proof": _compute_proof(token, "client", theirs, mine)})
    response, _ = receive_message(sock, max_bytes=_MAX_UNAUTHENTICATED_BYTES, deadline_s=until_s)
    if not _is_valid_proof(response, token, "server", theirs, mine):
        raise PermissionError("the replica server has another token")


def _is_valid_proof(answer: Mapping[str, Any], token: str, role: str, *nonces: str) -> bool:
    own, theirs = _compute_proof(token, role, *nonces), str(answer.get("proof"))
    return hmac.compare_digest(own.encode(), theirs.encode(errors="replace"))


def _compute_proof(token: str, role: str, *nonces: str) -> str:
    return hmac.new(token.encode(), " ".join((role, *nonces)).encode(errors="replace"), hashlib.sha256).hexdigest()


_MAX_PATH_LENGTH = 100  # Characters of a socket's path; systems allow 104 or 108
_BACKLOG = 128


def get_socket_path(name: str) -> Path:
    """Return the path of a socket in a private directory of this user. Raises OSError."""
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
    """Listen on a Unix socket, and remove sockets of dead processes; return None if a living process listens."""
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
    """Remove the files that `listen_on_socket` has created."""
    for each in (path, path.with_suffix(".lock")):
        with suppress(OSError):
            each.unlink()


def _is_private(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


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
