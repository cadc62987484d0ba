"""A plan: what some ranks of a job hold, send and take on a device, as values of JSON; and the job of a run file.

[Note: model FLOPs] The products of forward and backward of a row of the run's length, on one rank, counted on a trace:
without recomputation, gradients of frozen weights, and experts that are not chosen. Of attention only pairs that act on
each other count: about half of all where it is causal, which formulas such as 6 N + 12 L H S count whole. Its backward
has four products of each pair; fused kernels compute the scores again, a fifth.
Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B; Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from meshwright.plugin import (
    EMA,
    BatchError,
    Collective,
    Degrees,
    Given,
    Mesh,
    MeshSizes,
    MeshwrightError,
    Objective,
    Observer,
    StrategyError,
    StrategyManager,
    adapted_on_meta,
    arithmetic,
    check_names,
    is_attention,
    is_meta,
    model_config,
    name_of,
    new_model,
    optimizer_factory,
    resolve,
    try_optimization,
    with_values,
)
from meshwright_run.preflight import RunModel, data_and_model_config, find_model
from meshwright_run.run_file import RunConfig, layout_of

from .allocator import reserved
from .config import Device
from .depth import DEPTHS, Numbers, Point, at_full_size
from .meter import LIBRARIES
from .stages import InStages, from_small
from .time import Timeline, play, stage_ranks
from .trace import Job, NoValues, Trace, traces
from .world import planned_world

LARGEST = ("peak_allocated_bytes", "peak_reserved_bytes", "held_bytes")


def plan(job: Job, device: Device, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Trace ranks of a job (None: those that stand for all), play their step on a device, and return plain values."""
    asked = representatives(job.degrees) if ranks is None else list(ranks)
    reports = _stages(job, device, asked) if job.degrees.pp > 1 else [_report(job, device, rank) for rank in asked]
    busiest = max(reports, key=lambda each: sum(row["bytes"] for row in each["collectives"]))
    seconds = max(each["step_seconds"] for each in reports)
    largest = {key: max(each[key] for each in reports) for key in LARGEST}
    tokens = job.microbatches * job.rows * job.length * job.degrees.dp
    return {
        "strategy": str(job.stack),
        "world_size": job.degrees.world_size,
        "mesh": str(job.degrees),
        "device": device.name,
        "memory_bytes": device.memory_bytes,
        "fits": fits(largest["peak_reserved_bytes"], device),
        **largest,
        "step_seconds": seconds,
        "tokens_per_second_per_device": tokens / seconds / job.degrees.world_size,
        "collectives": busiest["collectives"],
        "ranks": reports,
    }


def fits(reserved_bytes: int, device: Device) -> bool:
    """Return whether a device has so much besides what torch's allocator does not know of."""
    return reserved_bytes <= device.memory_bytes - device.context_bytes


