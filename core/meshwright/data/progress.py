"""Show how far a source has been tokenized, on a terminal alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..base.errors import printable
from ..files.terminal import new_console

CONSOLE = new_console(stderr=True)
"""What shows that work goes on shares one, or it would be drawn over what another shows."""
_EVERY_S = 0.2


@dataclass
class Meter:
    """How far a source has been read: bytes of its files, or rows of its dataset.

    Attributes:
        total: of all; None where it is not known.
        done: of what has been read before `file`.
        file: the one that is read now, as it lies on the disk.
    """

    total: int | None = None
    done: int = 0
    file: BinaryIO | None = None

    def position(self) -> int:
        """How much of `total` has been read."""
        return self.done + (0 if self.file is None or self.file.closed else self.file.tell())


class Bar:
    """What of a source has been tokenized, for who looks on."""

    def __init__(self, shown: Progress, name: str, meter: Meter) -> None:
        self._shown = shown
        self._meter = meter
        self._task = shown.add_task(name, total=meter.total, tokens="")
        self._tokens = 0
        self._next = 0.0

    def advance(self, tokens: int) -> None:
        """So many tokens have been written."""
        self._tokens += tokens
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_S
            self._shown.update(
                self._task,
                total=self._meter.total,
                completed=self._meter.position(),
                tokens=f"{self._tokens:,} tokens",
            )


@contextmanager
def progress(name: str, meter: Meter) -> Iterator[Bar]:
    """A bar that is there as long as the context; none where the errors do not go to a terminal."""
    columns = (
        TextColumn("tokenizing {task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal) as shown:
        # What is alive is drawn past the console's own escaping.
        name = printable(name)
        yield Bar(shown, name if len(name) < 40 else f"...{name[-36:]}", meter)
