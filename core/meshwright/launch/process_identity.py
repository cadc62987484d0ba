"""Which process of a machine is meant, beyond its number, and how one ends with another."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path

_LOOK_S = 0.5


def identity_of(pid: int) -> str:
    """What tells a process of this machine from all others, also from one that has its number later; "" if nothing
    does. Processes that see each other's numbers are in one namespace of them."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    # The name of the program is in parentheses, and may hold any. Of what is behind it, the 20th is when it began.
    return f"{boot} {namespace} {pid} {stat.rpartition(')')[2].split()[19]}"


def launcher_pid() -> int:
    """The process that has started the ranks of this node: `meshwright train`, torchrun's agent, or whoever else."""
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


class Handle:
    """One process, and none that has its number later: by a file of it that is held open, where the system has such.

    Args:
        pid: of a process that is there now.
        identity: of the process that is meant, where another may have its number by now; see `identity_of`.
    """

    def __init__(self, pid: int, identity: str = "") -> None:
        self.pid = pid
        self._file: int | None = None
        self._has_gone = False
        try:
            self._file = os.pidfd_open(pid)
        except ProcessLookupError:
            self._has_gone = True
        except (OSError, AttributeError):
            # No Linux, or an old one.
            self._file = None
        if identity and identity_of(pid) != identity:
            self.close()
            self._has_gone = True

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        if self._file is not None:
            return not select.select([self._file], [], [], 0)[0]
        return not self._has_gone and self._sent(0)

    def send(self, number: int) -> None:
        """Send it a signal, if it is there."""
        if self._file is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, number)
        elif not self._has_gone:
            self._sent(number)

    def close(self) -> None:
        """Let go of it."""
        if self._file is not None:
            os.close(self._file)
            self._file, self._has_gone = None, True

    def _sent(self, number: int) -> bool:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def await_end(pid: int, identity: str) -> None:
    """Return when the process of that number and identity has ended."""
    try:
        ended = os.pidfd_open(pid)
    except (OSError, AttributeError):
        # It has gone, or this is no Linux.
        while identity_of(pid) == identity and (identity or os.getppid() == pid):
            threading.Event().wait(_LOOK_S)
        return
    try:
        while identity_of(pid) == identity and not select.select([ended], [], [])[0]:
            pass
    finally:
        os.close(ended)


def end_with_launcher() -> None:
    """Have this rank end, with SIGKILL, when the process does that has started it: nobody would end, or begin anew, one
    that is left alone, and it would train on beside those that come after it."""
    threading.Thread(target=_follow, name="meshwright-parent", daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    else:
        parent_pid = os.getppid()
        await_end(parent_pid, identity_of(parent_pid))
    os.kill(os.getpid(), signal.SIGKILL)
