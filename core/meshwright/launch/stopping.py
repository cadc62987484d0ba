"""Signals that ask a run to stop: noted, told to the ranks, and obeyed at the end of a step.

[Note: stopping] Schedulers announce that a machine is wanted by a signal, and take it some time later. A rank notes the
signal; before the next step all ranks agree to stop (see `meshwright.train.ahead`), save, and leave with `Stopped`. A
second signal ends a rank at once. One signal may come twice, from the scheduler, which signals all processes, and from
a launcher, which passes on its own: what comes within SAME_S is the same.

Python runs handlers in the main thread, and only between two of its instructions: one that waits for a peer in torch
would not hear of the second. So a thread reads what the interpreter writes into a pipe as a signal arrives.

Processes that are forked in the context share the pipe, but their signals are their own: SIGTERM is how whoever has
started one ends it, and the others it ignores, since schedulers send them to all processes.
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

from ..base.errors import ConfigError

SAME_S = 2.0
"""A signal that comes again within this time is the same."""

StopName = Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"]
_NAMES: tuple[StopName, ...] = get_args(StopName)
_END = b"\0"
"""The number of no signal. A pipe does not end when it is closed here, if a process that was forked has it open."""


class Stopped(SystemExit):
    """A signal has ended the training, after a step; a SystemExit, with the exit code that was asked for.

    Args:
        number: of the signal.
        exit_code: of the process.

    Attributes:
        signal: its name.
        step: steps done.
        saved: whether the state after this step is in a checkpoint.
        too_late: whether a save was not begun since it would not have been done in time.
    """

    def __init__(self, number: int, *, step: int, saved: bool, exit_code: int, too_late: bool = False) -> None:
        super().__init__(exit_code)
        self.signal, self.step, self.saved, self.too_late = signal.Signals(number).name, step, saved, too_late


def noted_text(number: int) -> str:
    """What there is to say of a signal that was noted."""
    return f"{signal.Signals(number).name}: this run stops after its step; a second signal ends it at once"


class StopSignals:
    """Notes the first of some signals in the place of what it would do, until the context is left.

    See [Note: stopping]. Only a process's main thread can note signals; a context in another thread notes none.

    Args:
        names: such as SIGTERM.
        exit_code: of `Stopped`.
        grace_s: seconds from the first signal until the process is ended; None: not known.
        tell: called with what there is to say when one is noted; in a thread.

    Raises:
        ConfigError: a name is none of `StopName`.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        exit_code: int = 143,
        grace_s: float | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        wrong = names if isinstance(names, str) else next((name for name in names if name not in _NAMES), None)
        if wrong is not None:
            raise ConfigError(
                f"{wrong!r} is none of the signals that can be noted. Give a list of some of {', '.join(_NAMES)}."
            )
        self.names, self.exit_code, self.grace_s = tuple(names), exit_code, grace_s
        self._numbers = {int(signal.Signals[name]) for name in names}
        self._tell = tell
        self._noted, self._noted_s, self._settled = 0, 0.0, False
        self._handlers: dict[int, Any] = {}
        self._thread: threading.Thread | None = None
        self._before = -1

    @property
    def noted(self) -> int:
        """Number of the signal that has come; 0: none has."""
        return self._noted

    @property
    def left_s(self) -> float:
        """Seconds until the process is ended, where a signal has come and that is known; infinite otherwise."""
        if not self._noted or self.grace_s is None:
            return math.inf
        return self._noted_s + self.grace_s - time.monotonic()

    def settle(self) -> None:
        """From here on a second signal ends nothing: the run leaves by itself, and others may already have left."""
        self._settled = True

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread() or not self._numbers:
            return self
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="meshwright-signals", daemon=True)
        self._thread.start()
        self._handlers = {number: signal.signal(number, _leave_to_thread) for number in self._numbers}
        os.register_at_fork(after_in_child=self._leave_to_parent)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        # A rank that leaves is not to be killed on its way by what its launcher sends when the first has left.
        late = isinstance(error, Stopped)
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_IGN if late else signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._before)
        os.write(self._writer, _END)
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)
        self._thread = None

    def _leave_to_parent(self) -> None:
        """In a process that was forked from this one; see [Note: stopping]."""
        if self._thread is not None:
            self._thread = None
            signal.set_wakeup_fd(-1)
            if signal.SIGTERM in self._handlers:
                signal.signal(signal.SIGTERM, self._handlers[signal.SIGTERM] or signal.SIG_DFL)

    def _listen(self) -> None:
        found = b""
        while _END not in found:
            found = os.read(self._reader, 64)
            if self._before != -1:
                os.write(self._before, found.rstrip(_END))
            for number in found:
                if number in self._numbers:
                    self._note(number)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if not self._noted:
            self._noted_s, self._noted = now, number
            if self._tell is not None:
                with suppress(OSError):  # nobody listens to this process any more
                    self._tell(noted_text(number))
        elif now - self._noted_s > SAME_S and not self._settled:
            sys.stderr.flush()
            os._exit(128 + number)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    """What a handler in Python is: the signal does nothing by itself."""