def representatives(degrees: Degrees) -> list[int]:
    """Return ranks such that each other one is like one of them: of the first two, middle and last two stages."""
    of_stage = degrees.world_size // degrees.pp
    stages = {stage for stage in (0, 1, degrees.pp // 2, degrees.pp - 2, degrees.pp - 1) if 0 <= stage < degrees.pp}
    return sorted({*(stage * of_stage for stage in stages), degrees.world_size - 1})


def trace_rank(job: Job, rank: int) -> Trace:
    """Trace the step of one rank of a job, which need not exist."""
    return trace_steps(job, rank, [job.microbatches])[0]


def trace_steps(job: Job, rank: int, counts: Sequence[int]) -> list[Trace]:
    """Trace a step with each number of microbatches, ascending; see `trace_rank`."""
    with tracing(job, rank) as mesh:
        return traces(job, mesh, counts)


@contextmanager
def tracing(job: Job, rank: int) -> Iterator[Mesh]:
    """Give a mesh on which a job is traced; raise StrategyError for any error within that is not meshwright's."""
    # A mesh of its own: what is made once for a mesh belongs to the first job on it.
    with planned_mesh(job, rank) as mesh:
        try:
            yield mesh
        except MeshwrightError:
            raise
        except Exception as error:
            # Whatever a package's own code does with tensors that have no values, or with ranks that are all alike.
            reason = (str(error).strip().splitlines() or [""])[0]
            raise StrategyError(
                f"{job.stack} on {job.degrees} cannot be planned: it looks at what is known on real ranks alone "
                f"({type(error).__name__}: {reason}). Use another strategy, or train a step on real ranks."
            ) from error


@contextmanager
def planned_mesh(job: Job, rank: int) -> Iterator[Mesh]:
    with planned_world(rank, job.degrees.world_size, imbalance=job.expert_imbalance) as world:
        with with_values():
            mesh = Mesh(job.degrees, world)
        yield mesh


@contextmanager
def after_step(job: Job, rank: int) -> Iterator[StrategyManager]:
    """Give the manager of a job whose model has trained a step on a planned rank."""
    with tracing(job, rank) as mesh:
        model, manager = job.built(mesh)
        batches = [job.batch(model)]
        manager.parallelize(model, NoValues())
        del model
        manager.build_optimizer(job.optimizer)
        if job.ema is not None:
            EMA(manager, job.ema)
        manager.forward_backward(batches, num_tokens=manager.announce(batches))
        manager.clip_grad_norm(job.max_grad_norm, job.grad_norm_type)
        manager.optimizer_step()
        yield manager


def _report(job: Job, device: Device, rank: int) -> dict[str, Any]:
    """Report one rank; from fewer blocks and microbatches where these determine it."""
    known: dict[Point, dict[str, Any]] = {}

    def found(points: Sequence[Point]) -> Mapping[Point, dict[str, Any]]:
        missing: dict[Numbers, list[int]] = {}
        for blocks, (count,) in sorted(set(points) - known.keys()):
            missing.setdefault(blocks, []).append(count)
        for blocks, counts in missing.items():
            small = job.at_depth(*blocks) if blocks else job
            for count, each in zip(counts, trace_steps(small, rank, counts), strict=True):
                known[blocks, (count,)] = _alone(each, small, device)
        return known

    layers = job.layers if job.with_layers is not None and job.layers else None
    return at_full_size(found, layers, job.microbatches) or _alone(trace_rank(job, rank), job, device)


def _alone(found: Trace, job: Job, device: Device) -> dict[str, Any]:
    return _of_rank(found, _played([found], job, device)[0], device)


def _stages(job: Job, device: Device, asked: Sequence[int]) -> list[dict[str, Any]]:
    """Report ranks of a pipeline; from small pipelines where these determine them."""
    stages = _in_stages(job)
    if stages is not None:
        reports = from_small(job, stages, asked, device, trace_steps, lambda found, line: _of_rank(found, line, device))
        if reports is not None:
            return reports
    # All stages are played together; ranks of one stage take the same time.
    together = stage_ranks(asked[0], job.degrees)
    traces = {rank: trace_rank(job, rank) for rank in sorted({*together, *asked})}
    lines = {line.rank: line for line in _played([traces[rank] for rank in together], job, device)}
    of_stage = job.degrees.world_size // job.degrees.pp
    lines = {rank: lines[rank if rank in lines else together[rank // of_stage]] for rank in traces}
    return [_of_rank(found, lines[rank], device) for rank, found in traces.items()]


def _in_stages(job: Job) -> InStages | None:
    if job.with_layers is None or not job.layers:
        return None
    with planned_mesh(job, 0) as mesh, with_values():
        ask = getattr(job.stack.build(mesh), "in_stages", None)
        found: InStages | None = None if ask is None else ask(job.model())
    return found if found is not None and sum(found.blocks) == job.layers else None


def _played(traces: Sequence[Trace], job: Job, device: Device) -> list[Timeline]:
    return play(traces, job.degrees, device, is_compiled=job.is_compiled, chunked=job.chunked)


def reserved_of(found: Trace, device: Device) -> int:
    """Return the bytes that are taken from a device for a step; a host returns what is freed."""
    return found.peak.bytes if device.is_host else reserved(found, workspace=device.library_bytes)


def _of_rank(found: Trace, line: Timeline, device: Device) -> dict[str, Any]:
    library = device.library_bytes
    libraries = {LIBRARIES: library} if library else {}
    by_dtype: dict[str, int] = {}
    phases: dict[str, list[Collective]] = {}
    for each in found.operations:
        if each.flops:
            name = str(each.dtype).removeprefix("torch.")
            by_dtype[name] = by_dtype.get(name, 0) + each.flops
        if each.call is not None:
            phases.setdefault(each.phase, []).append(found.collectives[each.call])
    return {
        "rank": found.rank,
        "peak_allocated_bytes": found.peak.bytes + library,
        "peak_reserved_bytes": reserved_of(found, device),
        "held_bytes": found.after.bytes + library,
        "peak_operator": found.peak.operator,
        "library_bytes": library,
        "peak_by_phase": {phase: most + library for phase, most in found.peak.phases.items()},
        "peak_by_owner": {**found.peak.owners, **libraries},
        "held_by_owner": {**found.after.owners, **libraries},
        "activations_by_module": dict(found.peak.activations),
        "flops": sum(by_dtype.values()),
        "flops_by_dtype": by_dtype,
        "step_seconds": line.seconds,
        "busy_seconds": {name: line.busy(name) for name in dict.fromkeys(span.stream for span in line.spans)},
        "gradients_bytes": most_of(found, "gradients"),
        "collectives": sums_of(found.collectives),
        "collectives_by_phase": [{"phase": phase, **row} for phase, calls in phases.items() for row in sums_of(calls)],
    }


def most_of(found: Trace, owner: str) -> int:
    """Return the most bytes that an owner has in a step; see [Note: owners] in `meter`."""
    return max(accumulate((change for block, change in found.log if found.owners.get(block) == owner), initial=0))


def sums_of(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Return calls and bytes of each kind of collective over each group, in the order of their first calls."""
    rows: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    for each in collectives:
        dtype = str(each.dtype).removeprefix("torch.")
        named = {"kind": each.kind, "group": each.group, "ranks": each.ranks, "dtype": dtype}
        row = rows.setdefault((each.kind, each.group, each.ranks, dtype), {**named, "calls": 0, "bytes": 0})
        row["calls"] += 1
        row["bytes"] += each.bytes
    return list(rows.values())


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs for each target of a row without masks, or None and why they are not known; see [Note: model FLOPs]."""

    per_token: float | None
    why_not: str = ""


def model_flops(job: Job, objective: Objective | None = None) -> ModelFlops:
    """Return what the model of a job needs for each token, in any layout; objectives are counted as the token loss."""
    if objective is not None and not _counts_tokens(Given(objective)):
        return ModelFlops(None, f"the {Given(objective).name} counts something else than tokens")
    try:
        stack, degrees = resolve("single", MeshSizes(), 1, config={"loss_chunk_rows": 0})
        alone = replace(job, stack=stack, degrees=degrees, rows=1, microbatches=1)
        return ModelFlops(_of_row(alone) / max(1, job.length - 1))
    except MeshwrightError as error:
        return ModelFlops(None, str(error))


def _counts_tokens(given: Given) -> bool:
    """Return whether an objective is divided by the number of targets, as far as a few rows tell."""
    ids = torch.ones((given.rows, 4), dtype=torch.int64)
    try:
        return given.count([{"input_ids": ids, "labels": ids}]) in (None, given.rows * 3)
    except BatchError:
        return False


def _of_row(job: Job) -> int:
    of = functools.cache(lambda blocks: _traced(job.at_depth(blocks)))
    for first, second, check in DEPTHS:
        if job.with_layers is None or job.layers <= first + second + check:
            break
        growth = (of(second) - of(first)) / (second - first)
        if of(second) + growth * (check - second) == of(check):
            return int(of(check)) + round(growth * (job.layers - check))
    return _traced(job)


def _traced(job: Job) -> int:
    products = _Products()
    with tracing(job, 0) as mesh:
        model, manager = job.built(mesh)
        batches = [job.batch(model)]
        module = manager.parallelize(model, NoValues() if is_meta(model) else None)
        module.register_forward_pre_hook(products.begin)
        with products:
            manager.forward_backward(batches, num_tokens=manager.announce(batches))
    return products.flops


class _Products(Observer):
    """Sum of products from the first forward on that a backward follows: the model may be tried before."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self._has_begun = 0, False

    def begin(self, *_: Any) -> None:
        self._has_begun = self._has_begun or torch.is_grad_enabled()

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if not self._has_begun:
            return
        found = arithmetic(operation, args, kwargs, result)
        if found and is_attention(operation) and "backward" in name_of(operation):
            found = found * 4 // 5
        self.flops += found


def job_of(config: RunConfig, world_size: int) -> Job:
    """Return what a run would do on so many ranks."""
    stack, degrees, rows = layout_of(config, world_size)
    steps = config.steps or 1
    try_optimization(config.optimizer, config.schedule.over(steps), steps, device=torch.device("cpu"))
    found = find_model(config.model)
    if found.directory is None and "vocab_size" not in config.model:
        hf_config = data_and_model_config(config, found)[1]  # the tokenizer has the number
    else:
        hf_config = model_config(config.model, tokenizer=None, seq_len=config.data.seq_len, directory=found.directory)
    make = functools.partial(_model, found, hf_config, found.dtype(config.model))
    return Job(
        stack,
        degrees,
        functools.partial(make, None),
        optimizer_factory(config.optimizer),
        microbatches=config.batch_size // (degrees.dp * rows),
        rows=rows,
        length=config.data.seq_len,
        max_grad_norm=config.max_grad_norm,
        grad_norm_type=config.grad_norm_type,
        layers=getattr(hf_config.get_text_config(), "num_hidden_layers", 0),
        with_layers=make,
        ema=config.ema,
        is_compiled=bool(getattr(stack.inner.config, "enable_compile", False)),
        chunked=("tp",) if getattr(stack.inner.config, "enable_async_tensor_parallel", False) else (),
    )


def _model(found: RunModel, hf_config: Any, dtype: torch.dtype, layers: int | None) -> nn.Module:
    hf_config = copy.deepcopy(hf_config)
    if layers is not None:
        text = hf_config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = text.layer_types[:layers]
    with torch.device("meta"):
        model = new_model(hf_config, dtype, 0)
    if found.adapters is None:
        return model
    check_names(found.adapters.config, model, where="model.peft")
    adapted: nn.Module = adapted_on_meta(model, {"default": copy.deepcopy(found.adapters.config)})
    return adapted
