"""Show the progress of tokenizing a source, on a terminal only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshwright.plugin import create_console, escape_unprintable

CONSOLE = create_console(stderr=True)
"""Console of all progress bars and spinners; two consoles would overwrite each other."""
_EVERY_S = 0.2


@dataclass
class ReadProgress:
    """Progress of reading a source: bytes, `num_done` of them before `file`, or rows of a dataset."""

    total: int | None = None
    num_done: int = 0
    file: BinaryIO | None = None

    def position(self) -> int:
        return self.num_done + (0 if self.file is None or self.file.closed else self.file.tell())


@contextmanager
def show_progress(name: str, read_progress: ReadProgress) -> Iterator[Callable[[int], None]]:
    columns = (
        TextColumn("tokenizing {task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal) as progress:
        # A live display bypasses the console's own escaping.
        name = escape_unprintable(name)
        task = progress.add_task(name if len(name) < 40 else f"...{name[-36:]}", total=read_progress.total, tokens="")
        tokens, due = 0, 0.0

        def advance(count: int) -> None:
            nonlocal tokens, due
            tokens += count
            if time.monotonic() >= due:
                due = time.monotonic() + _EVERY_S
                progress.update(
                    task, total=read_progress.total, completed=read_progress.position(), tokens=f"{tokens:,} tokens"
                )

        yield advance
