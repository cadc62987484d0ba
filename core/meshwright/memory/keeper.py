"""The process that holds copies of state on one node: `python -m meshwright.memory.keeper SOCKET PID IDENTITY`.

[Note: nothing is left] What it holds is in memory without a name (memfd), which vanishes with it. The socket by which
it is reached (see `socket_file`) it removes when it ends; where it was killed, the next keeper does. It ends when the
process does that has started the ranks, however that ends. It is in a session of its own, since torchrun kills the
process groups of its ranks, and heeds no signal that schedulers send to all processes; only SIGKILL ends it before.

[Note: steps that are kept] A step is written file by file, and sealed by its manifest, which ranks send once all of
them have handed over their files everywhere. Then what was before it is let go. So at any time either the last sealed
step is whole on the keepers that are left, or none of them has let go of the one before.

This module imports no torch.
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

from ..launch.process_identity import await_end
from . import socket_file, wire

_LOOK_S = 0.5
STRANGERS = 64
"""Connections from other nodes that have not shown yet that they know the token; more wait to be accepted."""
FRIENDS = 1024
"""Connections that have; more are refused."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class File:
    """One that is kept: in memory, and open."""

    file: int
    size: int


@dataclass
class Step:
    """What is kept of a step.

    Attributes:
        manifest: the text of the manifest, once it is sealed.
    """

    files: dict[str, File] = field(default_factory=dict)
    manifest: str | None = None


class Shelf:
    """All that a keeper has: the steps of one run."""

    def __init__(self) -> None:
        self._run = ""
        self._steps: dict[int, Step] = {}
        self._lock = threading.Lock()

    def keep(self, run: str, step: int) -> None:
        """Be for a run that goes on after a step: nothing of others, and nothing later, is of use."""
        with self._lock:
            for number in list(self._steps):
                if run != self._run or number > step:
                    self._drop(number)
            self._run = run

    def put(self, run: str, step: int, name: str, file: File) -> None:
        """Keep a file, whose owner is now the shelf. OSError: of another run, or of a step that is sealed."""
        with self._lock:
            kept = self._steps.get(step, Step())
            if run != self._run or kept.manifest is not None:
                os.close(file.file)
                raise OSError(f"step {step} of run {run!r} is not expected")
            self._steps[step] = kept
            before = kept.files.pop(name, None)
            if before is not None:
                os.close(before.file)
            kept.files[name] = file

    def seal(self, run: str, step: int, manifest: str) -> None:
        """A step is complete; see [Note: steps that are kept]."""
        with self._lock:
            if run != self._run or step not in self._steps:
                raise OSError(f"step {step} of run {run!r} is not here")
            self._steps[step].manifest = manifest
            for number in list(self._steps):
                if number < step:
                    self._drop(number)

    def listed(self) -> dict[str, Any]:
        """What there is."""
        with self._lock:
            steps = {
                str(number): {
                    "manifest": kept.manifest,
                    "files": {name: file.size for name, file in kept.files.items()},
                }
                for number, kept in self._steps.items()
            }
            return {"run": self._run, "steps": steps}

    def opened(self, step: int, name: str) -> File:
        """A file, open once more. OSError: it is not here."""
        with self._lock:
            file = self._steps.get(step, Step()).files.get(name)
            if file is None:
                raise OSError(f"no {name} of step {step}")
            return File(os.dup(file.file), file.size)

    def _drop(self, number: int) -> None:
        for file in self._steps.pop(number).files.values():
            os.close(file.file)


