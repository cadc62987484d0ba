"""The process that holds copies of state on one node: `python -m meshwright_replicate.server SOCKET PID IDENTITY`.

[Note: nothing is left] Copies are in anonymous memory (memfd), which vanishes with the process. Its socket (see
`protocol`) is removed when it ends, or by the next keeper if it was killed. It ends with the process that started
the ranks. It has a session of its own, since torchrun kills the process groups of its ranks, and ignores the signals
that schedulers send to all processes; only SIGKILL ends it earlier.

[Note: steps that are kept] A step is written file by file, and sealed by its manifest once all ranks have handed over
all files everywhere. Then earlier steps are dropped. So at any time either the last sealed step is complete on the
remaining keepers, or none of them has dropped the one before. This module imports no torch.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.plugin import wait_for_exit

from . import protocol

_RETRY_S = 0.5
MAX_UNAUTHENTICATED = 64
"""Connections from other nodes that have not proven yet that they know the token; more wait to be accepted."""
MAX_AUTHENTICATED = 1024  # Connections that have; more are refused
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class MemoryFile:
    """An open file in memory, and its size."""

    fd: int
    size: int


@dataclass
class StoredStep:
    """Files of a step, and the text of its manifest once it is sealed."""

    files: dict[str, MemoryFile] = field(default_factory=dict)
    manifest: str | None = None


class ReplicaStore:
    """The steps of one run."""

    def __init__(self) -> None:
        self._run_id = ""
        self._steps: dict[int, StoredStep] = {}
        self._lock = threading.Lock()

    def discard_stale(self, run_id: str, step: int) -> None:
        """Drop all steps that are later than the one a run resumes from, or of another run."""
        with self._lock:
            for number in list(self._steps):
                if run_id != self._run_id or number > step:
                    self._discard(number)
            self._run_id = run_id

    def add_file(self, run_id: str, step: int, name: str, file: MemoryFile) -> None:
        """Take over a file. Raises OSError if it is of another run, or of a sealed step."""
        with self._lock:
            kept = self._steps.get(step, StoredStep())
            if run_id != self._run_id or kept.manifest is not None:
                os.close(file.fd)
                raise OSError(f"step {step} of run {run_id!r} is not expected")
            self._steps[step] = kept
            before = kept.files.pop(name, None)
            if before is not None:
                os.close(before.fd)
            kept.files[name] = file

    def commit(self, run_id: str, step: int, manifest: str) -> None:
        """Mark a step as complete, and drop earlier ones; see [Note: steps that are kept]."""
        with self._lock:
            if run_id != self._run_id or step not in self._steps:
                raise OSError(f"step {step} of run {run_id!r} is not here")
            self._steps[step].manifest = manifest
            for number in list(self._steps):
                if number < step:
                    self._discard(number)

    def list_steps(self) -> dict[str, Any]:
        with self._lock:
            sizes = {n: {name: file.size for name, file in kept.files.items()} for n, kept in self._steps.items()}
            steps = {str(n): {"manifest": kept.manifest, "files": sizes[n]} for n, kept in self._steps.items()}
            return {"run": self._run_id, "steps": steps}

    def open_file(self, step: int, name: str) -> MemoryFile:
        """Return a duplicate of a file's descriptor. Raises OSError if there is no such file."""
        with self._lock:
            file = self._steps.get(step, StoredStep()).files.get(name)
            if file is None:
                raise OSError(f"no {name} of step {step}")
            return MemoryFile(os.dup(file.fd), file.size)

    def _discard(self, step: int) -> None:
        for file in self._steps.pop(step).files.values():
            os.close(file.fd)


