"""Answer what the page asks for, as values of JSON, from one or two runs and from parameters that are checked."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshwright_run.run_file import differing_settings

from . import timelines
from .compare import COMPARED, compare
from .ranks import LAST
from .run import WatchedRun

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams

_POINTS = 1200
_PATIENCE_S = 0.3
"""Time of reading for one answer and run; the page asks again."""
_NAMES = 500
"""Columns in one answer."""


class BadQuestion(ValueError):
    """A parameter is missing, or is not what it may be."""


class Answers:
    """Answers about some runs, which a question names by their place."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs = runs

    def state(self, query: QueryParams) -> dict[str, Any]:
        """All runs, after reading what is new; "more": there is more to be read at once."""
        found, more = [], False
        for run in self._runs:
            with run.lock:
                begun, has_more = time.monotonic(), True
                try:
                    while has_more and time.monotonic() - begun < _PATIENCE_S:
                        has_more = run.refresh()
                    found.append(run.state())
                except Exception as error:
                    # The page shows the others all the same.
                    has_more = False
                    found.append(run.unreadable(error))
                more |= has_more
        return {"runs": found, "more": more}

    def series(self, query: QueryParams) -> dict[str, Any]:
        """Columns of one run: each by itself, or together where `by` names the one that chooses the steps."""
        run, names, by = self._run(query), query.getlist("name")[:_NAMES], query.get("by")
        span = _span(query)
        with run.lock:
            return run.metrics.series(names, *span) if by is None else run.metrics.together(by, names, *span)

    def events(self, query: QueryParams) -> list[Any]:
        """All events of one run."""
        run = self._run(query)
        with run.lock:
            return [_clean(each) for each in run.events]

    def ranks(self, query: QueryParams) -> dict[str, Any]:
        """The last steps of all ranks of one run."""
        run, last = self._run(query), _whole(query, "last", 1) or LAST
        with run.lock:
            return run.ranks.look(min(last, LAST))

    def rank(self, query: QueryParams) -> dict[str, Any]:
        """Seconds and memory of one rank by step."""
        run, rank = self._run(query), _whole(query, "rank")
        if rank is None:
            raise BadQuestion("rank is missing")
        span = _span(query)
        with run.lock:
            found = run.ranks.history(rank, *span)
        if found is None:
            raise BadQuestion(f"rank {rank} has no file")
        return found

    def timeline(self, query: QueryParams) -> dict[str, Any]:
        """The pipeline's timeline in one step of one run, or in the latest."""
        return timelines.look(self._run(query).timeline, _whole(query, "step"))

    def compare(self, query: QueryParams) -> dict[str, Any]:
        """Two runs: first differing steps, differences by step, and settings that differ."""
        one, other = self._run(query, "one"), self._run(query, "other")
        span = _span(query)
        # One run after the other: two locks at once could be taken in two orders.
        with one.lock:
            mine, settings = {name: one.metrics.column(name) for name in COMPARED}, one.settings()
        with other.lock:
            found = {name: compare(mine[name], other.metrics.column(name), *span) for name in COMPARED}
            return {"columns": found, "settings": differing_settings(settings, other.settings())}

    def _run(self, query: QueryParams, key: str = "run") -> WatchedRun:
        place = _whole(query, key)
        if place is None or place >= len(self._runs):
            raise BadQuestion(f"{key} must be a number from 0 to {len(self._runs) - 1}")
        return self._runs[place]


def _whole(query: QueryParams, key: str, least: int = 0) -> int | None:
    """A parameter that is a whole number; None: it is not given."""
    text = query.get(key)
    if text is None:
        return None
    # Digits of other scripts are digits, too.
    if not (text.isascii() and text.isdigit() and len(text) <= 15) or int(text) < least:
        raise BadQuestion(f"{key} must be a whole number, at least {least}")
    return int(text)


def _span(query: QueryParams) -> tuple[int | None, int | None, int]:
    """First and last step that are shown, and how many points."""
    return _whole(query, "from"), _whole(query, "to"), _whole(query, "points", 2) or _POINTS


def as_json(value: Any) -> bytes:
    """Return a value as JSON in ASCII, so that lone surrogates are no error; what is not finite is null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_clean(value), allow_nan=False, separators=(",", ":")).encode()


def _clean(value: Any) -> Any:
    """A value without numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _clean(each) for key, each in value.items()}
    return [_clean(each) for each in value] if isinstance(value, list | tuple) else value
