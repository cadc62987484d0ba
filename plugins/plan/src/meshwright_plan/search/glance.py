"""What is traced of a candidate, in a process of its own: one or two microbatches on few blocks, or its whole plan.

[Note: from few to all] Blocks are alike, and so are microbatches: seconds and bytes grow by the same for each. Two
depths tell by how much for a block, and the first of two microbatches for one more. Stages of a pipeline compute what
the same model computes on one stage; the schedule's own timeline tells how long ranks wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.plugin import BatchError, ConfigError, MeshwrightError, validated
from meshwright_run.run_file import RunConfig

from ..allocator import COMPUTE
from ..device import Device
from ..job import job_of
from ..planned import most_of, plan, reserved_of, trace_rank
from ..time import Timeline, play
from ..trace import Job

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
    """A step of one or two microbatches on one stage, by the blocks of the model; see [Note: from few to all].

    Attributes:
        step, first: seconds of the step, and of its first microbatch forward and backward.
        peaks: bytes at the peak of each phase.
        spare: the most bytes that torch's allocator took beyond the peak; two depths do not tell how it grows.
        held, activations: bytes between steps, and the most of activations.
    """

    microbatches: int
    step: Line
    first: Line
    peaks: Mapping[str, Line]
    spare: float
    held: Line
    activations: Line

    def seconds(self, layers: int, microbatches: int) -> float:
        """Return the seconds of a step."""
        return self.step.at(layers) + (microbatches - self.microbatches) * self.first.at(layers)

    def reserved(self, layers: float) -> float:
        """Return the bytes that torch's allocator takes."""
        return max(line.at(layers) for line in self.peaks.values()) + self.spare

    def piped_seconds(self, layers: int, microbatches: int, ranks: int, waiting: float) -> float:
        """Return the seconds of a step on so many stages, which wait for this share of the time."""
        working = microbatches * self.first.at(layers) / ranks / (1 - waiting)
        rest = self.step.at(layers / ranks) - self.microbatches * self.first.at(layers / ranks)
        return working + max(0.0, rest)

    def piped_reserved(self, layers: int, ranks: int, live: float) -> float:
        """Return the bytes of a rank of a pipeline that holds the activations of `live` microbatches of its blocks."""
        here = layers / ranks
        return self.reserved(here) + max(0.0, live - 1) * self.activations.slope * here

    @property
    def head(self) -> float:
        """The time of what is not in blocks, as a number of blocks."""
        return self.first.start / self.first.slope if self.first.slope > 0 else 0.0


@dataclass(frozen=True)
class Request:
    """What a process is to do: a plan of a run file's values if `is_whole`, else a glance."""

    values: Mapping[str, Any]
    world: int
    device: Device
    expert_imbalance: float
    is_whole: bool


@dataclass(frozen=True)
class Refusal:
    """Why there is neither glance nor plan; `of_batch`: whether another batch may be accepted."""

    reason: str
    of_batch: bool


def answer(request: Request) -> Glance | dict[str, Any] | Refusal:
    """Return a glance, a plan, or why there is none."""
    try:
        config = validated(RunConfig, request.values, where="a candidate")
        job = replace(job_of(config, request.world), expert_imbalance=request.expert_imbalance)
        return plan(job, request.device) if request.is_whole else glance(job, request.device)
    except MeshwrightError as error:
        return Refusal(str(error), isinstance(error, BatchError | ConfigError))


def glance(job: Job, device: Device) -> Glance:
    """Trace a job without a pipeline on its first rank.

    Raises:
        MeshwrightError: as training does.
    """
    shallow = job.with_layers is not None and job.layers > DEPTHS[-1]
    depths = DEPTHS if shallow else (max(1, job.layers),)
    library, spare = device.library_bytes, 0.0
    rows: list[tuple[float, ...]] = []
    peaks: list[Mapping[str, int]] = []
    for depth in depths:
        found = trace_rank(job.at_depth(depth) if shallow else job, 0)
        (line,) = play([found], job.degrees, device, is_compiled=job.is_compiled, chunked=job.chunked)
        beyond = reserved_of(found, device) - found.peak.bytes - library
        spare = max(spare, beyond) if rows else beyond
        rows.append((line.seconds, _first(line), found.after.bytes + library, most_of(found, "activations")))
        peaks.append({phase: most + library for phase, most in found.peak.phases.items()})
    step, first, held, activations = (Line.through(depths, values) for values in zip(*rows, strict=True))
    phases = {phase: Line.through(depths, [each.get(phase, 0) for each in peaks]) for phase in peaks[-1]}
    return Glance(job.microbatches, step, first, phases, spare, held, activations)


def _first(line: Timeline) -> float:
    """Return when the first microbatch has been computed: the next forward or the optimizer begins."""
    has_turned = False
    for span in line.spans:
        if span.stream == COMPUTE:
            if has_turned and span.phase != "backward":
                return span.start
            has_turned = has_turned or span.phase == "backward"
    return line.seconds