class ReplicaServer:
    """Answers ranks, with a thread for each connection. Its `id` is unique."""

    def __init__(self) -> None:
        self.server_id = uuid.uuid4().hex
        self._store = ReplicaStore()
        self._token = ""
        self._port = 0
        self._lock = threading.Lock()
        self._unauthenticated = threading.Semaphore(MAX_UNAUTHENTICATED)
        self._authenticated = threading.Semaphore(MAX_AUTHENTICATED)

    def listen(self, listener: socket.socket, *, is_local: bool) -> None:
        """Accept connections, in the background."""
        threading.Thread(target=self._accept, args=(listener, is_local), daemon=True).start()

    def _accept(self, listener: socket.socket, is_local: bool) -> None:
        while True:
            if not is_local:
                self._unauthenticated.acquire()
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._handle_connection, args=(connection, is_local), daemon=True).start()
            except (OSError, RuntimeError):
                # There are as many open files or threads as allowed; some will end.
                if not is_local:
                    self._unauthenticated.release()
                threading.Event().wait(_RETRY_S)

    def _handle_connection(self, connection: socket.socket, is_local: bool) -> None:
        with connection, suppress(OSError):
            if is_local:
                protocol.check_user(connection)
            else:
                try:
                    protocol.authenticate_client(connection, self._token)
                finally:
                    self._unauthenticated.release()
                connection.settimeout(None)
            if not self._authenticated.acquire(blocking=False):
                return
            try:
                self._handle_requests(connection, is_local)
            finally:
                self._authenticated.release()

    def _handle_requests(self, connection: socket.socket, is_local: bool) -> None:
        while True:
            message, file = protocol.receive_message(connection)
            try:
                self._handle_request(connection, message, file, is_local)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                protocol.send_message(connection, {"error": f"{type(error).__name__}: {error}"})

    def _handle_request(
        self, connection: socket.socket, request: dict[str, Any], fd: int | None, is_local: bool
    ) -> None:
        """Answer a message. Ranks of other nodes may only put, read and list."""
        what, answer = request["command"], {}
        if what == "read":
            self._send_file(connection, request, is_local)
            return
        # Errors of the connection itself end it, unlike those of the shelf.
        received = self._receive_file(connection, request, fd) if what == "put" else None
        try:
            if received is not None:
                self._store.add_file(request["run"], request["step"], request["name"], received)
            elif what == "list":
                answer = {"id": self.server_id, **self._store.list_steps()}
            elif what == "discard_stale" and is_local:
                self._store.discard_stale(request["run"], request["step"])
            elif what == "commit" and is_local:
                self._store.commit(request["run"], request["step"], request["manifest"])
            elif what == "listen" and is_local:
                answer = {"port": self._listen_for_remote(request["host"], request["token"])}
            else:
                raise ValueError(f"{what} is nothing that a keeper does")
        except OSError as error:
            answer = {"error": str(error)}
        protocol.send_message(connection, answer)

    def _listen_for_remote(self, host: str, token: str) -> int:
        """Serve ranks of other nodes that know this token, and no earlier one; return the port."""
        with self._lock:
            self._token = token
            if not self._port:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = socket.create_server((host, 0), family=family, backlog=128)
                self._port = int(listener.getsockname()[1])
                self.listen(listener, is_local=False)
            return self._port

    def _send_file(self, connection: socket.socket, request: dict[str, Any], is_local: bool) -> None:
        try:
            kept = self._store.open_file(request["step"], request["name"])
        except OSError as error:
            protocol.send_message(connection, {"error": str(error)})
            return
        try:
            if is_local:
                protocol.send_message(connection, {"size": kept.size}, kept.fd)
                return
            begin, size = int(request["begin"]), int(request["size"])
            if not 0 <= begin <= begin + size <= kept.size:
                raise ValueError(f"{size} bytes at {begin} of {kept.size}")
            protocol.send_message(connection, {"size": size})
            if size:
                whole = memoryview(mmap.mmap(kept.fd, kept.size, prot=mmap.PROT_READ))
                connection.sendall(whole[begin : begin + size])
        finally:
            os.close(kept.fd)

    @staticmethod
    def _receive_file(connection: socket.socket, request: dict[str, Any], fd: int | None) -> MemoryFile:
        """Return the file that came with a message, or the bytes that follow it, in memory."""
        size = request["size"]
        if fd is not None:
            return MemoryFile(fd, int(size))
        fd = os.memfd_create("meshwright-replica", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            if size:
                # The mapping is freed with its last view, which an error may hold for a while.
                protocol.receive_into(connection, memoryview(mmap.mmap(fd, size)))
        except BaseException:
            os.close(fd)
            raise
        return MemoryFile(fd, size)


def main(socket_path: Path, pid: int, identity: str) -> None:
    """Serve at a socket until the process that started the ranks has ended."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    listener = protocol.listen_on_socket(socket_path)
    if listener is None:
        return  # there is a keeper already
    ReplicaServer().listen(listener, is_local=True)
    wait_for_exit(pid, identity)
    protocol.remove_socket(socket_path)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
