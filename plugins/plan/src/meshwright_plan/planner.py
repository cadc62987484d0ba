"""Plan a job: memory, communication and time of some ranks on a device, as JSON values. Also build a run file's job."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from meshwright.plugin import (
    EMA,
    Collective,
    Degrees,
    Mesh,
    MeshwrightError,
    StrategyError,
    StrategyManager,
    add_adapters_on_meta,
    build_model_config,
    check_target_names,
    init_model,
    optimizer_factory,
    probe_optimizer,
    real_compute,
)
from meshwright_run.preflight import ResolvedModel, prepare_data_and_model_config, resolve_model
from meshwright_run.run_file import RunConfig, resolve_layout

from .allocator import compute_reserved_bytes
from .config import DeviceSpec
from .extrapolation import Coordinates, Point, extrapolate_report
from .fake_world import fake_world
from .meter import LIBRARIES
from .pipeline_extrapolation import StageCostModel, extrapolate_ranks
from .timeline import Timeline, find_pipeline_ranks, simulate_timelines
from .trace import NoWeights, StepTrace, TrainingJob, trace_job_steps

MAX_OVER_RANKS = ("peak_allocated_bytes", "peak_reserved_bytes", "persistent_bytes")


def plan_job(job: TrainingJob, device: DeviceSpec, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Trace ranks of a job (None: representative ones), simulate a step on a device, and return JSON values."""
    requested = choose_representative_ranks(job.degrees) if ranks is None else list(ranks)
    reports = (
        _report_stages(job, device, requested)
        if job.degrees.pp > 1
        else [_report_rank(job, device, rank) for rank in requested]
    )
    busiest = max(reports, key=lambda each: sum(row["bytes"] for row in each["collectives"]))
    seconds = max(each["step_seconds"] for each in reports)
    largest = {key: max(each[key] for each in reports) for key in MAX_OVER_RANKS}
    tokens = job.num_microbatches * job.micro_batch_size * job.seq_len * job.degrees.dp
    return {
        "strategy": str(job.stack),
        "world_size": job.degrees.world_size,
        "mesh": str(job.degrees),
        "device": device.name,
        "memory_bytes": device.memory_bytes,
        "usable_bytes": device.memory_bytes - device.context_bytes,
        "fits": fits_in_memory(largest["peak_reserved_bytes"], device),
        **largest,
        "step_seconds": seconds,
        "tokens_per_second_per_device": tokens / seconds / job.degrees.world_size,
        "collectives": busiest["collectives"],
        "ranks": reports,
    }


def fits_in_memory(reserved_bytes: int, device: DeviceSpec) -> bool:
    """Return whether `reserved_bytes` fit on a device together with its memory outside torch's allocator."""
    return reserved_bytes <= device.memory_bytes - device.context_bytes