class Keeper:
    """Answers ranks, each connection in a thread of its own.

    Attributes:
        id: no other keeper's.
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self._shelf = Shelf()
        self._token = ""
        self._port = 0
        self._lock = threading.Lock()
        self._strangers, self._friends = threading.Semaphore(STRANGERS), threading.Semaphore(FRIENDS)

    def listen(self, listener: socket.socket, *, is_local: bool) -> None:
        """Take connections, in the background."""
        threading.Thread(target=self._accept, args=(listener, is_local), daemon=True).start()

    def _accept(self, listener: socket.socket, is_local: bool) -> None:
        while True:
            if not is_local:
                self._strangers.acquire()
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._serve, args=(connection, is_local), daemon=True).start()
            except (OSError, RuntimeError):
                # As many are open, or threads there, as there may be; some will end.
                if not is_local:
                    self._strangers.release()
                threading.Event().wait(_LOOK_S)

    def _serve(self, connection: socket.socket, is_local: bool) -> None:
        with connection, suppress(OSError):
            if is_local:
                wire.check_user(connection)
            else:
                try:
                    wire.admit(connection, self._token)
                finally:
                    self._strangers.release()
                connection.settimeout(None)
            if not self._friends.acquire(blocking=False):
                return
            try:
                self._converse(connection, is_local)
            finally:
                self._friends.release()

    def _converse(self, connection: socket.socket, is_local: bool) -> None:
        while True:
            message, file = wire.receive(connection)
            try:
                self._answer(connection, message, file, is_local)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                wire.send(connection, {"error": f"{type(error).__name__}: {error}"})

    def _answer(self, connection: socket.socket, message: dict[str, Any], file: int | None, is_local: bool) -> None:
        what = message["do"]
        if what == "put":
            kept = File(file, int(message["size"])) if file is not None else _received(connection, message["size"])
            work = lambda: self._shelf.put(message["run"], message["step"], message["name"], kept)  # noqa: E731
        elif what == "take":
            self._give(connection, message, is_local)
            return
        elif what == "list":
            wire.send(connection, {"id": self.id, **self._shelf.listed()})
            return
        elif what == "keep" and is_local:
            work = lambda: self._shelf.keep(message["run"], message["step"])  # noqa: E731
        elif what == "seal" and is_local:
            work = lambda: self._shelf.seal(message["run"], message["step"], message["manifest"])  # noqa: E731
        elif what == "serve" and is_local:
            wire.send(connection, {"port": self._serving(message["host"], message["token"])})
            return
        else:
            raise ValueError(f"{what} is nothing that a keeper does")
        try:
            work()
        except OSError as error:
            wire.send(connection, {"error": str(error)})
            return
        wire.send(connection, {})

    def _serving(self, host: str, token: str) -> int:
        """The port at which ranks of other nodes are answered that know this token, and no earlier one."""
        with self._lock:
            self._token = token
            if not self._port:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                listener = socket.create_server((host, 0), family=family, backlog=128)
                self._port = int(listener.getsockname()[1])
                self.listen(listener, is_local=False)
            return self._port

    def _give(self, connection: socket.socket, message: dict[str, Any], is_local: bool) -> None:
        try:
            kept = self._shelf.opened(message["step"], message["name"])
        except OSError as error:
            wire.send(connection, {"error": str(error)})
            return
        try:
            if is_local:
                wire.send(connection, {"size": kept.size}, kept.file)
                return
            begin, size = int(message["begin"]), int(message["size"])
            if not 0 <= begin <= begin + size <= kept.size:
                raise ValueError(f"{size} bytes at {begin} of {kept.size}")
            wire.send(connection, {"size": size})
            if size:
                whole = memoryview(mmap.mmap(kept.file, kept.size, prot=mmap.PROT_READ))
                connection.sendall(whole[begin : begin + size])
        finally:
            os.close(kept.file)


def _received(connection: socket.socket, size: int) -> File:
    """What comes over the network, in memory."""
    file = os.memfd_create("meshwright-copy", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        if size:
            # The mapping goes with its last view, which an error may hold for a while.
            wire.fill(connection, memoryview(mmap.mmap(file, size)))
    except BaseException:
        os.close(file)
        raise
    return File(file, size)


def main(path: Path, pid: int, identity: str) -> None:
    """Be a keeper until a process has ended.

    Args:
        path: of the socket.
        pid, identity: of the process that has started the ranks.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    listener = socket_file.listen_at(path)
    if listener is None:
        # There is one already.
        return
    Keeper().listen(listener, is_local=True)
    await_end(pid, identity)
    socket_file.remove(path)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
