"""Ranks of a pipeline, from pipelines of few stages, blocks and microbatches under the same schedule.

[Note: small pipelines] What a rank of a pipeline holds and sends grows evenly with the blocks of each of its stages,
with the microbatches of a step and, since it waits for longer, with the stages; the first two ranks and the last two
keep their places, and those between lie between the second and the last but one. Which numbers of microbatches are
alike in this is said by the schedule. So small pipelines are traced, of three ranks and four, or of as many as there are.

[Note: seconds] Which stage holds up others changes with their depth. So what a microbatch takes on each stage is what
grows evenly, and the schedule's own order tells what a step takes. What that leaves out (messages, the optimizer, what is
gathered first and reduced last) is what the small pipelines take more when their stages are played together.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol

from pydantic import BaseModel

from ..base.errors import MeshwrightError
from .depth import Net, NotLinear, Numbers, Point, Report, are_alike, mixed
from .device import Device
from .time import COMPUTE, Timeline, play
from .trace import Job, Trace

DEPTHS = ((3, 4, 5), (4, 6, 8))
"""Blocks of a stage, the last to check."""
FEW, MORE, CHECK = 3, 4, 5
"""Ranks of small pipelines, the last to check."""


class InStages(Protocol):
    """What a manager's `in_stages(model)` answers, of a strategy that divides models into stages.

    Attributes:
        blocks: of each stage.
    """

    blocks: tuple[int, ...]

    def with_blocks(self, blocks: Sequence[int]) -> BaseModel:
        """Options under which stages have so many."""

    def steady(self, ranks: int, rows: int) -> tuple[int, int] | None:
        """From how many microbatches of so many sequences on, and in steps of how many, more of them add the same."""

    def placement(self, ranks: int, sequences: int) -> tuple[int, ...]:
        """The rank of each stage."""

    def seconds(self, costs: Sequence[float], *, forward: float, ranks: int, sequences: int) -> float:
        """A step, if messages take no time.

        Args:
            costs: of a sequence on each stage, there and back [s].
            forward: the share of it that does not come in a backward.
        """


@dataclass(frozen=True)
class Tracer:
    """How ranks are traced.

    Attributes:
        steps: of a job and a rank, its steps with each number of microbatches.
        told: what is told of a step that was played.
    """

    device: Device
    steps: Callable[[Job, int, Sequence[int]], list[Trace]]
    told: Callable[[Trace, Timeline], Report]


def from_small(job: Job, stages: InStages, asked: Sequence[int], tracer: Tracer) -> list[Report] | None:
    """What ranks of a pipeline hold, send and take; see [Note: small pipelines].

    Returns:
        None where small pipelines do not tell, or are no smaller.
    """
    known: dict[tuple[Point, int], Trace] = {}
    of_stage = job.degrees.world_size // job.degrees.pp
    for net, further in _nets(job, stages):
        small = _Small(job, stages, tracer, net, further, asked[0] % of_stage, known)
        try:
            return small.reports(asked)
        except (NotLinear, MeshwrightError):
            # Small ones may be refused where large ones are not.
            continue
    return None


def _nets(job: Job, stages: InStages) -> Iterator[tuple[Net, Point | None]]:
    """Small pipelines to try, and one more to check."""
    ranks, rows, count = job.degrees.pp, job.rows, job.microbatches
    parts = _parts(stages.placement(ranks, count * rows), stages.blocks)
    if len({*map(len, parts)}) > 1:
        return
    directions = 1 if all(len({*part}) == 1 for part in parts) else len(parts[0])
    frames = [
        (_frame(least, more, directions), (last,) * directions)
        for least, more, last in DEPTHS
        if min(stages.blocks) >= least and sum(stages.blocks) > last * len(stages.blocks)
    ]
    steady = {each: stages.steady(each, rows) for each in (FEW, MORE, CHECK, ranks)}
    own = steady[ranks]
    is_steady = own is not None and count >= own[0] and (count - own[0]) % own[1] == 0
    if ranks > CHECK and is_steady and frames:
        (few, step), (more, _), (check, _) = (steady[each] or (0, 0) for each in (FEW, MORE, CHECK))
        blocks, last = frames[0]
        corners = (few, FEW), (few + step, FEW), (more, MORE)
        yield Net(blocks, corners, (last, (few + 2 * step, FEW))), (blocks[0], (check, CHECK))
    counts: tuple[Numbers, ...] = ((count,),)
    if own is not None and is_steady and count > own[0] + 2 * own[1]:
        counts = tuple((own[0] + place * own[1],) for place in range(3))
    for blocks, last in frames:
        yield Net(blocks, counts[:2], (last, counts[-1])), None
    if len(counts) > 1:
        yield Net(((),), counts[:2], ((), counts[-1])), None


def _frame(least: int, more: int, directions: int) -> tuple[Numbers, ...]:
    start = (least,) * directions
    return (start, *((*start[:each], more, *start[each + 1 :]) for each in range(directions)))


def _parts(placement: Sequence[int], blocks: Sequence[int]) -> list[list[int]]:
    """Of each rank, the blocks of its stages."""
    found: dict[int, list[int]] = defaultdict(list)
    for rank, count in zip(placement, blocks, strict=True):
        found[rank].append(count)
    return [found[rank] for rank in sorted(found)]


@dataclass(frozen=True, eq=False)
class _Small:
    """The small pipelines of a net."""

    job: Job
    stages: InStages
    tracer: Tracer
    net: Net
    further: Point | None
    first: int
    known: dict[tuple[Point, int], Trace]
    played: dict[tuple[Point, int | None], dict[int, Timeline]] = field(default_factory=dict)

    @property
    def of_stage(self) -> int:
        """Ranks of one."""
        return self.job.degrees.world_size // self.job.degrees.pp

    @functools.cached_property
    def is_short(self) -> bool:
        """Whether small pipelines have fewer ranks."""
        return len(self.net.microbatches[0]) > 1

    @functools.cached_property
    def chunks(self) -> int:
        """Stages of a rank."""
        return len(self.stages.blocks) // self.job.degrees.pp

    def reports(self, asked: Sequence[int]) -> list[Report]:
        """See `from_small`."""
        of_stage, first = self.of_stage, self.first
        wanted = {*asked}
        self._trace(
            self.net.corners,
            lambda ranks: {*self._small(wanted, ranks), *range(first, ranks * of_stage, of_stage)},
        )
        self._trace([self.net.check], lambda ranks: self._small(wanted, ranks))
        if self.further is not None:
            self._trace([self.further], lambda ranks: {first, of_stage + first})
            for rank in (first, of_stage + first):
                found = {point: self._told(point, rank) for point in (*self.net.corners, self.further)}
                if not are_alike(self.net.between(self.further, found), found[self.further]):
                    raise NotLinear
        return [self._report(rank) for rank in asked]

    # -- traces

    def _ranks(self, point: Point) -> int:
        return int(point[1][1]) if self.is_short else self.job.degrees.pp

    def _trace(self, points: Sequence[Point], wanted: Callable[[int], set[int]]) -> None:
        missing: dict[tuple[Numbers, int, int], list[Point]] = defaultdict(list)
        for point in points:
            ranks = self._ranks(point)
            for rank in sorted(wanted(ranks)):
                if (point, rank) not in self.known:
                    missing[point[0], ranks, rank].append(point)
        for (blocks, ranks, rank), steps in missing.items():
            steps = sorted(steps, key=lambda point: point[1][0])
            found = self.tracer.steps(self._job(blocks, ranks), rank, [int(point[1][0]) for point in steps])
            self.known.update({(point, rank): each for point, each in zip(steps, found, strict=True)})

    def _job(self, blocks: Numbers, ranks: int) -> Job:
        job, make = self.job, self.job.with_layers
        if not blocks or make is None:
            return job
        counts = self._counts(blocks, ranks)
        outer, *others = job.stack.wrappers
        stack = replace(job.stack, wrappers=(replace(outer, config=self.stages.with_blocks(counts)), *others))
        model = functools.partial(make, sum(counts))
        return replace(job, stack=stack, degrees=replace(job.degrees, pp=ranks), model=model)

    def _placement(self, ranks: int) -> tuple[int, ...]:
        steady = self.stages.steady(ranks, self.job.rows)
        return self.stages.placement(ranks, (self.job.microbatches if steady is None else steady[0]) * self.job.rows)

    def _counts(self, blocks: Numbers, ranks: int) -> list[int]:
        """Blocks of each stage of a small pipeline."""
        if not blocks:
            return list(self.stages.blocks)
        seen: dict[int, int] = defaultdict(int)
        counts = []
        for rank in self._placement(ranks):
            counts.append(int(blocks[seen[rank] % len(blocks)]))
            seen[rank] += 1
        return counts

    # -- places

    def _small(self, ranks: set[int], few: int) -> set[int]:
        """The ranks of a small pipeline that tell of these."""
        return {small for rank in ranks for small, _ in self._places(rank, few)}

    def _places(self, rank: int, few: int) -> list[tuple[int, Fraction]]:
        """Ranks of a small pipeline that tell of one, with their weights."""
        many, (stage, within) = self.job.degrees.pp, divmod(rank, self.of_stage)
        if not self.is_short or stage < 2:
            places = [(stage, Fraction(1))]
        elif stage >= many - 2:
            places = [(few - (many - stage), Fraction(1))]
        else:
            places = [(1, Fraction(many - 2 - stage, many - 3)), (few - 2, Fraction(stage - 1, many - 3))]
        return [(place * self.of_stage + within, weight) for place, weight in places]

    # -- reports

    def _report(self, rank: int) -> Report:
        stage, within = divmod(rank, self.of_stage)
        degrees = self.job.degrees
        part = _parts(self._placement(degrees.pp), self.stages.blocks)[stage]
        blocks: Numbers = () if not self.net.blocks[0] else tuple(part[: len(self.net.blocks[0])])
        target = blocks, self._target
        terms = []
        for place, (_, weight) in enumerate(self._places(rank, FEW)):
            found = {
                point: self._told(point, self._places(rank, self._ranks(point))[place][0], is_timed=True)
                for point in self.net.points
            }
            terms.append((weight, self.net.at(target, found)))
        made = mixed(terms)
        made["step_seconds"] += self._ordered(list(self.stages.blocks), degrees.pp, self.job.microbatches)
        busy = made["busy_seconds"]
        made["busy_seconds"] = {_named(name, stage, within, degrees.pp, self.of_stage): busy[name] for name in busy}
        return {**made, "rank": rank}

    @property
    def _target(self) -> Numbers:
        count, ranks = self.job.microbatches, self.job.degrees.pp
        return (count, ranks) if self.is_short else (count,)

    def _told(self, point: Point, rank: int, *, is_timed: bool = False) -> Report:
        """Of a rank of a small pipeline: its seconds are those beside what the schedule tells, where they are known."""
        trace, ranks = self.known[point, rank], self._ranks(point)
        report = self.tracer.told(trace, self._alone(point, rank))
        del report["rank"], report["step_seconds"]
        stage = rank // self.of_stage
        busy = report["busy_seconds"]
        report["busy_seconds"] = {_by_place(name, stage, ranks, self.of_stage): busy[name] for name in busy}
        if is_timed and point in self.net.corners:
            told = self._ordered(self._counts(point[0], ranks), ranks, int(point[1][0]))
            report["step_seconds"] = self._together(point)[rank // self.of_stage].seconds - told
        return report

    # -- seconds; see [Note: seconds]

    def _play(self, traces: Sequence[Trace], ranks: int, *, waits: bool) -> list[Timeline]:
        job, degrees = self.job, replace(self.job.degrees, pp=ranks)
        device = self.tracer.device
        return play(traces, degrees, device, is_compiled=job.is_compiled, chunked=job.chunked, waits=waits)

    def _alone(self, point: Point, rank: int) -> Timeline:
        if (point, rank) not in self.played:
            (line,) = self._play([self.known[point, rank]], self._ranks(point), waits=False)
            self.played[point, rank] = {rank: line}
        return self.played[point, rank][rank]

    def _together(self, point: Point) -> dict[int, Timeline]:
        """Of one rank of each stage, by stage."""
        if (point, None) not in self.played:
            ranks = self._ranks(point)
            traces = [self.known[point, self.first + stage * self.of_stage] for stage in range(ranks)]
            self.played[point, None] = dict(enumerate(self._play(traces, ranks, waits=True)))
        return self.played[point, None]

    def _ordered(self, counts: Sequence[int], ranks: int, microbatches: int) -> float:
        """What the schedule's order tells of a step on stages of so many blocks."""
        rows = microbatches * self.job.rows
        placement = self.stages.placement(ranks, rows)
        costs = [self._of_block * count for count in counts]
        for rank in range(ranks):
            own = [stage for stage, place in enumerate(placement) if place == rank]
            beside = self._beside[self._place(rank, ranks)]
            # The embedding and the head.
            ends = [stage for stage in own if stage in (0, len(counts) - 1)][-1:] or own
            for stage in ends:
                costs[stage] += beside / len(ends)
        return self.stages.seconds(costs, forward=self._forward, ranks=ranks, sequences=rows)

    def _place(self, rank: int, ranks: int) -> int:
        """The stage of the smallest pipelines that is as one of another."""
        few = self._ranks(self.net.corners[0])
        return rank if rank < min(2, few - 1) or few == ranks else few - 1 if rank == ranks - 1 else 1

    @property
    def _middle(self) -> int:
        """A stage without ends, if there is one."""
        return 1 if self._ranks(self.net.corners[0]) > 2 else 0

    def _sequence(self, blocks: Numbers, stage: int) -> float:
        """Seconds of a sequence on all stages of a rank."""
        counts = [point for point in self.net.corners if point[0] == blocks][:2]
        ends = [self._alone(point, self.first + stage * self.of_stage).seconds for point in counts]
        sizes = [int(point[1][0]) * self.job.rows for point in counts]
        return (ends[-1] - ends[0]) / (sizes[-1] - sizes[0]) if len(ends) > 1 else ends[0] / sizes[0]

    def _blocks_of(self, blocks: Numbers, stage: int) -> int:
        ranks = self._ranks(self.net.corners[0])
        return sum(_parts(self._placement(ranks), self._counts(blocks, ranks))[stage])

    @functools.cached_property
    def _of_block(self) -> float:
        """Seconds of a sequence on a block."""
        small, large = self.net.blocks[0], self.net.blocks[-1]
        more = self._blocks_of(large, self._middle) - self._blocks_of(small, self._middle)
        if not more:
            return self._sequence(small, self._middle) / self._blocks_of(small, self._middle)
        return (self._sequence(large, self._middle) - self._sequence(small, self._middle)) / more

    @functools.cached_property
    def _beside(self) -> list[float]:
        """Seconds of a sequence beside blocks, by stages of the smallest pipelines."""
        blocks = self.net.blocks[0]
        return [
            self._sequence(blocks, stage) - self._of_block * self._blocks_of(blocks, stage)
            for stage in range(self._ranks(self.net.corners[0]))
        ]

    @functools.cached_property
    def _forward(self) -> float:
        """The share of computing that does not come in a backward."""
        line = self._alone(self.net.corners[0], self.first + self._middle * self.of_stage)
        seconds = {"forward": 0.0, "backward": 0.0}
        for span in line.spans:
            if span.stream == COMPUTE and span.phase in seconds:
                seconds[span.phase] += span.end - span.start
        return seconds["forward"] / sum(seconds.values())


def _by_place(stream: str, stage: int, ranks: int, of_stage: int) -> str:
    """A stream to another stage's rank, by how far behind that is."""
    if not stream.startswith("to "):
        return stream
    away = (int(stream[3:]) // of_stage - stage) % ranks
    return f"to {away - ranks if away == ranks - 1 else away}"


def _named(stream: str, stage: int, within: int, ranks: int, of_stage: int) -> str:
    """The stream's own name."""
    if not stream.startswith("to "):
        return stream
    return f"to {(stage + int(stream[3:])) % ranks * of_stage + within}"
