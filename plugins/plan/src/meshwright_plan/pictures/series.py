"""Memory at kept moments and the bars of each stream: what pictures of a step are drawn of.

[Note: moments] Memory is given for each operator in the order in which the host issues them: what is held when it
ends, from when it begins on the computing stream until the next one does. What is no kernel of that stream counts from
when the kernel before it ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.plugin import Degrees

from ..allocator import COMPUTE
from ..device import Device
from ..links import members
from ..meter import OWNERS
from ..time import Span, Timeline
from ..trace import Operation, Trace

INSIDE, BETWEEN = LINKS = ("inside", "between")
"""Links within a node and between nodes."""
SENDS = "to "
"""Prefix of the names of message streams; a rank follows."""
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Memory:
    """What a rank holds over a step, at kept moments; see [Note: moments].

    Attributes:
        owners: bytes at each moment, by owner; owners that never hold any are left out.
        peak: the place of the moment that holds the most; of equal ones the last, as in `Trace.peak`.
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
    """Return the memory of a rank at about `most` moments, with the least and the largest of each stretch."""
    last: dict[int, Operation] = {}
    for each in found.operations:
        # Marks for profilers hold nothing.
        if each.logged not in last or not each.name.startswith("profiler."):
            last[each.logged] = each
    moments = sorted(last)
    totals, total, begin = [], 0, 0
    for logged in moments:
        total += sum(change for _, change in found.log[begin:logged])
        totals.append(total)
        begin = logged
    peak = max(range(len(totals)), key=lambda place: (totals[place], place))
    places = kept(totals, most, (peak,))
    moments = [moments[place] for place in places]
    held = _by_owner(found, moments)
    return Memory(
        found.rank,
        tuple(_begun(line, moments)),
        {owner: tuple(each[owner] for each in held) for owner in OWNERS if any(each[owner] for each in held)},
        tuple(last[logged].name for logged in moments),
        tuple(last[logged].phase for logged in moments),
        places.index(peak),
        len(totals),
    )


def kept(values: Sequence[float], most: int, always: Iterable[int] = ()) -> list[int]:
    """Return the places of about `most` values: the least and the largest of each stretch, and both ends."""
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
    """Yield when each moment begins on the computing stream [s]."""
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
    """Operators that run one after the other on a stream; `name` is that of the longest, `busy` their seconds."""

    name: str
    phase: str
    count: int
    start: float
    end: float
    busy: float


@dataclass(frozen=True)
class Lane:
    """One stream of a rank; `link` is empty where it does not communicate."""

    rank: int
    stream: str
    link: str
    bars: tuple[Bar, ...]


def lanes(
    traces: Sequence[Trace], lines: Sequence[Timeline], degrees: Degrees, device: Device, most: int = 16_000
) -> list[Lane]:
    """Return the streams of ranks in about `most` bars; short operators share a bar with their neighbours."""
    streams = [(found, line, *item) for found, line in zip(traces, lines, strict=True) for item in _streams(line)]
    room = _room([len(spans) for *_, spans in streams], most)
    made = []
    for found, line, stream, spans in streams:
        sizes = {each.group: each.ranks for each in found.collectives}
        joined = _link_of(stream, line.rank, degrees, device, sizes)
        width = 0.0 if len(spans) <= room else 2 * line.seconds / room
        made.append(Lane(line.rank, stream, joined, tuple(_bars(spans, width))))
    return made


def _room(counts: Iterable[int], most: int) -> int:
    """Return the most that each may have, so that all together have at most `most`."""
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
    """Yield bars of one phase each; those of several spans last at most `width` seconds."""
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


def _link_of(stream: str, rank: int, degrees: Degrees, device: Device, sizes: Mapping[str, int]) -> str:
    """Return the link of a stream, "" if it does not communicate; `sizes` are those of groups by name."""
    if stream.startswith(SENDS):
        return link([rank, int(stream.removeprefix(SENDS))], device)
    return link(members(stream, rank, degrees, sizes[stream]), device) if stream in sizes else ""


def link(ranks: Iterable[int], device: Device) -> str:
    """Return what joins these ranks: `BETWEEN` if they are on several nodes."""
    return BETWEEN if len({rank // device.node.ranks for rank in ranks}) > 1 else INSIDE


def hidden(line: Timeline, stream: str) -> float:
    """Return the seconds in which both a stream and the computing stream work."""
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
