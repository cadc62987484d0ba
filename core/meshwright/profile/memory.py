"""Memory over time, by what the profiler writes down where it is asked to (`profile.memory`); no torch here.

On a CPU it sees only what is taken and given back while it runs, so its totals are what a window has added to what was
held before. On an accelerator they are the allocator's, all of it.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .spans import OPERATOR, Span
from .trace import MemoryChange, Trace

POINTS = 2000
"""Of a timeline that is written down."""


@dataclass(frozen=True)
class MemoryPeak:
    """The moment of a window in which most was held.

    Attributes:
        bytes: at the peak; see this module on what is counted.
        operator: the one that took the last of it; "": none was under way.
        part: of the step, likewise.
        parts: the most that was held in each part.
    """

    bytes: int
    operator: str
    part: str
    parts: dict[str, int]


def memory_peak(trace: Trace) -> MemoryPeak | None:
    """None: the trace knows nothing of memory."""
    changes = _of_one_device(trace.memory)
    if not changes:
        return None
    last = max(changes, key=lambda change: change.total)
    marks = [each for each in trace.spans if each.part is not None]
    parts: dict[str, int] = {}
    for mark in marks:
        held = _most(changes, mark)
        parts[str(mark.part)] = max(held, parts.get(str(mark.part), 0))
    operators = [each for each in trace.spans if each.kind == OPERATOR and each.thread == last.thread]
    return MemoryPeak(last.total, _innermost(operators, last.at), _innermost(marks, last.at, by_part=True), parts)


def timeline(trace: Trace) -> dict[str, Any]:
    """What was held over time, and who took it, as values of JSON.

    The points are the highest of equal shares of the changes: `seconds` since the first mark, and `bytes`.
    """
    changes, peak = _of_one_device(trace.memory), memory_peak(trace)
    marks = [each.start for each in trace.spans if each.step is not None]
    start = min(marks, default=changes[0].at if changes else 0.0)
    each_of = max(1, -(-len(changes) // POINTS))
    shares = [changes[index : index + each_of] for index in range(0, len(changes), each_of)]
    points = [max(share, key=lambda change: change.total) for share in shares]
    return {
        "counts": "all that the allocator gave" if _is_on_device(trace) else "what the window added to what was held",
        "peak_bytes": peak.bytes if peak else 0,
        "peak_operator": peak.operator if peak else "",
        "peak_part": peak.part if peak else "",
        "parts": peak.parts if peak else {},
        "taken_by_operator": _taken(trace, changes),
        "seconds": [point.at - start for point in points],
        "bytes": [point.total for point in points],
    }


def _is_on_device(trace: Trace) -> bool:
    return any(change.is_on_device for change in trace.memory)


def _of_one_device(changes: Sequence[MemoryChange]) -> list[MemoryChange]:
    """Those of the accelerator, if there is one: what the host takes beside it is little."""
    return [change for change in changes if change.is_on_device] or list(changes)


def _most(changes: Sequence[MemoryChange], mark: Span) -> int:
    """The most that was held while a part of a step was under way, what was held when it began included."""
    first = bisect.bisect_right(changes, mark.start, key=lambda change: change.at)
    last = bisect.bisect_right(changes, mark.end, key=lambda change: change.at)
    return max((change.total for change in changes[max(0, first - 1) : last]), default=0)


def _taken(trace: Trace, changes: Sequence[MemoryChange]) -> dict[str, int]:
    """Bytes that operators have taken, given back or not, largest first."""
    threads: dict[int | str, list[Span]] = defaultdict(list)
    for each in trace.spans:
        if each.kind == OPERATOR:
            threads[each.thread].append(each)
    taken: dict[str, int] = defaultdict(int)
    for thread, operators in threads.items():
        operators.sort(key=lambda span: (span.start, -span.end))
        open_ones: list[Span] = []
        index = 0
        for change in changes:
            if change.thread != thread or change.bytes <= 0:
                continue
            while index < len(operators) and operators[index].start <= change.at:
                while open_ones and open_ones[-1].end <= operators[index].start:
                    open_ones.pop()
                open_ones.append(operators[index])
                index += 1
            while open_ones and open_ones[-1].end < change.at:
                open_ones.pop()
            # Operators call others, such as aten::empty; the outermost that does work is told.
            taken[next((each.name for each in open_ones if each.computes), "none")] += change.bytes
    return dict(sorted(taken.items(), key=lambda item: -item[1]))


def _innermost(spans: Sequence[Span], at: float, *, by_part: bool = False) -> str:
    under_way = [each for each in spans if each.start <= at <= each.end]
    if not under_way:
        return ""
    last = max(under_way, key=lambda span: span.start)
    return str(last.part) if by_part else last.name
