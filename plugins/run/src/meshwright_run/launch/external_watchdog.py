"""Watchdog process that kills its rank if the rank is stopped: `python -m meshwright_run.launch.external_watchdog PID
SECONDS`.

[Note: stopped ranks] A stopped rank cannot end itself, its peers may all be on other nodes, and a stopped process does
not handle the SIGTERM of torchrun's agent or srun. So a rank that was not started by `local` pings a watchdog process,
each time with the time for which it may be silent. After a longer silence the watchdog sends SIGKILL. If all processes
of the job are stopped, so is the watchdog, which does not count that time. The watchdog ends with the rank.
"""

from __future__ import annotations

import math
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from meshwright.plugin import SAFE_PYTHON, ProcessHandle, warn

MIN_INTERVAL_S = 1.0
"""Minimum time between two pings. A ping takes a quarter of a millisecond of CPU time on both sides."""
_PING = struct.Struct("d")
_MAX_PINGS = 512
_IGNORED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that a rank may survive for a while."""


class ExternalWatchdog(threading.Thread):
    """Context manager that runs the watchdog of this rank; see [Note: stopped ranks]. After an error, it keeps running.

    `silence_limit_s` returns the time for which this rank may be silent; the watchdog waits `interval_s` longer.
    """

    def __init__(self, silence_limit_s: Callable[[], float], interval_s: float) -> None:
        super().__init__(name="meshwright-watchdog", daemon=True)
        self._silence_limit_s, self._interval_s = silence_limit_s, max(interval_s, MIN_INTERVAL_S)
        self._stop_event = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ExternalWatchdog:
        command = [*SAFE_PYTHON, "-m", f"{__package__}.external_watchdog", str(os.getpid()), str(self._interval_s)]
        nothing = subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, bufsize=0)
        except OSError as error:
            warn(f"no watchdog would end this rank if it is stopped: no process started: {error}", stacklevel=2)
            return self
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self.ping()
        self.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None and self._process is not None:
            self._stop_event.set()
            self.join()
            self._process.kill()
            self._process.communicate()

    def run(self) -> None:
        while not self._stop_event.wait(self._interval_s):
            self.ping()

    def ping(self) -> None:
        """Send a ping; may be called from any thread."""
        if self._process is not None and self._process.stdin is not None:
            # A watchdog that does not read is stopped itself, or has ended.
            with suppress(OSError):
                os.write(self._process.stdin.fileno(), _PING.pack(self._silence_limit_s() + self._interval_s))


def kill_when_silent(rank_pid: int, pings_fd: int, interval_s: float) -> None:
    """Kill `rank_pid`, the parent of this process, if no ping arrives on `pings_fd` for too long. Returns when the rank
    has ended."""
    limit_s, silent_s, last_s = math.inf, 0.0, time.monotonic()
    # If it is the parent after this, the handle is not that of a later process with the same pid.
    process = ProcessHandle(rank_pid)
    while os.getppid() == rank_pid:
        has_ping = select.select([pings_fd], [], [], interval_s)[0]
        elapsed_s, last_s = time.monotonic() - last_s, time.monotonic()
        # If more than two intervals have passed, this process was stopped itself.
        silent_s = 0.0 if has_ping else silent_s + min(elapsed_s, 2 * interval_s)
        if has_ping:
            read = os.read(pings_fd, _MAX_PINGS * _PING.size)
            if not read:
                return
            (limit_s,) = _PING.unpack(read[-_PING.size :])
        if silent_s > limit_s:
            process.send_signal(signal.SIGKILL)
            return


if __name__ == "__main__":
    for name in _IGNORED_SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    kill_when_silent(int(sys.argv[1]), sys.stdin.fileno(), float(sys.argv[2]))
