"""Pipelines of few stages, blocks and microbatches, traced once each; what follows from them is said in `stages`."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pydantic import BaseModel

from .depth import Net, Numbers, Point, Report
from .device import Device
from .time import Timeline, play
from .trace import Job, Trace


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


def parts(placement: Sequence[int], blocks: Sequence[int]) -> list[list[int]]:
    """Of each rank, the blocks of its stages."""
    found: dict[int, list[int]] = defaultdict(list)
    for rank, count in zip(placement, blocks, strict=True):
        found[rank].append(count)
    return [found[rank] for rank in sorted(found)]


@dataclass(frozen=True, eq=False)
class SmallPipelines:
    """Those of a net.

    Attributes:
        further: a point to check.
        first: the place within their stages of ranks that are played together.
        known: steps by how large the job is and the rank.
    """

    job: Job
    stages: InStages
    tracer: Tracer
    net: Net
    further: Point | None
    first: int
    known: dict[tuple[Point, int], Trace]
    played: dict[tuple[Point, int | None], dict[int, Timeline]] = field(default_factory=dict)
    told: dict[tuple[Point, int], Report] = field(default_factory=dict)

    @property
    def of_stage(self) -> int:
        """Ranks of one."""
        return self.job.degrees.world_size // self.job.degrees.pp

    @functools.cached_property
    def is_short(self) -> bool:
        """Whether small pipelines have fewer ranks."""
        return len(self.net.microbatches[0]) > 1

    def ranks(self, point: Point) -> int:
        return int(point[1][1]) if self.is_short else self.job.degrees.pp

    def trace(self, points: Sequence[Point], wanted: Callable[[int], set[int]]) -> None:
        missing: dict[tuple[Numbers, int, int], list[Point]] = defaultdict(list)
        for point in points:
            ranks = self.ranks(point)
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
        counts = self.counts(blocks, ranks)
        outer, *others = job.stack.wrappers
        stack = replace(job.stack, wrappers=(replace(outer, config=self.stages.with_blocks(counts)), *others))
        model = functools.partial(make, sum(counts))
        return replace(job, stack=stack, degrees=replace(job.degrees, pp=ranks), model=model)

    def placement(self, ranks: int) -> tuple[int, ...]:
        steady = self.stages.steady(ranks, self.job.rows)
        return self.stages.placement(ranks, (self.job.microbatches if steady is None else steady[0]) * self.job.rows)

    def counts(self, blocks: Numbers, ranks: int) -> list[int]:
        """Blocks of each stage of a small pipeline."""
        if not blocks:
            return list(self.stages.blocks)
        seen: dict[int, int] = defaultdict(int)
        counts = []
        for rank in self.placement(ranks):
            counts.append(int(blocks[seen[rank] % len(blocks)]))
            seen[rank] += 1
        return counts

    def _play(self, traces: Sequence[Trace], ranks: int, *, waits: bool) -> list[Timeline]:
        job, degrees = self.job, replace(self.job.degrees, pp=ranks)
        device = self.tracer.device
        return play(traces, degrees, device, is_compiled=job.is_compiled, chunked=job.chunked, waits=waits)

    def alone(self, point: Point, rank: int) -> Timeline:
        if (point, rank) not in self.played:
            (line,) = self._play([self.known[point, rank]], self.ranks(point), waits=False)
            self.played[point, rank] = {rank: line}
        return self.played[point, rank][rank]

    def report(self, point: Point, rank: int) -> Report:
        """What is told of a rank that is played alone."""
        if (point, rank) not in self.told:
            self.told[point, rank] = self.tracer.told(self.known[point, rank], self.alone(point, rank))
        return dict(self.told[point, rank])

    def together(self, point: Point) -> dict[int, Timeline]:
        """Of one rank of each stage, by stage."""
        if (point, None) not in self.played:
            ranks = self.ranks(point)
            traces = [self.known[point, self.first + stage * self.of_stage] for stage in range(ranks)]
            self.played[point, None] = dict(enumerate(self._play(traces, ranks, waits=True)))
        return self.played[point, None]
