"""Signals to the process that starts the ranks of one machine: which it passes on, and which end the job.

[Note: signals that are waited for] torch's agent would kill ranks soon after a signal. A signal that asks them to stop
in order (see [Note: stopping] in `meshwright.base.stopping`) is kept from it, and passed on here; the second one
is the agent's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from meshwright.plugin import SAME_S, Handle, noted_text

AGENTS_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that the agent passes on before it kills."""
_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@contextmanager
def passing_on(names: Sequence[str], find_ranks: Callable[[], Sequence[Handle]]) -> Iterator[list[int]]:
    """Pass on the first of some signals to the ranks; yield a list that gets the numbers of those passed on."""
    from torch.distributed.elastic.multiprocessing import SignalException

    passed: list[int] = []
    first_s = 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        again, ranks = bool(passed) and time.monotonic() - first_s > SAME_S, find_ranks()
        if again or not ranks:
            raise SignalException(f"got {signal_name(number)}", sigval=signal.Signals(number))
        if not passed:
            first_s = time.monotonic()
            passed.append(number)
            # Not by a stream, which the handler may have interrupted.
            os.write(2, f"{noted_text(number)}\n".encode())
            for each in ranks:
                each.send(number)

    before = {name: signal.signal(signal.Signals[name], handle) for name in names}
    try:
        yield passed
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Keep Ctrl-C waiting until the end of the context."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def own_signals() -> Iterator[None]:
    """Restore the signal handlers, and the variable naming them, that the agent leaves behind."""
    before = os.environ.get(_VARIABLE)
    handlers = {name: signal.getsignal(signal.Signals[name]) for name in AGENTS_SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for name, handler in handlers.items():
                if handler is not None:  # None: not installed from Python
                    signal.signal(signal.Signals[name], handler)
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
