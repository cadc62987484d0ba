"""How ranks and keepers talk: messages of JSON with their length before them, and bytes or open files along with them.

Processes of one node are known to each other by their user, which the system tells. From another node both sides must
know the token of the run, without it being sent. Until then a side reads `_LONGEST_OF_STRANGERS` bytes at most, and
waits `PROOF_S` seconds in all.

This module imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from typing import Any

_LENGTH = struct.Struct(">Q")
_USER = struct.Struct("3i")
_LONGEST = 1 << 28
"""Bytes of a message; what claims to be longer is none."""
_AT_ONCE = 1 << 16
_LONGEST_OF_STRANGERS = 1 << 12
PROOF_S = 5.0
"""In which a stranger has to show that it knows the token."""
PATIENCE_S = 60.0
"""How long one waits for the other."""


def send(connection: socket.socket, message: Mapping[str, Any], file: int | None = None) -> None:
    """Send a message, and an open file to another process of this node."""
    text = json.dumps(message).encode()
    head = _LENGTH.pack(len(text))
    if file is None:
        connection.sendall(head)
    else:
        socket.send_fds(connection, [head], [file])
    connection.sendall(text)


def receive(
    connection: socket.socket, *, longest: int = _LONGEST, until_s: float | None = None
) -> tuple[dict[str, Any], int | None]:
    """A message, and the open file that came with it.

    Args:
        longest: bytes that it may have.
        until_s: by the monotonic clock, when it has to be here; None: as long as the connection's own limit.

    Raises:
        OSError: the other has gone, talks differently, or is late.
    """
    _wait_until(connection, until_s)
    head, files, _, _ = socket.recv_fds(connection, _LENGTH.size, 1, socket.MSG_CMSG_CLOEXEC)
    file = files[0] if files else None
    try:
        while len(head) < _LENGTH.size:
            _wait_until(connection, until_s)
            head += _some(connection, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > longest:
            raise OSError(f"a message of {length} bytes")
        text = bytearray()
        while len(text) < length:
            _wait_until(connection, until_s)
            text += _some(connection, min(length - len(text), _AT_ONCE))
        message = json.loads(text)
        if not isinstance(message, dict):
            raise OSError("a message that is none")
    except (OSError, ValueError, RecursionError) as error:
        if file is not None:
            os.close(file)
        raise error if isinstance(error, OSError) else OSError("a message that cannot be read") from error
    return message, file


def _wait_until(connection: socket.socket, until_s: float | None) -> None:
    """Let the next wait on a connection end by then."""
    if until_s is not None:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no proof in time")
        connection.settimeout(left_s)


def fill(connection: socket.socket, room: memoryview) -> None:
    """Receive as many bytes as there is room for. OSError: there are fewer."""
    while room.nbytes:
        count = connection.recv_into(room)
        if not count:
            raise ConnectionResetError("the connection has ended")
        room = room[count:]


def _some(connection: socket.socket, most: int) -> bytes:
    found = connection.recv(most)
    if not found:
        raise ConnectionResetError("the connection has ended")
    return found


class Link:
    """A rank's connection to a keeper."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(PATIENCE_S)

    def ask(self, what: str, file: int | None = None, parts: Iterable[Any] = (), **values: Any) -> dict[str, Any]:
        """What the keeper answers.

        Args:
            file: an open one that goes along.
            parts: bytes that do.

        Raises:
            OSError: it has gone, or refuses.
        """
        answer, handed = self._asked(what, file, parts, values)
        if handed is not None:
            os.close(handed)
        return answer

    def ask_for_file(self, what: str, **values: Any) -> int:
        """An open file, which is the caller's to close."""
        handed = self._asked(what, None, (), values)[1]
        if handed is None:
            raise OSError("the keeper gives no file")
        return handed

    def ask_into(self, room: memoryview, what: str, **values: Any) -> None:
        """Bytes that come behind the answer, as many as there is room for."""
        self.ask(what, **values)
        fill(self._connection, room)

    def _asked(
        self, what: str, file: int | None, parts: Iterable[Any], values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int | None]:
        send(self._connection, {"do": what, **values}, file)
        for part in parts:
            self._connection.sendall(part)
        answer, handed = receive(self._connection)
        if "error" in answer:
            raise OSError(f"the keeper refuses: {answer['error']}")
        return answer, handed

    def close(self) -> None:
        self._connection.close()


# -- who is who


def check_user(connection: socket.socket) -> None:
    """Refuse a process of this node that is not of the same user. PermissionError: it is of another."""
    _, user, _ = _USER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _USER.size))
    if user != os.geteuid():
        raise PermissionError(f"a process of user {user}")


def admit(connection: socket.socket, token: str) -> None:
    """The keeper's side: whoever is there must know the token.

    Raises:
        OSError: it does not, or does not say so in time. `PermissionError`: it has said something else.
    """
    until_s, mine = time.monotonic() + PROOF_S, secrets.token_hex(32)
    connection.settimeout(PROOF_S)
    send(connection, {"nonce": mine})
    answer, file = receive(connection, longest=_LONGEST_OF_STRANGERS, until_s=until_s)
    if file is not None:
        os.close(file)
    theirs = str(answer.get("nonce"))
    if not hmac.compare_digest(
        _proof(token, "rank", mine, theirs).encode(), str(answer.get("proof")).encode(errors="replace")
    ):
        send(connection, {"error": "the token is another"})
        raise PermissionError("somebody without the token")
    send(connection, {"proof": _proof(token, "keeper", mine, theirs)})


def introduce(connection: socket.socket, token: str) -> None:
    """The rank's side. A keeper that has many to admit takes its time.

    Raises:
        OSError: nobody answers. `PermissionError`: the keeper does not know the token, or this rank has another.
    """
    until_s = time.monotonic() + PATIENCE_S
    theirs = str(receive(connection, longest=_LONGEST_OF_STRANGERS, until_s=until_s)[0].get("nonce"))
    mine = secrets.token_hex(32)
    send(connection, {"nonce": mine, "proof": _proof(token, "rank", theirs, mine)})
    answer, _ = receive(connection, longest=_LONGEST_OF_STRANGERS, until_s=until_s)
    if not hmac.compare_digest(
        _proof(token, "keeper", theirs, mine).encode(), str(answer.get("proof")).encode(errors="replace")
    ):
        raise PermissionError("the keeper has another token")


def _proof(token: str, who: str, *nonces: str) -> str:
    return hmac.new(token.encode(), " ".join((who, *nonces)).encode(errors="replace"), hashlib.sha256).hexdigest()
