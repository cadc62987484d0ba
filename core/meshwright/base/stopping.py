"""Signals that ask a run to stop: recorded when received, and handled at the end of a step.

[Note: stopping] A rank records the signal. Before the next step, all ranks agree (`meshwright.training.loop.batches`)
to stop, save, and exit with `Stopped`. A second signal ends a rank at once. The same signal may arrive twice, from the
scheduler and from a launcher; within SIGNAL_DEBOUNCE_S both count as one. Python runs handlers in the main thread
between two bytecode instructions, so a rank that waits inside torch would not handle the second signal. Therefore a
thread reads the interpreter's wakeup pipe. Forked processes share the pipe but do not receive the signals: SIGTERM,
which ends a child, keeps its handler, and others are ignored.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Literal, get_args

from .errors import ConfigError

INTERRUPTED_EXIT_CODE = 128 + signal.SIGINT
"""Exit code after SIGINT, such as Ctrl-C, as in shells."""
SIGNAL_DEBOUNCE_S = 2.0
"""A signal that arrives again within this time counts as the same one."""

StopName = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"]
"""Names of the signals that can ask a run to stop."""
_SIGNAL_NAMES: tuple[StopName, ...] = get_args(StopName)
_STOP_LISTENING = b"\0"
"""Stops the listening thread. Closing the pipe would not stop it if a forked process has it open."""


class Stopped(SystemExit):
    """Training has stopped after a step because of a signal; a SystemExit with the configured exit code.

    Attributes:
        saved: whether the state after this step is in a checkpoint.
        has_skipped_save: whether the save was skipped because it would not have finished in time.
    """

    def __init__(self, signum: int, *, step: int, saved: bool, exit_code: int, has_skipped_save: bool = False) -> None:
        super().__init__(exit_code)
        self.signal = signal.Signals(signum).name
        self.step = step
        self.saved = saved
        self.has_skipped_save = has_skipped_save


def format_stop_notice(signum: int) -> str:
    """Return the message that is printed when a signal asks the run to stop."""
    return f"{signal.Signals(signum).name}: this run stops after the current step; a second signal ends it at once"


class StopSignals:
    """Context in which the first of some signals is only recorded; see [Note: stopping].

    Has no effect outside of the main thread.

    Args:
        names: the signals to record.
        exit_code: exit code of `Stopped`, except after SIGINT, where it is 130.
        grace_s: time from the first signal until the process is killed [s]; None: unknown.
        report: called with a message when a signal is recorded, in another thread.

    Raises:
        ConfigError: `names` contains something else than names of `StopName`.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        exit_code: int = 143,
        grace_s: float | None = None,
        report: Callable[[str], object] | None = None,
    ) -> None:
        wrong = names if isinstance(names, str) else next((name for name in names if name not in _SIGNAL_NAMES), None)
        if wrong is not None:
            raise ConfigError(
                f"{wrong!r} is not a signal that can stop a run. Give a list of names out of "
                f"{', '.join(_SIGNAL_NAMES)}."
            )
        self.names, self.exit_code, self.grace_s = tuple(names), exit_code, grace_s
        self._signums = {int(signal.Signals[name]) for name in names}
        self._report = report
        self._received, self._received_at_s, self._is_stopping = 0, 0.0, False
        self._previous_handlers: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._previous_wakeup_fd = -1

    def __repr__(self) -> str:
        return f"StopSignals({self.names})"

    @property
    def received_signal(self) -> int:
        """Number of the first signal received; 0: none."""
        return self._received

    def find_exit_code(self, signum: int) -> int:
        return INTERRUPTED_EXIT_CODE if signum == signal.SIGINT else self.exit_code

    @property
    def remaining_s(self) -> float:
        """Time until the process is killed [s]; infinite before a signal, or if unknown."""
        if not self._received or self.grace_s is None:
            return math.inf
        return self._received_at_s + self.grace_s - time.monotonic()

    def ignore_further_signals(self) -> None:
        """Ignore a second signal: the run is already exiting, and other ranks may have exited."""
        self._is_stopping = True

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread() or not self._signums:
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="meshwright-signals", daemon=True)
        self._thread.start()
        self._previous_handlers = {number: signal.signal(number, _ignore_in_main_thread) for number in self._signums}
        os.register_at_fork(after_in_child=self._reset_in_fork)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        # Once one rank has exited, the launcher may send signals. They must not kill a rank that is exiting.
        is_exiting = isinstance(error, Stopped)
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_IGN if is_exiting else signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.write(self._writer, _STOP_LISTENING)
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)
        self._thread = None

    def _reset_in_fork(self) -> None:
        if self._thread is not None:
            self._thread = None
            signal.set_wakeup_fd(-1)
            if signal.SIGTERM in self._previous_handlers:
                signal.signal(signal.SIGTERM, self._previous_handlers[signal.SIGTERM] or signal.SIG_DFL)

    def _listen(self) -> None:
        received = b""
        while _STOP_LISTENING not in received:
            received = os.read(self._reader, 64)
            if self._previous_wakeup_fd != -1:
                os.write(self._previous_wakeup_fd, received.rstrip(_STOP_LISTENING))
            for number in received:
                if number in self._signums:
                    self._receive(number)

    def _receive(self, signum: int) -> None:
        now = time.monotonic()
        if not self._received:
            self._received_at_s, self._received = now, signum
            if self._report is not None:
                with suppress(OSError):  # the reader of this process's output may be gone
                    self._report(format_stop_notice(signum))
        elif now - self._received_at_s > SIGNAL_DEBOUNCE_S and not self._is_stopping:
            sys.stderr.flush()
            os._exit(128 + signum)


def _ignore_in_main_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread reads the signal from the wakeup pipe."""
