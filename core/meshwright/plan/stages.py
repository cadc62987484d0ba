"""Ranks of a pipeline, from pipelines of few stages, blocks and microbatches under the same schedule.

[Note: small pipelines] What a rank of a pipeline holds and sends grows evenly with the blocks of each of its stages,
with the microbatches of a step and, since it waits for longer, with the stages; the first two ranks and the last two
keep their places, and those between lie between the second and the last but one. Which numbers of microbatches are
alike in this is said by the schedule. So small pipelines are traced, of three ranks and four, or of as many as there
are.

[Note: seconds] Which stage holds up others changes with their depth. So what a microbatch takes on each stage is what
grows evenly, and the schedule's own order tells what a step takes. What that leaves out (messages, the optimizer, what
is gathered first and reduced last) is what the small pipelines take more when their stages are played together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..base.errors import MeshwrightError
from .depth import Net, NotLinear, Numbers, Point, Report, are_alike, mixed
from .small_pipelines import InStages, SmallPipelines, Tracer, parts
from .time import COMPUTE
from .trace import Job, Trace

DEPTHS = ((2, 3, 4), (4, 6, 8))
"""Blocks of a stage, the last to check."""
FEW, MORE, CHECK = 3, 4, 5
"""Ranks of small pipelines, the last to check."""
MESHES = 4096
"""Bytes that lists of ranks may be off, which grow with the pipeline by steps."""


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
            return small.of_ranks(asked)
        except (NotLinear, MeshwrightError):
            # Small ones may be refused where large ones are not.
            continue
    return None


def _nets(job: Job, stages: InStages) -> Iterator[tuple[Net, Point | None]]:
    """Small pipelines to try, and one more to check."""
    ranks, rows, count = job.degrees.pp, job.rows, job.microbatches
    held = parts(stages.placement(ranks, count * rows), stages.blocks)
    if len({*map(len, held)}) > 1:
        return
    directions = 1 if all(len({*part}) == 1 for part in held) else len(held[0])
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


@dataclass(frozen=True, eq=False)
class _Small(SmallPipelines):
    """The small pipelines of a net."""

    def of_ranks(self, asked: Sequence[int]) -> list[Report]:
        """See `from_small`."""
        of_stage, first = self.of_stage, self.first
        wanted = {*asked}
        # Most that does not grow evenly is seen on one rank.
        self.trace(self.net.points, lambda ranks: {first})
        self._check(self.net.check, {first})
        self.trace(
            self.net.corners,
            lambda ranks: {*self._small(wanted, ranks), *range(first, ranks * of_stage, of_stage)},
        )
        self.trace([self.net.check], lambda ranks: self._small(wanted, ranks))
        if self.further is not None:
            self.trace([self.further], lambda ranks: {first, of_stage + first})
            self._check(self.further, {first, of_stage + first}, within=MESHES)
        return [self._report(rank) for rank in asked]

    def _check(self, point: Point, ranks: set[int], *, within: int = 0) -> None:
        """Of ranks of the first two stages, which are the same in all small pipelines."""
        for rank in ranks:
            found = {each: self._told(each, rank) for each in (*self.net.corners, point)}
            if not are_alike(self.net.between(point, found), found[point], within=within):
                raise NotLinear

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
        part = parts(self.placement(degrees.pp), self.stages.blocks)[stage]
        blocks: Numbers = () if not self.net.blocks[0] else tuple(part[: len(self.net.blocks[0])])
        target = blocks, self._target
        terms = []
        for place, (_, weight) in enumerate(self._places(rank, FEW)):
            found = {
                point: self._told(point, self._places(rank, self.ranks(point))[place][0], is_timed=True)
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
        ranks = self.ranks(point)
        report = self.report(point, rank)
        del report["rank"], report["step_seconds"]
        stage = rank // self.of_stage
        busy = report["busy_seconds"]
        report["busy_seconds"] = {_by_place(name, stage, ranks, self.of_stage): busy[name] for name in busy}
        if is_timed and point in self.net.corners:
            told = self._ordered(self.counts(point[0], ranks), ranks, int(point[1][0]))
            report["step_seconds"] = self.together(point)[rank // self.of_stage].seconds - told
        return report

    # -- seconds; see [Note: seconds]

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
        few = self.ranks(self.net.corners[0])
        return rank if rank < min(2, few - 1) or few == ranks else few - 1 if rank == ranks - 1 else 1

    @property
    def _middle(self) -> int:
        """A stage without ends, if there is one."""
        return 1 if self.ranks(self.net.corners[0]) > 2 else 0

    def _sequence(self, blocks: Numbers, stage: int) -> float:
        """Seconds of a sequence on all stages of a rank."""
        counts = [point for point in self.net.corners if point[0] == blocks][:2]
        ends = [self.alone(point, self.first + stage * self.of_stage).seconds for point in counts]
        sizes = [int(point[1][0]) * self.job.rows for point in counts]
        return (ends[-1] - ends[0]) / (sizes[-1] - sizes[0]) if len(ends) > 1 else ends[0] / sizes[0]

    def _blocks_of(self, blocks: Numbers, stage: int) -> int:
        ranks = self.ranks(self.net.corners[0])
        return sum(parts(self.placement(ranks), self.counts(blocks, ranks))[stage])

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
            for stage in range(self.ranks(self.net.corners[0]))
        ]

    @functools.cached_property
    def _forward(self) -> float:
        """The share of computing that does not come in a backward."""
        line = self.alone(self.net.corners[0], self.first + self._middle * self.of_stage)
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
