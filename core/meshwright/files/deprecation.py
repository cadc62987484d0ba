"""Names and options that will go away: whoever uses one is told since when, until when, and what takes its place.

docs/releasing.md says what may go away, and when.
"""

from __future__ import annotations

import sys

from ..files.terminal import warn

_OURS = ("meshwright", "pydantic")
"""Packages whose lines nobody can mend who is warned: ours, and what calls our validators."""


def warn_deprecated(what: str, *, since: str, removed_in: str, instead: str) -> None:
    """Warn of the use of something that will go away, at the line of the caller's code that uses it.

    Python shows it where that line is of a script or a test.

    Args:
        what: the name or option, with its kind, such as "the option use_custom_fsdp".
        since: the first version that warns.
        removed_in: the first version without it; a test of ours fails once it is due.
        instead: what to do, as a sentence.
    """
    text = f"{what} is deprecated since meshwright {since} and goes away in {removed_in}. {instead}"
    warn(text, DeprecationWarning, stacklevel=_callers_level())


def _callers_level() -> int:
    """How far above `warn_deprecated` the first frame is that is not of ours; the outermost one if all are."""
    frame, level = sys._getframe(2), 2
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(module: str) -> bool:
    package = module.partition(".")[0]
    return package.partition("_")[0] in _OURS
