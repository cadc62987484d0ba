"""The API of the page: JSON-serializable data of one or two runs. Query parameters are validated."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright.plugin import read_json_object
from meshwright_run.run_directory import PLANNED_SCHEDULE
from meshwright_run.settings_diff import diff_settings, list_defaults, list_settings

from .metric_columns import (
    MAX_POINTS,
    FileTail,
    choose_points,
    is_finite,
    list_numbered_files,
    parse_lines,
    slice_steps,
    to_float,
    to_json_list,
)
from .run import NUM_RECENT_STEPS, WatchedRun
from .x_axis import STEP, X_AXES, XAxis

Column = tuple[np.ndarray, np.ndarray]  # Steps, int64 (N), ascending, and values, float64 (N)
COMPARED_COLUMNS = ("loss", "grad_norm")
DIVERGENCE_TOLERANCE = 1e-6  # Relative; for many steps, sums in another order differ by less


def compare_columns(one: Column, other: Column, low: int | None, high: int | None, points: int) -> dict[str, Any]:
    """Return the differences of a column of two runs by step, JSON-serializable; NaN equals NaN."""
    at, ones, others = np.intersect1d(one[0], other[0], assume_unique=True, return_indices=True)
    a, b = one[1][ones], other[1][others]
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        relative = np.where(differs, np.abs(a - b) / np.maximum(np.abs(a), np.abs(b)), 0.0)
    # Differences to non-finite values are infinite.
    relative = np.where(np.isfinite(relative), relative, np.inf)
    largest = float(relative.max(initial=0.0))

    def first(where: np.ndarray) -> dict[str, Any] | None:
        index = int(np.argmax(where)) if where.any() else None
        if index is None:
            return None
        return {"step": int(at[index]), "one": to_json_list(a)[index], "other": to_json_list(b)[index]}

    summary = {"steps": len(at), "first": first(differs), "diverged": first(relative > DIVERGENCE_TOLERANCE)}
    part = slice_steps(at, low, high)
    shown = choose_points(at[part], relative[part], min(points, MAX_POINTS))
    line = {"x": at[part][shown].tolist(), "y": to_json_list(relative[part][shown])}
    return {**summary, "max_difference": largest if np.isfinite(largest) else None, **line}


_WINDOW = 1 << 18
_MAX_RANK_FILES = 256
_MAX_ACTIONS = 100_000


def load_timeline(directory: Path, step: int | None = None) -> dict[str, Any]:
    """Return the planned timeline and the measured one of a step (None: the latest), JSON-serializable."""
    by_step: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, path in list_numbered_files(directory, r"rank-(\d{1,9})\.jsonl", _MAX_RANK_FILES).items():
        for record in parse_lines(FileTail(path, window=_WINDOW).read(_WINDOW).lines)[0]:
            at, actions, pp_rank = record.get("step"), _parse_actions(record.get("actions")), record.get("pp_rank")
            if type(at) is int and is_finite(record.get("time")) and actions:
                # After a rollback or restart, the last measurement of a step counts.
                pp_rank = pp_rank if type(pp_rank) is int else rank
                measured = {"rank": rank, "pp_rank": pp_rank, "begin": record["time"], "actions": actions}
                by_step.setdefault(at, {})[rank] = measured
    steps = sorted(by_step)
    shown = step if step in by_step else (steps[-1] if steps else None)
    found = by_step.get(shown, {}).values() if shown is not None else ()
    ranks = sorted(found, key=lambda each: (each["pp_rank"], each["rank"]))
    begin = min((each["begin"] for each in ranks), default=0.0)
    for each in ranks:
        late = each.pop("begin") - begin
        each["actions"] = [[*what, start + late, end + late] for *what, start, end in each["actions"]]
    return {"planned": _load_planned(directory / PLANNED_SCHEDULE), "steps": steps, "step": shown, "measured": ranks}


def _load_planned(path: Path) -> dict[str, Any] | None:
    try:
        found = read_json_object(path)
    except (OSError, ValueError):
        return None
    ranks = found.get("ranks")
    if not isinstance(ranks, list):
        return None
    return {
        "schedule": str(found.get("schedule", "")),
        "unit": str(found.get("unit", "")),
        "bubble": to_float(found.get("bubble", 0.0)),
        "ranks": [_parse_actions(each) for each in ranks[:_MAX_RANK_FILES]],
    }


def _parse_actions(value: Any) -> list[list[Any]]:
    found = []
    for each in value[:_MAX_ACTIONS] if isinstance(value, list) else []:
        kinds = [type(part) for part in each] if isinstance(each, list) else []
        if kinds[:3] == [str, int, int] and len(kinds) == 5 and all(map(is_finite, each[3:])):
            found.append([*each[:3], *map(to_float, each[3:])])
    return found


if TYPE_CHECKING:
    from starlette.datastructures import QueryParams

_DEFAULT_POINTS = 1200
_READ_BUDGET_S = 0.3  # Maximum time to read one run in a request; the page then asks again
_MAX_NAMES = 500  # Maximum number of columns in a response


class BadQueryError(ValueError):
    """A query parameter is missing or invalid."""


class WatchApi:
    """Handlers of the API. Queries name a run by its index."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs = runs

    def state(self, query: QueryParams) -> dict[str, Any]:
        """Return the state of all runs after reading new data. "more": whether unread data remain."""
        found, more = [], False
        for run in self._runs:
            with run.lock:
                started, has_more = time.monotonic(), True
                try:
                    while has_more and time.monotonic() - started < _READ_BUDGET_S:
                        has_more = run.refresh()
                    found.append(run.get_state())
                except Exception as error:
                    has_more = False  # the page still shows the other runs
                    found.append(run.get_error_state(error))
                more |= has_more
        return {"runs": found, "more": more}

    def series(self, query: QueryParams) -> dict[str, Any]:
        """Return columns of one run: each downsampled separately, or all at the steps chosen for the column `by`."""
        run, names, by = self._get_run(query), query.getlist("name")[:_MAX_NAMES], query.get("by")
        smoothing = _parse_number(query, "smoothing") or 0.0
        if smoothing >= 1:
            raise BadQueryError("smoothing must be below 1")
        with run.lock:
            axis, span = _parse_span(query, run)
            if by is not None:
                aligned = run.metrics.get_aligned(by, names, *span)
                axis.place(aligned)
                return aligned
            found = run.metrics.get_series(names, *span, smoothing=smoothing)
            for line in found.values():
                axis.place(line)
            return found

    def settings(self, query: QueryParams) -> list[Any]:
        """Return key, value and default of each setting of a run."""
        from meshwright_run.run_file import RunConfig  # It takes a second: only when the page asks

        run = self._get_run(query)
        with run.lock:
            values = run.load_settings()
        return list_settings(values, list_defaults(RunConfig))

    def events(self, query: QueryParams) -> list[Any]:
        run = self._get_run(query)
        with run.lock:
            return [_replace_nonfinite(each) for each in run.events]

    def ranks(self, query: QueryParams) -> dict[str, Any]:
        run, last = self._get_run(query), _parse_int(query, "last", 1) or NUM_RECENT_STEPS
        with run.lock:
            return run.ranks.summarize(min(last, NUM_RECENT_STEPS))

    def rank(self, query: QueryParams) -> dict[str, Any]:
        run, rank = self._get_run(query), _parse_int(query, "rank")
        if rank is None:
            raise BadQueryError("rank is missing")
        with run.lock:
            axis, span = _parse_span(query, run)
            found = run.ranks.get_history(rank, *span)
        if found is None:
            raise BadQueryError(f"rank {rank} has no file")
        for line in found["series"].values():
            axis.place(line)
        return found

    def timeline(self, query: QueryParams) -> dict[str, Any]:
        return load_timeline(self._get_run(query).timeline_directory, _parse_int(query, "step"))

    def compare(self, query: QueryParams) -> dict[str, Any]:
        one, other = self._get_run(query, "one"), self._get_run(query, "other")
        # One lock at a time: two requests could acquire two locks in opposite orders.
        with one.lock:
            axis, span = _parse_span(query, one)
            mine, settings = {name: one.metrics.get_column(name) for name in COMPARED_COLUMNS}, one.load_settings()
        with other.lock:
            found = {
                name: compare_columns(mine[name], other.metrics.get_column(name), *span) for name in COMPARED_COLUMNS
            }
            differences = diff_settings(settings, other.load_settings())
        for line in found.values():
            axis.place(line)
        return {"columns": found, "settings": differences}

    def _get_run(self, query: QueryParams, key: str = "run") -> WatchedRun:
        index = _parse_int(query, key)
        if index is None or index >= len(self._runs):
            raise BadQueryError(f"{key} must be a number from 0 to {len(self._runs) - 1}")
        return self._runs[index]


