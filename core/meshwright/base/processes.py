"""Processes of this node: identity, CPU cores, allocator settings, and exit with another process."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_POLL_S = 0.5


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_process_identity(pid: int) -> str:
    """Return a string that identifies a process on this node, also from later ones with its pid; "" if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    # The program's name is in parentheses and may contain any character. The 20th field after it is the start time.
    return f"{boot} {namespace} {pid} {stat.rpartition(')')[2].split()[19]}"


def get_launcher_pid() -> int:
    """Return the pid of the process that started this one."""
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


class ProcessHandle:
    """Handle of one process, never of a later one with the same pid; uses a pidfd if the system supports it."""

    def __init__(self, pid: int, identity: str = "") -> None:
        self.pid = pid
        self._pidfd: int | None = None
        self._has_exited = False
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._has_exited = True
        except (OSError, AttributeError):
            # Not Linux, or an old kernel.
            pass
        if identity and get_process_identity(pid) != identity:
            self.close()
            self._has_exited = True

    def is_alive(self) -> bool:
        if self._pidfd is not None:
            return not select.select([self._pidfd], [], [], 0)[0]
        return not self._has_exited and self._kill(0)

    def send_signal(self, signum: int) -> None:
        if self._pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)
        elif not self._has_exited:
            self._kill(signum)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd, self._has_exited = None, True

    def _kill(self, signum: int) -> bool:
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True


def wait_for_exit(pid: int, identity: str) -> None:
    """Wait until a process has ended; `identity` distinguishes it from a later one with the same pid."""
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, AttributeError):
        # The process has ended, or this is not Linux.
        while get_process_identity(pid) == identity and (identity or os.getppid() == pid):
            threading.Event().wait(_POLL_S)
        return
    try:
        while get_process_identity(pid) == identity and not select.select([pidfd], [], [])[0]:
            pass
    finally:
        os.close(pidfd)


def exit_with_launcher() -> None:
    """Kill this process when the one that started it ends, so that no rank continues without its launcher."""
    threading.Thread(target=_kill_self_after_parent, name="meshwright-parent", daemon=True).start()


def _kill_self_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    else:
        parent_pid = os.getppid()
        wait_for_exit(parent_pid, get_process_identity(parent_pid))
    os.kill(os.getpid(), signal.SIGKILL)


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads when it initializes CUDA; the first one takes precedence."""
_EXPANDABLE_SEGMENTS = "expandable_segments:True"


def prefer_expandable_segments(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set `expandable_segments:True` for this process and its children, unless an allocator setting exists.

    Only on Linux, and not for ROCm, where torch does not support it.
    """
    if (
        not _get_allocator_setting(environment)
        and sys.platform == "linux"
        and "rocm" not in importlib.metadata.version("torch")
    ):
        environment[ALLOCATOR_VARIABLES[0]] = _EXPANDABLE_SEGMENTS


def uses_expandable_segments(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether runs that are started from this environment use expandable segments."""
    setting = _get_allocator_setting(environment)
    return not setting or _EXPANDABLE_SEGMENTS.lower() in setting.replace(" ", "").lower()


def _get_allocator_setting(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name)), "")


def exit_process(exit_code: int) -> NoReturn:
    """Exit the process. After a failure, exit at once, without destructors that could wait for peers."""
    if exit_code == 0:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
