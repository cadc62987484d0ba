"""Whether the library of a tracker is installed, told without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from meshwright.base.errors import ConfigError


@dataclass(frozen=True)
class Library:
    """What a tracker needs.

    Attributes:
        tracker: its name, which is that of the extra, too.
        distributions: any of which brings the library.
        modules: all of which can be imported then.
        at_least: major and minor version.
    """

    tracker: str
    distributions: tuple[str, ...]
    modules: tuple[str, ...]
    at_least: tuple[int, int]

    def check(self) -> None:
        """Raises ConfigError where it is missing or too old."""
        remedy = (
            f"Install it from a clone of meshwright with: pip install -c constraints.txt -e "
            f"'plugins/trackers[{self.tracker}]', or leave {self.tracker} out of trackers."
        )
        missing = [name for name in self.modules if find_spec(name) is None]
        if missing:
            raise ConfigError(f"tracker {self.tracker!r} needs {', '.join(missing)}, which is not installed. {remedy}")
        found = next((found for name in self.distributions if (found := _version(name)) is not None), None)
        if found is not None and _major_minor(found) < self.at_least:
            needed = ".".join(map(str, self.at_least))
            raise ConfigError(f"tracker {self.tracker!r} needs version {needed} or later, not {found}. {remedy}")


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _major_minor(text: str) -> tuple[int, int]:
    major, minor, *_ = (*text.split("."), "0")
    return int(major), int(minor) if minor.isdecimal() else 0