def choose_representative_ranks(degrees: Degrees) -> list[int]:
    """Return ranks that represent all others: of the first two, the middle and the last two stages, and the last."""
    of_stage = degrees.world_size // degrees.pp
    stages = {stage for stage in (0, 1, degrees.pp // 2, degrees.pp - 2, degrees.pp - 1) if 0 <= stage < degrees.pp}
    return sorted({*(stage * of_stage for stage in stages), degrees.world_size - 1})


def trace_rank(job: TrainingJob, rank: int) -> StepTrace:
    """Trace a step of one rank of a job. The rank need not exist."""
    return trace_steps(job, rank, [job.num_microbatches])[0]


def trace_steps(job: TrainingJob, rank: int, counts: Sequence[int]) -> list[StepTrace]:
    """Trace one step for each number of microbatches in `counts`, ascending; see `trace_rank`."""
    with tracing_mesh(job, rank) as mesh:
        return trace_job_steps(job, mesh, counts)


@contextmanager
def tracing_mesh(job: TrainingJob, rank: int) -> Iterator[Mesh]:
    """Yield a mesh on which to trace a job. Errors inside that are not meshwright's become StrategyError."""
    # Each job needs its own mesh: objects that are created once per mesh belong to its first job.
    with fake_mesh(job, rank) as mesh:
        try:
            yield mesh
        except MeshwrightError:
            raise
        except Exception as error:
            # Third-party code may fail on tensors without values, or on ranks that all hold the same.
            reason = (str(error).strip().splitlines() or [""])[0]
            raise StrategyError(
                f"{job.stack} on {job.degrees} cannot be planned: it reads values that exist only on real ranks "
                f"({type(error).__name__}: {reason}). Use another strategy, or train a step on real ranks."
            ) from error


@contextmanager
def fake_mesh(job: TrainingJob, rank: int) -> Iterator[Mesh]:
    with fake_world(rank, job.degrees.world_size, imbalance=job.expert_imbalance) as world:
        with real_compute():
            mesh = Mesh(job.degrees, world)
        yield mesh


@contextmanager
def manager_after_step(job: TrainingJob, rank: int) -> Iterator[StrategyManager]:
    """Yield the manager of a job after one training step on a fake rank."""
    with tracing_mesh(job, rank) as mesh:
        model, manager = job.build(mesh)
        batches = [job.make_batch(model)]
        manager.parallelize(model, NoWeights())
        del model
        manager.build_optimizer(job.optimizer_factory)
        if job.ema is not None:
            EMA(manager, job.ema)
        manager.forward_backward(batches, num_tokens=manager.begin_step_sync(batches))
        manager.clip_grad_norm(job.max_grad_norm, job.grad_norm_type)
        manager.optimizer_step()
        yield manager


def _report_rank(job: TrainingJob, device: DeviceSpec, rank: int) -> dict[str, Any]:
    """Report one rank, extrapolated from fewer blocks and microbatches if these determine it."""
    known: dict[Point, dict[str, Any]] = {}

    def get_reports(points: Sequence[Point]) -> Mapping[Point, dict[str, Any]]:
        missing: dict[Coordinates, list[int]] = {}
        for blocks, (count,) in sorted(set(points) - known.keys()):
            missing.setdefault(blocks, []).append(count)
        for blocks, counts in missing.items():
            small = job.with_num_layers(*blocks) if blocks else job
            for count, each in zip(counts, trace_steps(small, rank, counts), strict=True):
                known[blocks, (count,)] = _report_trace(each, small, device)
        return known

    layers = job.num_layers if job.build_with_layers is not None and job.num_layers else None
    return extrapolate_report(get_reports, layers, job.num_microbatches) or _report_trace(
        trace_rank(job, rank), job, device
    )


def _report_trace(trace: StepTrace, job: TrainingJob, device: DeviceSpec) -> dict[str, Any]:
    return _build_report(trace, _simulate([trace], job, device)[0], device)


def _report_stages(job: TrainingJob, device: DeviceSpec, requested_ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Report ranks of a pipeline, extrapolated from small pipelines if these determine them."""
    stages = _get_cost_model(job)
    if stages is not None:
        reports = extrapolate_ranks(
            job, stages, requested_ranks, device, trace_steps, lambda found, line: _build_report(found, line, device)
        )
        if reports is not None:
            return reports
    # All stages are simulated together; ranks of one stage take the same time.
    together = find_pipeline_ranks(requested_ranks[0], job.degrees)
    traces = {rank: trace_rank(job, rank) for rank in sorted({*together, *requested_ranks})}
    lines = {line.rank: line for line in _simulate([traces[rank] for rank in together], job, device)}
    of_stage = job.degrees.world_size // job.degrees.pp
    lines = {rank: lines[rank if rank in lines else together[rank // of_stage]] for rank in traces}
    return [_build_report(found, lines[rank], device) for rank, found in traces.items()]


def _get_cost_model(job: TrainingJob) -> StageCostModel | None:
    if job.build_with_layers is None or not job.num_layers:
        return None
    with fake_mesh(job, 0) as mesh, real_compute():
        build = getattr(job.stack.build(mesh), "build_cost_model", None)
        stages: StageCostModel | None = None if build is None else build(job.build_model())
    return stages if stages is not None and sum(stages.blocks_per_stage) == job.num_layers else None


def _simulate(traces: Sequence[StepTrace], job: TrainingJob, device: DeviceSpec) -> list[Timeline]:
    return simulate_timelines(
        traces, job.degrees, device, is_compiled=job.is_compiled, chunked_groups=job.chunked_groups
    )


def get_reserved_bytes(trace: StepTrace, device: DeviceSpec) -> int:
    """Return the bytes that a step reserves on a device. On a host, freed memory is returned, so this is the peak."""
    return trace.peak.bytes if device.is_host else compute_reserved_bytes(trace, workspace=device.library_bytes)


def _build_report(trace: StepTrace, timeline: Timeline, device: DeviceSpec) -> dict[str, Any]:
    library = device.library_bytes
    libraries = {LIBRARIES: library} if library else {}
    by_dtype: dict[str, int] = {}
    phases: dict[str, list[Collective]] = {}
    for each in trace.operations:
        if each.flops:
            name = str(each.dtype).removeprefix("torch.")
            by_dtype[name] = by_dtype.get(name, 0) + each.flops
        if each.collective_index is not None:
            phases.setdefault(each.phase, []).append(trace.collectives[each.collective_index])
    return {
        "rank": trace.rank,
        "peak_allocated_bytes": trace.peak.bytes + library,
        "peak_reserved_bytes": get_reserved_bytes(trace, device),
        "persistent_bytes": trace.between_steps.bytes + library,
        "peak_operator": trace.peak.operator,
        "library_workspace_bytes": library,
        "peak_by_phase": {phase: most + library for phase, most in trace.peak.peak_by_phase.items()},
        "peak_by_owner": {**trace.peak.bytes_by_owner, **libraries},
        "persistent_by_owner": {**trace.between_steps.bytes_by_owner, **libraries},
        "activations_by_module": dict(trace.peak.activations_by_module),
        "flops": sum(by_dtype.values()),
        "flops_by_dtype": by_dtype,
        "step_seconds": timeline.seconds,
        "busy_seconds": {
            name: timeline.busy_seconds(name) for name in dict.fromkeys(span.stream for span in timeline.spans)
        },
        "peak_gradient_bytes": compute_owner_peak(trace, "gradients"),
        "collectives": summarize_collectives(trace.collectives),
        "collectives_by_phase": [
            {"phase": phase, **row} for phase, calls in phases.items() for row in summarize_collectives(calls)
        ],
    }


def compute_owner_peak(trace: StepTrace, owner: str) -> int:
    """Return the peak bytes of an owner in a step; see [Note: owners] in `meter`."""
    return max(
        accumulate(
            (change for block, change in trace.memory_log if trace.owners_by_block.get(block) == owner), initial=0
        )
    )


def summarize_collectives(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Return calls and bytes by kind, group and dtype of collectives, in the order of their first calls."""
    rows: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    for each in collectives:
        dtype = str(each.dtype).removeprefix("torch.")
        named = {"kind": each.kind, "group": each.group, "ranks": each.num_ranks, "dtype": dtype}
        row = rows.setdefault((each.kind, each.group, each.num_ranks, dtype), {**named, "calls": 0, "bytes": 0})
        row["calls"] += 1
        row["bytes"] += each.nbytes
    return list(rows.values())


def build_job(config: RunConfig, world_size: int) -> TrainingJob:
    """Return the training job of a run on `world_size` ranks."""
    stack, degrees, rows = resolve_layout(config, world_size)
    steps = config.steps or 1
    probe_optimizer(config.optimizer, config.schedule.resolve_warmup(steps), steps, device=torch.device("cpu"))
    model = resolve_model(config.model)
    if model.directory is None and "vocab_size" not in config.model:
        hf_config = prepare_data_and_model_config(config, model)[1]  # the tokenizer gives the vocabulary size
    else:
        hf_config = build_model_config(
            config.model, tokenizer=None, seq_len=config.data.seq_len, directory=model.directory
        )
    make = functools.partial(_build_model, model, hf_config, model.get_dtype(config.model))
    return TrainingJob(
        stack,
        degrees,
        functools.partial(make, None),
        optimizer_factory(config.optimizer),
        num_microbatches=config.batch_size // (degrees.dp * rows),
        micro_batch_size=rows,
        seq_len=config.data.seq_len,
        max_grad_norm=config.max_grad_norm,
        grad_norm_type=config.grad_norm_type,
        num_layers=getattr(hf_config.get_text_config(), "num_hidden_layers", 0),
        build_with_layers=make,
        ema=config.ema,
        is_compiled=bool(getattr(stack.inner.config, "enable_compile", False)),
        chunked_groups=("tp",) if getattr(stack.inner.config, "enable_async_tensor_parallel", False) else (),
    )


def _build_model(run_model: ResolvedModel, hf_config: Any, dtype: torch.dtype, layers: int | None) -> nn.Module:
    hf_config = copy.deepcopy(hf_config)
    if layers is not None:
        text = hf_config.get_text_config()
        text.num_hidden_layers = layers
        if getattr(text, "layer_types", None) is not None:
            text.layer_types = text.layer_types[:layers]
    with torch.device("meta"):
        model = init_model(hf_config, dtype, 0)
    if run_model.adapters is None:
        return model
    check_target_names(run_model.adapters.config, model, where="model.peft")
    adapted: nn.Module = add_adapters_on_meta(model, {"default": copy.deepcopy(run_model.adapters.config)})
    return adapted
