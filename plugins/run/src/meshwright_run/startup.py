"""Seconds from the command to the end of the first step, by part. No torch in this module."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.plugin import StepResult, hookimpl

_STARTED = time.time()


def process_start() -> float:
    """Return when this process started [s since 1970], or if unknown, when this module was imported."""
    try:
        # The 22nd field, counted behind the command's name, which may contain blanks; in ticks since boot.
        ticks = float(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
        since_boot = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return _STARTED
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")


@dataclass
class Startup:
    """When each part of the way to the first step has ended."""

    is_shown: bool = False
    begin: float = field(default_factory=process_start)
    ends: list[tuple[str, float]] = field(default_factory=list)

    def end(self, part: str) -> None:
        """End a part; consecutive parts of one name are one."""
        if self.ends and self.ends[-1][0] == part:
            self.ends.pop()
        self.ends.append((part, time.time()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part, and in total."""
        found: dict[str, float] = {}
        before = self.begin
        for part, end in self.ends:
            found[part] = found.get(part, 0.0) + end - before
            before = end
        return {**{part: round(each, 3) for part, each in found.items()}, "total": round(before - self.begin, 3)}

    def __str__(self) -> str:
        return "startup: " + ", ".join(f"{part} {each:.1f} s" for part, each in self.seconds().items())


class StartupReport:
    """Observer on the first rank that ends the last part with the first step, and reports all."""

    def __init__(self, startup: Startup, *, note: Callable[..., None], show: Callable[[str], None]) -> None:
        self._startup: Startup | None = startup
        self._note, self._show = note, show

    @hookimpl
    def on_step_end(self, result: StepResult) -> None:
        startup, self._startup = self._startup, None
        if startup is None:
            return
        startup.end("first step")
        self._note("startup", step=result.step, seconds=startup.seconds())
        if startup.is_shown:
            self._show(str(startup))
