"""Find the profile that a user has named: a run directory, a trace, or a summary; no torch here."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ConfigError
from .files import traces_in
from .summary import Summary, from_values, summarized
from .trace import read_json, read_trace


def load_summary(path: Path, *, rank: int | None = None) -> Summary:
    """The summary of a profile.

    Args:
        path: a run directory, its directory of profiles, a trace, or a summary.
        rank: whose trace, in a directory; None: the first that is there.

    Raises:
        ConfigError: there is none, or it is none.
    """
    if not path.exists():
        raise ConfigError(f"{path} is not there. Give a run directory, or a trace in its directory profile.")
    if path.is_dir():
        return summarized(read_trace(_trace_of(path, rank)))
    if rank is not None:
        raise ConfigError(f"--rank={rank} chooses among the traces of a directory, and {path} is a file.")
    if path.name.startswith("summary") and path.suffix == ".json":
        return from_values(read_json(path), path)
    return summarized(read_trace(path))


def _trace_of(directory: Path, rank: int | None) -> Path:
    found = traces_in(directory)
    if rank is None:
        return found[0]
    wanted = [path for path in found if path.name.startswith(f"rank-{rank:05}")]
    if not wanted:
        there = sorted({int(path.name[5:10]) for path in found})
        raise ConfigError(f"{directory} has no profile of rank {rank}. It has those of {', '.join(map(str, there))}.")
    return wanted[0]
