"""Extrapolate ranks of a pipeline from pipelines with fewer stages, blocks and microbatches and the same schedule.

[Note: small pipelines] Memory and communication of a pipeline rank grow linearly with the blocks of each of its stages,
with the microbatches of a step and with the stages. The first two and the last two ranks correspond to those of a small
pipeline; the others are interpolated between the second and the second to last. The schedule determines in which steps
the number of microbatches may grow. So pipelines of three and four ranks are traced, or of all ranks with fewer blocks.

[Note: seconds] The slowest stage depends on the depths of the stages. So the time of a microbatch on each stage is
extrapolated, and the order of the schedule gives the time of a step. The remainder (messages, the optimizer, the first
gather and the last reduction) is the extra time of small pipelines whose stages are simulated together.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Protocol, TypeAlias

from pydantic import BaseModel

from meshwright.plugin import MeshwrightError

from .allocator import COMPUTE
from .config import DeviceSpec
from .extrapolation import Coordinates, Extrapolation, NotLinearError, Point, RankReport, combine_reports, reports_match
from .timeline import Timeline, simulate_timelines
from .trace import StepTrace, TrainingJob

TraceSteps: TypeAlias = Callable[
    [TrainingJob, int, Sequence[int]], list[StepTrace]
]  # traces of a rank, one for each number of microbatches
BuildReport: TypeAlias = Callable[[StepTrace, Timeline], RankReport]
SAMPLE_STAGE_DEPTHS = ((2, 3, 4), (4, 6, 8))  # Blocks per stage; the last of each tuple is the check
FEW_RANKS, MORE_RANKS, CHECK_RANKS = 3, 4, 5  # Ranks of small pipelines; the last is the check
RANK_LIST_TOLERANCE = 4096  # Tolerance for lists of ranks, whose memory grows in steps with the pipeline [bytes]


class StageCostModel(Protocol):
    """Cost model of pipeline stages, as `build_cost_model(model)` of a pipeline strategy returns it."""

    blocks_per_stage: tuple[int, ...]  # number of blocks of each stage

    def config_with_blocks(self, blocks: Sequence[int]) -> BaseModel:
        """Return a config whose stages have these numbers of blocks."""

    def find_steady_state(self, ranks: int, rows: int) -> tuple[int, int] | None:
        """Return (start, period): from `start` microbatches of `rows` rows on, each `period` adds the same; or None."""

    def placement(self, ranks: int, sequences: int) -> tuple[int, ...]:
        """Return the rank of each stage."""

    def estimate_step_seconds(self, costs: Sequence[float], *, forward: float, ranks: int, sequences: int) -> float:
        """Return the seconds of a step without messages, from the seconds of a sequence on each stage (`costs`)."""


def extrapolate_ranks(
    job: TrainingJob,
    stages: StageCostModel,
    requested_ranks: Sequence[int],
    device: DeviceSpec,
    trace_steps: TraceSteps,
    build_report: BuildReport,
) -> list[RankReport] | None:
    """Return the reports of pipeline ranks; None if small pipelines do not determine them, or are not smaller."""
    known: dict[tuple[Point, int], StepTrace] = {}
    of_stage = job.degrees.world_size // job.degrees.pp
    for net, further in _list_extrapolations(job, stages):
        small = _SmallPipelines(
            job, stages, device, trace_steps, build_report, net, further, requested_ranks[0] % of_stage, known
        )
        try:
            return small.report_ranks(requested_ranks)
        except (NotLinearError, MeshwrightError):
            continue  # the strategy may refuse a small pipeline, but not the large one
    return None


def _list_extrapolations(job: TrainingJob, stages: StageCostModel) -> Iterator[tuple[Extrapolation, Point | None]]:
    ranks, rows, count = job.degrees.pp, job.micro_batch_size, job.num_microbatches
    held = _group_by_rank(stages.placement(ranks, count * rows), stages.blocks_per_stage)
    if len({*map(len, held)}) > 1:
        return
    directions = 1 if all(len({*part}) == 1 for part in held) else len(held[0])
    frames = []
    for least, more, check in SAMPLE_STAGE_DEPTHS:
        if min(stages.blocks_per_stage) >= least and sum(stages.blocks_per_stage) > check * len(
            stages.blocks_per_stage
        ):
            start = (least,) * directions
            others = ((*start[:each], more, *start[each + 1 :]) for each in range(directions))
            frames.append(((start, *others), (check,) * directions))
    steady = {each: stages.find_steady_state(each, rows) for each in (FEW_RANKS, MORE_RANKS, CHECK_RANKS, ranks)}
    own = steady[ranks]
    is_steady = own is not None and count >= own[0] and (count - own[0]) % own[1] == 0
    if ranks > CHECK_RANKS and is_steady and frames:
        (few, step), (more, _), (check, _) = (steady[each] or (0, 0) for each in (FEW_RANKS, MORE_RANKS, CHECK_RANKS))
        blocks, last = frames[0]
        corners = (few, FEW_RANKS), (few + step, FEW_RANKS), (more, MORE_RANKS)
        yield Extrapolation(blocks, corners, (last, (few + 2 * step, FEW_RANKS))), (blocks[0], (check, CHECK_RANKS))
    counts: tuple[Coordinates, ...] = ((count,),)
    if own is not None and is_steady and count > own[0] + 2 * own[1]:
        counts = tuple((own[0] + index * own[1],) for index in range(3))
    for blocks, last in frames:
        yield Extrapolation(blocks, counts[:2], (last, counts[-1])), None
    if len(counts) > 1:
        yield Extrapolation(((),), counts[:2], ((), counts[-1])), None


def _group_by_rank(placement: Sequence[int], blocks: Sequence[int]) -> list[list[int]]:
    by_rank: dict[int, list[int]] = defaultdict(list)
    for rank, count in zip(placement, blocks, strict=True):
        by_rank[rank].append(count)
    return [by_rank[rank] for rank in sorted(by_rank)]


@dataclass(frozen=True, eq=False)
class _SmallPipelines:
    """Small pipelines of an extrapolation. `extra_check`: one more point to check; `first_rank`: offset in a stage."""

    job: TrainingJob
    stages: StageCostModel
    device: DeviceSpec
    trace_steps: TraceSteps
    build_report: BuildReport
    extrapolation: Extrapolation
    extra_check: Point | None
    first_rank: int
    traces: dict[tuple[Point, int], StepTrace]
    timelines: dict[tuple[Point, int | None], dict[int, Timeline]] = field(default_factory=dict)
    reports: dict[tuple[Point, int], RankReport] = field(default_factory=dict)

    def report_ranks(self, requested_ranks: Sequence[int]) -> list[RankReport]:
        of_stage, first, wanted = self.ranks_per_stage, self.first_rank, {*requested_ranks}
        # One rank usually shows whether growth is linear.
        self._trace(self.extrapolation.points, lambda ranks: {first})
        self._check(self.extrapolation.check_point, {first})
        stages = range(first, of_stage * self.job.degrees.pp, of_stage)
        self._trace(self.extrapolation.corners, lambda ranks: {*self._small_ranks(wanted, ranks), *stages[:ranks]})
        self._trace([self.extrapolation.check_point], lambda ranks: self._small_ranks(wanted, ranks))
        if self.extra_check is not None:
            self._trace([self.extra_check], lambda ranks: {first, of_stage + first})
            self._check(self.extra_check, {first, of_stage + first}, tolerance=RANK_LIST_TOLERANCE)
        return [self._report_rank(rank) for rank in requested_ranks]

    def _check(self, point: Point, ranks: set[int], *, tolerance: int = 0) -> None:
        """Check ranks of the first two stages, which correspond in all small pipelines. Raise NotLinearError."""
        for rank in ranks:
            reports = {each: self._get_report(each, rank) for each in (*self.extrapolation.corners, point)}
            if not reports_match(self.extrapolation.interpolate(point, reports), reports[point], tolerance=tolerance):
                raise NotLinearError

    # -- sizes and ranks

    @property
    def ranks_per_stage(self) -> int:
        return self.job.degrees.world_size // self.job.degrees.pp

    @functools.cached_property
    def has_fewer_ranks(self) -> bool:
        return len(self.extrapolation.microbatches[0]) > 1

    @property
    def min_ranks(self) -> int:
        return self.num_ranks(self.extrapolation.corners[0])

    def num_ranks(self, point: Point) -> int:
        return int(point[1][1]) if self.has_fewer_ranks else self.job.degrees.pp

    def _placement(self, ranks: int) -> tuple[int, ...]:
        steady = self.stages.find_steady_state(ranks, self.job.micro_batch_size)
        return self.stages.placement(
            ranks, (self.job.num_microbatches if steady is None else steady[0]) * self.job.micro_batch_size
        )

    def _blocks_per_stage(self, blocks: Coordinates, ranks: int) -> list[int]:
        if not blocks:
            return list(self.stages.blocks_per_stage)
        seen: dict[int, int] = defaultdict(int)
        counts = []
        for rank in self._placement(ranks):
            counts.append(int(blocks[seen[rank] % len(blocks)]))
            seen[rank] += 1
        return counts

    def _small_ranks(self, ranks: set[int], few: int) -> set[int]:
        return {small for rank in ranks for small, _ in self._weighted_ranks(rank, few)}

    def _weighted_ranks(self, rank: int, few: int) -> list[tuple[int, Fraction]]:
        """Return the ranks of a small pipeline that determine `rank`, with their weights."""
        many, (stage, within) = self.job.degrees.pp, divmod(rank, self.ranks_per_stage)
        if not self.has_fewer_ranks or stage < 2:
            stages = [(stage, Fraction(1))]
        elif stage >= many - 2:
            stages = [(few - (many - stage), Fraction(1))]
        else:
            stages = [(1, Fraction(many - 2 - stage, many - 3)), (few - 2, Fraction(stage - 1, many - 3))]
        return [(small * self.ranks_per_stage + within, weight) for small, weight in stages]

    # -- traces and timelines

    def _trace(self, points: Sequence[Point], select_ranks: Callable[[int], set[int]]) -> None:
        missing: dict[tuple[Coordinates, int, int], list[Point]] = defaultdict(list)
        for point in points:
            ranks = self.num_ranks(point)
            for rank in sorted(select_ranks(ranks)):
                if (point, rank) not in self.traces:
                    missing[point[0], ranks, rank].append(point)
        for (blocks, ranks, rank), steps in missing.items():
            steps = sorted(steps, key=lambda point: point[1][0])
            found = self.trace_steps(self._build_job(blocks, ranks), rank, [int(point[1][0]) for point in steps])
            self.traces.update({(point, rank): each for point, each in zip(steps, found, strict=True)})

    def _build_job(self, blocks: Coordinates, ranks: int) -> TrainingJob:
        if not blocks:
            return self.job
        counts = self._blocks_per_stage(blocks, ranks)
        outer, *others = self.job.stack.wrappers
        stack = replace(
            self.job.stack, wrappers=(replace(outer, config=self.stages.config_with_blocks(counts)), *others)
        )
        return replace(self.job.with_num_layers(sum(counts)), stack=stack, degrees=replace(self.job.degrees, pp=ranks))

    def _simulate(self, traces: Sequence[StepTrace], ranks: int, *, waits_for_messages: bool) -> list[Timeline]:
        job, degrees = self.job, replace(self.job.degrees, pp=ranks)
        return simulate_timelines(
            traces,
            degrees,
            self.device,
            is_compiled=job.is_compiled,
            chunked_groups=job.chunked_groups,
            waits_for_messages=waits_for_messages,
        )

    def _simulate_alone(self, point: Point, rank: int) -> Timeline:
        if (point, rank) not in self.timelines:
            (line,) = self._simulate([self.traces[point, rank]], self.num_ranks(point), waits_for_messages=False)
            self.timelines[point, rank] = {rank: line}
        return self.timelines[point, rank][rank]

    def _simulate_together(self, point: Point) -> dict[int, Timeline]:
        if (point, None) not in self.timelines:
            ranks = self.num_ranks(point)
            traces = [self.traces[point, self.first_rank + stage * self.ranks_per_stage] for stage in range(ranks)]
            self.timelines[point, None] = dict(enumerate(self._simulate(traces, ranks, waits_for_messages=True)))
        return self.timelines[point, None]

    # -- reports

    def _report_rank(self, rank: int) -> RankReport:
        stage, within = divmod(rank, self.ranks_per_stage)
        ranks, count = self.job.degrees.pp, self.job.num_microbatches
        part = _group_by_rank(self._placement(ranks), self.stages.blocks_per_stage)[stage]
        blocks: Coordinates = (
            () if not self.extrapolation.blocks[0] else tuple(part[: len(self.extrapolation.blocks[0])])
        )
        target = blocks, (count, ranks) if self.has_fewer_ranks else (count,)
        terms = []
        for index, (_, weight) in enumerate(self._weighted_ranks(rank, FEW_RANKS)):
            reports = {
                point: self._get_report(
                    point, self._weighted_ranks(rank, self.num_ranks(point))[index][0], is_timed=True
                )
                for point in self.extrapolation.points
            }
            terms.append((weight, self.extrapolation.extrapolate(target, reports)))
        report = combine_reports(terms)
        report["step_seconds"] += self._schedule_seconds(list(self.stages.blocks_per_stage), ranks, count)
        busy = report["busy_seconds"]
        report["busy_seconds"] = _rename_message_streams(
            busy, lambda away: (stage + away) % ranks * self.ranks_per_stage + within
        )
        return {**report, "rank": rank}

    def _get_report(self, point: Point, rank: int, *, is_timed: bool = False) -> RankReport:
        """Return the report of a rank of a small pipeline. Its seconds are those that the schedule does not explain."""
        ranks, stage = self.num_ranks(point), rank // self.ranks_per_stage
        if (point, rank) not in self.reports:
            self.reports[point, rank] = self.build_report(self.traces[point, rank], self._simulate_alone(point, rank))
        report = dict(self.reports[point, rank])
        del report["rank"], report["step_seconds"]

        def distance(to: int) -> int:
            away = (to // self.ranks_per_stage - stage) % ranks
            return -1 if away == ranks - 1 else away

        report["busy_seconds"] = _rename_message_streams(report["busy_seconds"], distance)
        if is_timed and point in self.extrapolation.corners:
            ordered = self._schedule_seconds(self._blocks_per_stage(point[0], ranks), ranks, int(point[1][0]))
            report["step_seconds"] = self._simulate_together(point)[stage].seconds - ordered
        return report

    # -- seconds; see [Note: seconds]

    def _schedule_seconds(self, counts: Sequence[int], ranks: int, microbatches: int) -> float:
        """Return the seconds of a step in the schedule's order, for stages with `counts` blocks."""
        rows = microbatches * self.job.micro_batch_size
        placement = self.stages.placement(ranks, rows)
        costs = [self._block_seconds * count for count in counts]
        for rank in range(ranks):
            own = [stage for stage, place in enumerate(placement) if place == rank]
            last = self.min_ranks - 1  # last stage of the smallest pipelines
            similar = rank if rank < min(2, last) or self.min_ranks == ranks else last if rank == ranks - 1 else 1
            # The first and last stage also have the embedding and the LM head.
            ends = [stage for stage in own if stage in (0, len(counts) - 1)][-1:] or own
            for stage in ends:
                costs[stage] += self._non_block_seconds[similar] / len(ends)
        return self.stages.estimate_step_seconds(costs, forward=self._forward_fraction, ranks=ranks, sequences=rows)

    @property
    def _middle_stage(self) -> int:
        """Return a stage without embedding and LM head, if there is one."""
        return 1 if self.min_ranks > 2 else 0

    def _sequence_seconds(self, blocks: Coordinates, stage: int) -> float:
        counts = [point for point in self.extrapolation.corners if point[0] == blocks][:2]
        ends = [self._simulate_alone(point, self.first_rank + stage * self.ranks_per_stage).seconds for point in counts]
        sizes = [int(point[1][0]) * self.job.micro_batch_size for point in counts]
        return (ends[-1] - ends[0]) / (sizes[-1] - sizes[0]) if len(ends) > 1 else ends[0] / sizes[0]

    def _count_blocks(self, blocks: Coordinates, stage: int) -> int:
        return sum(
            _group_by_rank(self._placement(self.min_ranks), self._blocks_per_stage(blocks, self.min_ranks))[stage]
        )

    @functools.cached_property
    def _block_seconds(self) -> float:
        small, large = self.extrapolation.blocks[0], self.extrapolation.blocks[-1]
        more = self._count_blocks(large, self._middle_stage) - self._count_blocks(small, self._middle_stage)
        if not more:
            return self._sequence_seconds(small, self._middle_stage) / self._count_blocks(small, self._middle_stage)
        return (
            self._sequence_seconds(large, self._middle_stage) - self._sequence_seconds(small, self._middle_stage)
        ) / more

    @functools.cached_property
    def _non_block_seconds(self) -> list[float]:
        """Seconds of a sequence outside the blocks, for each stage of the smallest pipelines."""
        blocks = self.extrapolation.blocks[0]
        stages, of_block = range(self.min_ranks), self._block_seconds
        return [self._sequence_seconds(blocks, each) - of_block * self._count_blocks(blocks, each) for each in stages]

    @functools.cached_property
    def _forward_fraction(self) -> float:
        """Fraction of the compute time that is in forward."""
        line = self._simulate_alone(
            self.extrapolation.corners[0], self.first_rank + self._middle_stage * self.ranks_per_stage
        )
        seconds = {"forward": 0.0, "backward": 0.0}
        for span in line.spans:
            if span.stream == COMPUTE and span.phase in seconds:
                seconds[span.phase] += span.end - span.start
        return seconds["forward"] / sum(seconds.values())


def _rename_message_streams(busy: dict[str, float], rename: Callable[[int], int]) -> dict[str, float]:
    """Rename the streams of messages, which are named by a rank or a distance."""
    return {f"to {rename(int(name[3:]))}" if name.startswith("to ") else name: busy[name] for name in busy}
