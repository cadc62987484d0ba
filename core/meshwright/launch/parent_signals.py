"""Signals to the process that starts the ranks of one machine: which it passes on, and which end the job.

[Note: signals that are waited for] The agent would kill ranks soon after a signal. One that asks them to stop in order
(see [Note: stopping] in `meshwright.launch.stopping`) is kept from it, and passed on here; the second is the agent's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from .process_identity import Handle
from .stopping import SAME_S, noted_text

_AGENTS_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The agent passes them on, and then kills."""


def left_to_agent(passed_on: Sequence[str]) -> str:
    """The signals that stay the agent's, as it takes them."""
    return ",".join(name for name in _AGENTS_SIGNALS if name not in passed_on)


@contextmanager
def passing_on(names: Sequence[str], find_ranks: Callable[[], Sequence[Handle]]) -> Iterator[list[int]]:
    """Pass on the first of some signals to the ranks; gives the numbers of those that were."""
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
    """Put back the signal handlers, and the variable naming them, that the agent leaves behind."""
    variable = "TORCHELASTIC_SIGNALS_TO_HANDLE"
    before = os.environ.get(variable)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # None: not installed from Python, and so not known here
                    signal.signal(number, handler)
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"
