"""What pictures of a step are drawn of: memory at kept moments, and what runs on each stream, in few enough pieces.

[Note: moments] Memory is told of each operator, in the order in which the host issues them: what is held at its end,
its results included, and from when it begins on the computing stream until the next does. What is no kernel of that
stream counts from when the kernel before it ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...mesh.sizes import Degrees
from ..device import Device
from ..links import members
from ..meter import OWNERS
from ..time import COMPUTE, Span, Timeline
from ..trace import Operation, Trace

INSIDE, BETWEEN = "inside", "between"
"""Links: within a node, and between nodes."""
LINKS = (INSIDE, BETWEEN)
SENDS = "to "
"""What names of streams of messages begin with; a rank follows."""
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Memory:
    """What a rank holds over a step, at kept moments; see [Note: moments].

    Attributes:
        seconds: from when each is, never falling.
        owners: bytes at each moment by owner, of owners that hold any at some moment, in the order of `OWNERS`.
        operators: the one that has ended at each moment.
        phases: its phase.
        peak: the place of the moment at which most is held: of equal ones the last, as in `Trace.peak`.
        moments: how many there were to keep from.
    """

    rank: int
    seconds: tuple[float, ...]
    owners: dict[str, tuple[int, ...]]
    operators: tuple[str, ...]
    phases: tuple[str, ...]
    peak: int
    moments: int

    @property
    def totals(self) -> list[int]:
        return [sum(sizes) for sizes in zip(*self.owners.values(), strict=True)]


def memory(found: Trace, line: Timeline, most: int = 2000) -> Memory:
    """Of one rank, at about so many moments at most: of each stretch those at which least and most is held are kept."""
    last: dict[int, Operation] = {}
    for each in found.operations:
        # Marks for profilers hold nothing.
        if each.logged not in last or not each.name.startswith("profiler."):
            last[each.logged] = each
    totals, total, begin = [], 0, 0
    for logged in sorted(last):
        total += sum(change for _, change in found.log[begin:logged])
        totals.append(total)
        begin = logged
    largest = max(totals)
    peak = max(place for place, each in enumerate(totals) if each == largest)
    places = kept(totals, most, (peak,))
    moments = [sorted(last)[place] for place in places]
    held = _by_owner(found, moments)
    operations = [last[logged] for logged in moments]
    return Memory(
        found.rank,
        tuple(_begun(line, moments)),
        {owner: tuple(each[owner] for each in held) for owner in OWNERS if any(each[owner] for each in held)},
        tuple(each.name for each in operations),
        tuple(each.phase for each in operations),
        places.index(peak),
        len(totals),
    )


def kept(values: Sequence[float], most: int, always: Iterable[int] = ()) -> list[int]:
    """Places of at most about so many values: of each stretch the least and the largest, and the ends."""
    if len(values) <= most:
        return list(range(len(values)))
    count = max(1, most // 2)
    found = {0, len(values) - 1, *always}
    for first, behind in pairwise(len(values) * part // count for part in range(count + 1)):
        found |= {min(range(first, behind), key=values.__getitem__), max(range(first, behind), key=values.__getitem__)}
    return sorted(found)


def _by_owner(found: Trace, moments: Sequence[int]) -> list[Counter[str]]:
    held: Counter[str] = Counter()
    states, begin = [], 0
    for logged in moments:
        for block, change in found.log[begin:logged]:
            held[found.owners.get(block, "other")] += change
        states.append(held.copy())
        begin = logged
    return states


def _begun(line: Timeline, moments: Sequence[int]) -> Iterator[float]:
    """From when it is on the computing stream what it is at each moment [s]."""
    spans = [span for span in line.spans if span.stream == COMPUTE]
    logged = [span.logged for span in spans]
    for moment in moments:
        place = bisect_left(logged, moment)
        if place < len(spans) and logged[place] == moment:
            yield spans[place].start
        else:
            yield spans[place - 1].end if place else 0.0


@dataclass(frozen=True)
class Bar:
    """Operators that run one after the other on a stream, often a single one.

    Attributes:
        name: of the longest.
        count: how many.
        start, end, busy: from and until when, and how much of that is worked [s].
    """

    name: str
    phase: str
    count: int
    start: float
    end: float
    busy: float


@dataclass(frozen=True)
class Lane:
    """One stream of a rank.

    Attributes:
        link: one of `LINKS` where it communicates.
    """

    rank: int
    stream: str
    link: str
    bars: tuple[Bar, ...]


def lanes(
    traces: Sequence[Trace], lines: Sequence[Timeline], degrees: Degrees, device: Device, most: int = 16_000
) -> list[Lane]:
    """The streams of ranks, in about so many bars at most: what is short is taken together with what is beside it."""
    streams = [(found, line, *item) for found, line in zip(traces, lines, strict=True) for item in _streams(line)]
    room = _room([len(spans) for *_, spans in streams], most)
    made = []
    for found, line, stream, spans in streams:
        sizes = {each.group: each.ranks for each in found.collectives}
        joined = link_of(stream, line.rank, degrees, device, sizes)
        width = 0.0 if len(spans) <= room else 2 * line.seconds / room
        made.append(Lane(line.rank, stream, joined, tuple(_bars(spans, width))))
    return made


def _room(counts: Iterable[int], most: int) -> int:
    """The largest number that each may have, if together they are to have so many at most."""
    rest = sorted(counts)
    while rest and rest[0] * len(rest) <= most:
        most -= rest.pop(0)
    return max(1, most // max(1, len(rest)))


def _streams(line: Timeline) -> list[tuple[str, list[Span]]]:
    found: dict[str, list[Span]] = {COMPUTE: []}
    for span in line.spans:
        found.setdefault(span.stream, []).append(span)
    return sorted(found.items(), key=lambda item: item[0].startswith(SENDS))


def _bars(spans: Iterable[Span], width: float) -> Iterator[Bar]:
    """Bars that are no longer than so many seconds, where they are of several spans."""
    group: list[Span] = []
    for span in sorted(spans, key=lambda each: each.start):
        if group and (span.phase != group[0].phase or span.end - group[0].start > width):
            yield _bar(group)
            group = []
        group.append(span)
    if group:
        yield _bar(group)


def _bar(group: Sequence[Span]) -> Bar:
    longest = max(group, key=lambda each: each.end - each.start)
    busy = sum(each.end - each.start for each in group)
    return Bar(longest.name, group[0].phase, len(group), group[0].start, group[-1].end, busy)


def link_of(stream: str, rank: int, degrees: Degrees, device: Device, sizes: Mapping[str, int]) -> str:
    """What a stream communicates over: "" where it does not.

    Args:
        sizes: of groups, by their names.
    """
    if stream.startswith(SENDS):
        return link([rank, int(stream.removeprefix(SENDS))], device)
    return link(members(stream, rank, degrees, sizes[stream]), device) if stream in sizes else ""


def link(ranks: Iterable[int], device: Device) -> str:
    """What joins these ranks: `BETWEEN` where they are of several nodes."""
    return BETWEEN if len({rank // device.node.ranks for rank in ranks}) > 1 else INSIDE


def hidden(line: Timeline, stream: str) -> float:
    """Of the seconds in which a stream works, those in which the computing stream works too."""
    computed = [(each.start, each.end) for each in line.spans if each.stream == COMPUTE]
    starts, ends = zip(*computed, strict=True) if computed else ((), ())
    found = 0.0
    for span in line.spans:
        if span.stream == stream:
            place = bisect_right(ends, span.start)
            while place < len(starts) and starts[place] < span.end:
                found += min(span.end, ends[place]) - max(span.start, starts[place])
                place += 1
    return found
