"""The replica server of a node: `python -m meshwright_replicate.server SOCKET PID IDENTITY`.

[Note: nothing is left] Copies are in anonymous memory (memfd), which is freed when the process ends. Its socket (see
`protocol`) is removed when it ends, or by the next server if it was killed. It ends with the process that started
the ranks. It has its own session, since torchrun kills the process groups of its ranks, and ignores the signals that
schedulers send to all processes; only SIGKILL ends it earlier.

[Note: steps that are kept] A step is written file by file, and committed with its manifest once all ranks have sent
all files to all servers. Then earlier steps are discarded. So at any time, either the last committed step is complete
on the remaining servers, or none of them has discarded the step before. This module imports no torch.
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
"""Maximum number of unauthenticated connections from other nodes; more wait to be accepted."""
MAX_AUTHENTICATED = 1024  # Maximum number of authenticated connections; more are closed
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class MemoryFile:
    """Descriptor and size of a file in memory."""

    fd: int
    size: int


@dataclass
class StoredStep:
    """Files of a step, and the text of its manifest once it is committed."""

    files: dict[str, MemoryFile] = field(default_factory=dict)
    manifest: str | None = None


class ReplicaStore:
    """Steps of one run in memory."""

    def __init__(self) -> None:
        self._run_id = ""
        self._steps: dict[int, StoredStep] = {}
        self._lock = threading.Lock()

    def discard_stale(self, run_id: str, step: int) -> None:
        """Discard every step after `step`, from which the run resumes, and all steps of another run."""
        with self._lock:
            for number in list(self._steps):
                if run_id != self._run_id or number > step:
                    self._discard(number)
            self._run_id = run_id

    def add_file(self, run_id: str, step: int, name: str, file: MemoryFile) -> None:
        """Store a file and own its descriptor. Raises OSError if its run is another, or its step is committed."""
        with self._lock:
            stored = self._steps.get(step, StoredStep())
            if run_id != self._run_id or stored.manifest is not None:
                os.close(file.fd)
                raise OSError(f"step {step} of run {run_id!r} is not expected")
            self._steps[step] = stored
            previous = stored.files.pop(name, None)
            if previous is not None:
                os.close(previous.fd)
            stored.files[name] = file

    def commit(self, run_id: str, step: int, manifest: str) -> None:
        """Mark a step as complete, and discard earlier ones; see [Note: steps that are kept]."""
        with self._lock:
            if run_id != self._run_id or step not in self._steps:
                raise OSError(f"step {step} of run {run_id!r} is not stored here")
            self._steps[step].manifest = manifest
            for number in list(self._steps):
                if number < step:
                    self._discard(number)

    def list_steps(self) -> dict[str, Any]:
        with self._lock:
            sizes = {n: {name: file.size for name, file in stored.files.items()} for n, stored in self._steps.items()}
            steps = {str(n): {"manifest": stored.manifest, "files": sizes[n]} for n, stored in self._steps.items()}
            return {"run": self._run_id, "steps": steps}

    def open_file(self, step: int, name: str) -> MemoryFile:
        """Return a duplicate of a file's descriptor. Raises OSError if there is no such file."""
        with self._lock:
            file = self._steps.get(step, StoredStep()).files.get(name)
            if file is None:
                raise OSError(f"step {step} has no file {name}")
            return MemoryFile(os.dup(file.fd), file.size)

    def _discard(self, step: int) -> None:
        for file in self._steps.pop(step).files.values():
            os.close(file.fd)


class ReplicaServer:
    """Serve requests of ranks, with one thread per connection. `server_id` is unique."""

    def __init__(self) -> None:
        self.server_id = uuid.uuid4().hex
        self._store = ReplicaStore()
        self._token = ""
        self._port = 0
        self._lock = threading.Lock()
        self._unauthenticated = threading.Semaphore(MAX_UNAUTHENTICATED)
        self._authenticated = threading.Semaphore(MAX_AUTHENTICATED)

    def listen(self, listener: socket.socket, *, is_local: bool) -> None:
        """Accept connections in a background thread."""
        threading.Thread(target=self._accept, args=(listener, is_local), daemon=True).start()

    def _accept(self, listener: socket.socket, is_local: bool) -> None:
        while True:
            if not is_local:
                self._unauthenticated.acquire()
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._handle_connection, args=(connection, is_local), daemon=True).start()
            except (OSError, RuntimeError):
                # The limit on open files or threads is reached; try again later.
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
        """Handle a request. Ranks of other nodes may only put, read and list."""
        command, response = request["command"], {}
        if command == "read":
            self._send_file(connection, request, is_local)
            return
        # Errors of the connection close it, unlike errors of the store.
        received = self._receive_file(connection, request, fd) if command == "put" else None
        try:
            if received is not None:
                self._store.add_file(request["run"], request["step"], request["name"], received)
            elif command == "list":
                response = {"id": self.server_id, **self._store.list_steps()}
            elif command == "discard_stale" and is_local:
                self._store.discard_stale(request["run"], request["step"])
            elif command == "commit" and is_local:
                self._store.commit(request["run"], request["step"], request["manifest"])
            elif command == "listen" and is_local:
                response = {"port": self._listen_for_remote(request["host"], request["token"])}
            else:
                raise ValueError(f"the command {command} is not accepted")
        except OSError as error:
            response = {"error": str(error)}
        protocol.send_message(connection, response)

    def _listen_for_remote(self, host: str, token: str) -> int:
        """Accept ranks of other nodes that know `token`, which replaces earlier ones; return the port."""
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
            file = self._store.open_file(request["step"], request["name"])
        except OSError as error:
            protocol.send_message(connection, {"error": str(error)})
            return
        try:
            if is_local:
                protocol.send_message(connection, {"size": file.size}, file.fd)
                return
            begin, size = int(request["begin"]), int(request["size"])
            if not 0 <= begin <= begin + size <= file.size:
                raise ValueError(f"cannot read {size} bytes at {begin} of {file.size}")
            protocol.send_message(connection, {"size": size})
            if size:
                content = memoryview(mmap.mmap(file.fd, file.size, prot=mmap.PROT_READ))
                connection.sendall(content[begin : begin + size])
        finally:
            os.close(file.fd)

    @staticmethod
    def _receive_file(connection: socket.socket, request: dict[str, Any], fd: int | None) -> MemoryFile:
        """Return the file that came with a request, or a new one with the bytes that follow the request."""
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
    """Serve on a Unix socket until the process that started the ranks has ended."""
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    listener = protocol.listen_on_socket(socket_path)
    if listener is None:
        return  # another server is running
    ReplicaServer().listen(listener, is_local=True)
    wait_for_exit(pid, identity)
    protocol.remove_socket(socket_path)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