def _parse_int(query: QueryParams, key: str, minimum: int = 0) -> int | None:
    """Return an integer parameter; None if it is missing. Raises BadQueryError."""
    text = query.get(key)
    if text is None:
        return None
    # `isdigit` also accepts digits of other scripts.
    if not (text.isascii() and text.isdigit() and len(text) <= 15) or int(text) < minimum:
        raise BadQueryError(f"{key} must be an integer of at least {minimum}")
    return int(text)


def _parse_number(query: QueryParams, key: str) -> float | None:
    """Return a decimal number of at least 0; None if it is missing. Raises BadQueryError."""
    text = query.get(key)
    if text is not None and not re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,9})?", text):
        raise BadQueryError(f"{key} must be a decimal number of at least 0")
    return None if text is None else float(text)


def _parse_span(query: QueryParams, run: WatchedRun) -> tuple[XAxis, tuple[int | None, int | None, int]]:
    """Return the x axis, and first step, last step and number of points of the part of it that is shown."""
    name = query.get("axis", STEP)
    if name not in X_AXES:
        raise BadQueryError(f"axis must be one of {', '.join(X_AXES)}")
    axis = XAxis(run.metrics, name)
    low, high = axis.to_steps(_parse_number(query, "from"), _parse_number(query, "to"))
    return axis, (low, high, _parse_int(query, "points", 2) or _DEFAULT_POINTS)


def to_json(value: Any) -> bytes:
    """Return a value as ASCII JSON, so that lone surrogates cause no error; non-finite numbers become null."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:
        return json.dumps(_replace_nonfinite(value), allow_nan=False, separators=(",", ":")).encode()


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _replace_nonfinite(each) for key, each in value.items()}
    return [_replace_nonfinite(each) for each in value] if isinstance(value, list | tuple) else value
