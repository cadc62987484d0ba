"""Send items in a thread, so that no server delays the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Background(Generic[ItemT]):
    """Sends items in order.

    Args:
        send: called in the thread, with all waiting items; the next `put` or `finish` raises its errors.
        name: of the thread.
    """

    def __init__(self, send: Callable[[Sequence[ItemT]], None], *, name: str) -> None:
        self._send = send
        self._waiting: list[ItemT] = []
        self._changed = threading.Condition()
        self._is_finishing = False
        self._error: Exception | None = None
        self._has_failed = False
        # A daemon, so that a hanging send does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, *items: ItemT) -> None:
        """Add items. Raises the error of sending earlier ones, once; after that nothing is sent."""
        with self._changed:
            self._raise_error()
            if self._has_failed:
                return
            self._waiting += items
            self._changed.notify()

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is sent. Raises as `put`, or TimeoutError."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        with self._changed:
            self._raise_error()
            if self._thread.is_alive():
                raise TimeoutError(f"what was logged last has not been taken after {timeout_s:g} s")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_finishing)
                items, self._waiting = self._waiting, []
            if not items:
                return
            try:
                self._send(items)
            except Exception as error:
                with self._changed:
                    self._error, self._has_failed = error, True
                return
