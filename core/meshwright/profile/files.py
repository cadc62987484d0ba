"""Names of the files that profiles leave in a run's directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..base.errors import ConfigError

DIRECTORY, FAULTS = "profile", "faults"


def suffix(window: tuple[int, int], windows: Sequence[tuple[int, int]]) -> str:
    """What tells the files of one window from those of others; nothing where there is one."""
    return "" if len(windows) == 1 else f"-steps-{window[0]}-{window[1]}"


def trace_name(rank: int, suffix: str = "") -> str:
    return f"rank-{rank:05}{suffix}.json.gz"


def memory_name(rank: int, suffix: str = "") -> str:
    return f"rank-{rank:05}{suffix}-memory.json"


def snapshot_name(rank: int, suffix: str = "") -> str:
    return f"rank-{rank:05}{suffix}-memory.pickle"


def traces_in(directory: Path) -> list[Path]:
    """The traces of a run directory, or of its directory of profiles, by rank and window.

    Raises:
        ConfigError: there is none.
    """
    for place in (directory / DIRECTORY, directory):
        found = sorted(place.glob("rank-*.json.gz"))
        if found:
            return found
    raise ConfigError(
        f"{directory} holds no profile: there is no {DIRECTORY}/rank-*.json.gz. Set profile.steps in the run file, "
        f"such as --set profile.steps=[4,6], and run it."
    )
