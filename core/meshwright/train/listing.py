"""Which names in an output directory are those of runs. No torch in this module."""

from __future__ import annotations

from pathlib import Path

from ..base.errors import ConfigError
from ..files.parsing import open_regular, parse_json
from .files import LISTED, REPLACED, REPLACED_FILES

_LARGEST = 1 << 16


def listed(directory: Path) -> set[str]:
    """The names that runs have made in a directory, as the first of them has written down."""
    try:
        with open_regular(directory / LISTED) as file:
            names = parse_json(file.read(_LARGEST).decode())
    except (OSError, ValueError):
        return set()
    return {each for each in names if each in (*REPLACED, *REPLACED_FILES)} if isinstance(names, list) else set()


def check_listed(directory: Path) -> None:
    """Refuse to replace what no run has made.

    Raises:
        ConfigError: names it.
    """
    known = listed(directory)
    others = [name for name in (*REPLACED, *REPLACED_FILES) if name not in known and (directory / name).exists()]
    if others:
        raise ConfigError(
            f"overwrite=true would remove {', '.join(others)} in output_dir={str(directory)!r}, which no run has made "
            f"there ({LISTED} has what runs have made). Move it away, or name another directory."
        )
