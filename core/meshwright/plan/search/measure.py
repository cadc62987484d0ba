"""What is measured of one candidate: a part of its step on few blocks, or its whole plan. Runs in a process of its own.

[Note: a microbatch alone] Of a step with one or two microbatches two times are taken: that of the step, and that of the
computation of a microbatch alone. There what comes behind the last product (the optimizer) and what goes over
data-parallel ranks is left out. A step of more microbatches takes no less than the first once and the second for each
further one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...base.errors import BatchError, ConfigError, MeshwrightError
from ...base.validation import validated
from ...mesh.sizes import VIEWS
from ...train.run_file import RunConfig
from ..allocator import reserved
from ..device import Device
from ..job import job_of
from ..planned import fits, plan, trace_rank
from ..time import play
from ..trace import Job, Operation, Trace

DEPTHS = (2, 4)
"""Blocks of the models that are traced; even, since some models alternate."""
_NOTHING = 1e-12
_DATA_PARALLEL = {"dp_replicate", "dp_shard", "ep_shard", *VIEWS}


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
    """A step of one or two microbatches, by the blocks of the model.

    Attributes:
        step: seconds of it.
        compute: seconds of the computation of one; see [Note: a microbatch alone].
        ideal: the same on a device that loses nothing to latency, and has its best rate for all products: what larger
            microbatches come near to.
        peak: bytes at the peak.
        activations: those of them that activations are.
        reserved: bytes that torch's allocator has taken for them.
    """

    step: Line
    compute: Line
    ideal: Line
    peak: Line
    activations: Line
    reserved: Line


@dataclass(frozen=True)
class Request:
    """What a process is to do.

    Attributes:
        values: of a run file.
        kind: "glance", "near" or "plan".
        two: for "near", what the glance has told.
    """

    values: Mapping[str, Any]
    world: int
    device: Device
    expert_imbalance: float
    kind: str
    two: Glance | None = None


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
        if request.two is not None:
            return near(job, request.device, request.two)
        return glance(job, request.device) if request.kind == "glance" else plan(job, request.device)
    except MeshwrightError as error:
        return Refusal(str(error), isinstance(error, BatchError | ConfigError))


def near(job: Job, device: Device, two: Glance) -> dict[str, Any]:
    """Nearly the plan of a job without a pipeline: by few blocks and few microbatches.

    Args:
        two: of the job's step with two microbatches, or one if it has no more.

    Raises:
        MeshwrightError: as training does.
    """
    count, layers = job.microbatches, job.layers
    step, held = two.step.at(layers), two.reserved.at(layers)
    if count > 2:
        three = glance(replace(job, microbatches=3), device)
        step += (count - 2) * max(0.0, three.step.at(layers) - step)
        held += (count - 2) * max(0.0, three.reserved.at(layers) - held)
    return {
        "strategy": str(job.stack),
        "mesh": str(job.degrees),
        "step_seconds": step,
        "tokens_per_second_per_device": count * job.rows * job.length * job.degrees.dp / step / job.degrees.world_size,
        "peak_reserved_bytes": round(held),
        "fits": fits(round(held), device),
    }


def glance(job: Job, device: Device) -> Glance:
    """A job's step on its first rank; it has no pipeline.

    Raises:
        MeshwrightError: as training does.
    """
    make = job.with_layers
    shallow = make is not None and job.layers > DEPTHS[-1]
    depths = DEPTHS if shallow else (max(1, job.layers),)
    rows: list[tuple[float, ...]] = []
    for depth in depths:
        of_depth = replace(job, model=functools.partial(make, depth)) if make is not None and shallow else job
        found = trace_rank(of_depth, 0)
        rows.append(
            (
                _seconds(found, job, device),
                _seconds(_computation(found), job, device) / job.microbatches,
                _seconds(_computation(found), job, ideal(device)) / job.microbatches,
                found.peak.bytes,
                found.peak.owners.get("activations", 0),
                reserved(found, workspace=device.workspace_bytes),
            )
        )
    return Glance(*(Line.through(depths, [row[place] for row in rows]) for place in range(6)))


def ideal(device: Device) -> Device:
    """A device that loses nothing to latency, and has its best rate for all products."""
    none = {"ring_s": _NOTHING, "tree_s": _NOTHING}
    node = device.node
    links = {"inside": node.inside.model_copy(update=none), "between": node.between.model_copy(update=none)}
    begin = {"ring_begin_s": _NOTHING, "tree_begin_s": _NOTHING}
    best = {dtype: {1: max(parts.values())} for dtype, parts in device.matmul_efficiency.items()}
    changes = {"kernel_s": _NOTHING, "cpu_s": _NOTHING, "matmul_efficiency": best}
    return device.model_copy(update={**changes, "node": node.model_copy(update={**links, **begin})})


def _seconds(found: Trace, job: Job, device: Device) -> float:
    (line,) = play([found], job.degrees, device, is_compiled=job.is_compiled, chunked=job.chunked)
    return line.seconds


def _computation(found: Trace) -> Trace:
    """Without the optimizer and what goes over data-parallel ranks; see [Note: a microbatch alone]."""
    last = max((place for place, each in enumerate(found.operations) if each.flops), default=-1)
    return replace(
        found, operations=tuple(each for each in found.operations[: last + 1] if not _is_shared(each, found))
    )


def _is_shared(each: Operation, found: Trace) -> bool:
    return each.call is not None and found.collectives[each.call].group in _DATA_PARALLEL
