"""What is traced of one candidate: a step of one or two microbatches on few blocks, or its whole plan. Runs in a
process of its own.

[Note: from few to all] Blocks are alike, and so are microbatches: seconds and bytes grow by the same for each. Two
depths tell by how much for a block, and the first of two microbatches for one more. Stages of a pipeline compute what
the same model computes on one stage, blocks and microbatches alike; the schedule's own timeline tells how long ranks
wait.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...base.errors import BatchError, ConfigError, MeshwrightError
from ...base.validation import validated
from ...train.run_file import RunConfig
from ..allocator import reserved
from ..device import Device
from ..job import job_of
from ..planned import plan, trace_rank
from ..time import COMPUTE, Timeline, play
from ..trace import Job, Trace

DEPTHS = (3, 5)
"""Blocks of the models that are traced: enough for all that is gathered ahead, and two apart, since some models
alternate."""


@dataclass(frozen=True)
class Line:
    """What grows with the blocks of a model, from two depths."""

    start: float
    slope: float

    def at(self, layers: float) -> float:
        return self.start + self.slope * layers

    @staticmethod
    def through(depths: Sequence[int], values: Sequence[float]) -> Line:
        if len(depths) == 1:
            return Line(values[0], 0.0)
        slope = max(0.0, (values[-1] - values[0]) / (depths[-1] - depths[0]))
        return Line(values[0] - slope * depths[0], slope)


@dataclass(frozen=True)
class Glance:
    """A step on one stage, by the blocks of the model; see [Note: from few to all].

    Attributes:
        microbatches: of the step, one or two.
        step: seconds of it.
        first: seconds of its first microbatch, forward and backward.
        peaks: bytes at the peak of each phase.
        spare: what torch's allocator has taken beyond the peak, at most [bytes]; two depths do not tell how it grows.
        held: bytes between steps.
        activations: bytes of those when they are most.
    """

    microbatches: int
    step: Line
    first: Line
    peaks: Mapping[str, Line]
    spare: float
    held: Line
    activations: Line

    def seconds(self, layers: int, microbatches: int) -> float:
        """Of a step."""
        return self.step.at(layers) + (microbatches - self.microbatches) * self.first.at(layers)

    def reserved(self, layers: int) -> float:
        """Bytes that torch's allocator takes."""
        return max(line.at(layers) for line in self.peaks.values()) + self.spare

    def piped_seconds(self, layers: int, microbatches: int, ranks: int, waiting: float) -> float:
        """Of a step on so many stages, which wait for this share of the time."""
        working = microbatches * self.first.at(layers) / ranks / (1 - waiting)
        rest = self.step.at(layers / ranks) - self.microbatches * self.first.at(layers / ranks)
        return working + max(0.0, rest)

    def piped_reserved(self, layers: int, ranks: int, live: float) -> float:
        """Bytes of a rank of a pipeline that holds the activations of so many microbatches on all of its blocks."""
        here = layers / ranks
        beside = max(0.0, live - 1) * self.activations.slope * here
        return max(line.at(here) for line in self.peaks.values()) + self.spare + beside

    @property
    def head(self) -> float:
        """The time of what is not in blocks, as a number of blocks."""
        return self.first.start / self.first.slope if self.first.slope > 0 else 0.0


@dataclass(frozen=True)
class Request:
    """What a process is to do.

    Attributes:
        values: of a run file.
        is_whole: a plan is asked for, not a glance.
    """

    values: Mapping[str, Any]
    world: int
    device: Device
    expert_imbalance: float
    is_whole: bool


@dataclass(frozen=True)
class Refusal:
    """Why there is neither glance nor plan.

    Attributes:
        of_batch: whether another batch may be taken.
    """

    reason: str
    of_batch: bool


def answer(request: Request) -> Glance | dict[str, Any] | Refusal:
    """A glance, a plan, or why there is none.

    Raises:
        Exception: what no check foresees.
    """
    try:
        config = validated(RunConfig, request.values, where="a candidate")
        job = replace(job_of(config, request.world), expert_imbalance=request.expert_imbalance)
        return plan(job, request.device) if request.is_whole else glance(job, request.device)
    except MeshwrightError as error:
        return Refusal(str(error), isinstance(error, BatchError | ConfigError))


def glance(job: Job, device: Device) -> Glance:
    """A job's step on its first rank; it has no pipeline.

    Raises:
        MeshwrightError: as training does.
    """
    make = job.with_layers
    shallow = make is not None and job.layers > DEPTHS[-1]
    depths = DEPTHS if shallow else (max(1, job.layers),)
    rows: list[tuple[float, ...]] = []
    peaks: list[Mapping[str, int]] = []
    for depth in depths:
        of_depth = replace(job, model=functools.partial(make, depth)) if make is not None and shallow else job
        found = trace_rank(of_depth, 0)
        (line,) = play([found], job.degrees, device, is_compiled=job.is_compiled, chunked=job.chunked)
        library = device.library_bytes
        taken = found.peak.bytes if device.is_host else reserved(found, workspace=library)
        beyond, kept = taken - found.peak.bytes - library, found.after.bytes + library
        rows.append((line.seconds, _first(line), beyond, kept, _activations(found)))
        peaks.append({phase: most + library for phase, most in found.peak.phases.items()})
    step, first, held, activations = (Line.through(depths, [row[at] for row in rows]) for at in (0, 1, 3, 4))
    spare = max(row[2] for row in rows)
    phases = {phase: Line.through(depths, [each.get(phase, 0) for each in peaks]) for phase in peaks[-1]}
    return Glance(job.microbatches, step, first, phases, spare, held, activations)


def _activations(found: Trace) -> int:
    """The most that a step has held of them."""
    changes = (change for block, change in found.log if found.owners.get(block) == "activations")
    return max(itertools.accumulate(changes, initial=0))


def _first(line: Timeline) -> float:
    """When the first microbatch has been computed: the next one's forward begins, or the optimizer's work."""
    has_turned = False
    for span in line.spans:
        if span.stream == COMPUTE:
            if has_turned and span.phase != "backward":
                return span.start
            has_turned = has_turned or span.phase == "backward"
    return line.seconds
