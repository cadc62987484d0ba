"""Which process of a machine is meant, beyond its number, and how a peer ends one that can no longer end itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import suppress
from pathlib import Path


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


def end_process(identity: str) -> None:
    """End the process of that identity with SIGKILL, which reaches one that is stopped, too; nothing where it is of
    another machine, or gone."""
    pid = int(identity.split()[2]) if identity else 0
    if pid and identity_of(pid) == identity:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
