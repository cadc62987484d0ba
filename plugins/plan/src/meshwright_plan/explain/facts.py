"""Collect facts about a run before it starts.

[Note: detected sharding] A strategy shards a tensor along an axis exactly if ranks along that axis hold different
chunks of it. So a small model is sharded on a fake world as rank 0 and as the last rank along each axis, and their
chunks are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeAlias

import torch
from torch import nn

from meshwright.plugin import ROOT_AXES, ChunkedTensor, Degrees, MeshwrightError, build_scheduler
from meshwright_run.run_action import RunAction, choose_run_action
from meshwright_run.run_file import RunConfig

from ..live import build_plan
from ..planner import build_job, manager_after_step
from ..timeline import find_group_ranks
from ..trace import TrainingJob

ShardAxes: TypeAlias = tuple[tuple[str, ...], tuple[str, ...], float]
BLOCKS_PER_STAGE = 2  # Blocks per stage of the small model
_PADDING_TOLERANCE = 0.12  # Excess over its share that a rank may hold: padding, and tensors too small to be sharded


@dataclass(frozen=True)
class MemoryShare:
    """Share of the parameters, gradients or optimizer state that a rank holds."""

    bytes: int  # bytes on the rank
    full_bytes: int  # bytes of the full tensors; 0: unknown
    sharded_axes: tuple[str, ...]  # axes along which it is sharded
    replicated_axes: tuple[str, ...]  # axes along which it is replicated

    def fraction(self, degrees: Degrees) -> Fraction | None:
        """Return 1, or 1 / the product of the sharded axes, if the bytes are near that fraction; None otherwise."""
        if not self.full_bytes:
            return None
        share = self.bytes / self.full_bytes
        for part in (Fraction(1, math.prod(getattr(degrees, axis) for axis in self.sharded_axes)), Fraction(1)):
            if part * (1 - Fraction(1, 100)) <= share <= part * (1 + _PADDING_TOLERANCE):
                return part
        return None


def find_shard_axes(job: TrainingJob) -> ShardAxes:
    """Return the axes that shard parameters and optimizer state, and state bytes per trained element; see the note."""
    blocks, make = BLOCKS_PER_STAGE * job.degrees.pp, job.build_with_layers
    if make is not None and job.num_layers > blocks:
        try:
            return _compare_ranks(replace(job, build_model=lambda: make(blocks), num_layers=blocks))
        except MeshwrightError:
            pass  # A schedule may need more blocks
    return _compare_ranks(job)


def _compare_ranks(job: TrainingJob) -> ShardAxes:
    axes = [axis for axis in ROOT_AXES if getattr(job.degrees, axis) > 1]
    parameters, optimizer, optimizer_bytes = _inspect_rank(job, 0)
    # The last rank along each axis.
    others = {
        axis: _inspect_rank(job, max(find_group_ranks(axis, 0, job.degrees, getattr(job.degrees, axis))))
        for axis in axes
    }
    along_parameters = tuple(axis for axis in axes if others[axis][0] != parameters)
    return along_parameters, tuple(axis for axis in axes if others[axis][1] != optimizer), optimizer_bytes


def _inspect_rank(job: TrainingJob, rank: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Return a rank's rectangles of parameters and optimizer state after a step, and state bytes per element."""
    with manager_after_step(replace(job, ema=None), rank) as manager:
        state = manager.sharded_state()
        optimizer = state.optimizer.tensors if state.optimizer is not None else {}
        elements = sum(math.prod(state.model[name].shape) for name in optimizer if name in state.model)
        kept = [each for values in optimizer.values() for each in values.values()]
        size = sum(math.prod(each.shape) * each.dtype.itemsize for each in kept)
        return (
            _list_rectangles(state.model),
            {name: _list_rectangles(values) for name, values in optimizer.items()},
            size / elements if elements else 0.0,
        )


def _list_rectangles(values: Mapping[str, ChunkedTensor]) -> dict[str, Any]:
    return {name: sorted((piece.offsets, piece.sizes) for piece in value.chunks) for name, value in values.items()}


MemoryBreakdown: TypeAlias = dict[int, dict[str, MemoryShare]]


@dataclass(frozen=True)
class RunFacts:
    """Facts from which the sentences are built."""

    config: RunConfig
    job: TrainingJob
    num_parameters: int  # number of parameters of the full model
    num_trainable: int
    memory_breakdown: MemoryBreakdown  # by planned rank: shares of parameters, gradients and optimizer state
    plan: Mapping[str, Any] | None  # None: `unavailable_reason` says why
    unavailable_reason: str
    learning_rates: Mapping[int, float] | None  # learning rates by step; None: the number of steps is unknown
    run_action: RunAction | None  # None: the run would be refused, with the error `refusal`
    refusal: str

    @property
    def degrees(self) -> Degrees:
        return self.job.degrees


def collect_facts(config: RunConfig, world_size: int) -> RunFacts:
    """Collect the facts about a run on `world_size` ranks, which includes its plan."""
    job = build_job(config, world_size)
    all_parameters = list({id(each): each for each in job.build_model().parameters()}.values())
    trained = [each for each in all_parameters if each.requires_grad]
    plan, reason = None, ""
    memory: MemoryBreakdown = {}
    try:
        plan, _ = build_plan(config, world_size)
    except MeshwrightError as error:
        reason = str(error)
    else:
        memory = _break_down_memory(plan, job, all_parameters, trained)
    action, refusal = None, ""
    try:
        action = choose_run_action(config, config.steps)
    except MeshwrightError as error:
        refusal = str(error)
    parameters, trainable = (sum(each.numel() for each in group) for group in (all_parameters, trained))
    return RunFacts(
        config, job, parameters, trainable, memory, plan, reason, _compute_learning_rates(config), action, refusal
    )


def _break_down_memory(
    plan: Mapping[str, Any], job: TrainingJob, all_parameters: list[nn.Parameter], trainable: list[nn.Parameter]
) -> MemoryBreakdown:
    along, along_optimizer, optimizer_bytes = find_shard_axes(job)
    axes = [axis for axis in ROOT_AXES if getattr(job.degrees, axis) > 1]
    state = round(optimizer_bytes * sum(each.numel() for each in trainable))

    def size_of(parameters: list[nn.Parameter]) -> int:
        return sum(each.numel() * each.element_size() for each in parameters)

    def held(size: int, of: int, along: tuple[str, ...]) -> MemoryShare:
        return MemoryShare(size, of, along, tuple(axis for axis in axes if axis not in along))

    return {
        each["rank"]: {
            "parameters": held(each["persistent_by_owner"].get("parameters", 0), size_of(all_parameters), along),
            "gradients": held(each["peak_gradient_bytes"], size_of(trainable), along),
            "optimizer": held(each["persistent_by_owner"].get("optimizer", 0), state, along_optimizer),
        }
        for each in plan["ranks"]
    }


def _compute_learning_rates(config: RunConfig) -> dict[int, float] | None:
    """Return learning rates of the main group by step (from 1): first, after warm-up, halfway, last."""
    steps = config.steps
    if steps is None:
        return None
    schedule = config.schedule.resolve_warmup(steps)
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)
    (factor,) = build_scheduler(schedule, stand_in, steps).lr_lambdas
    wanted = sorted({1, min(steps, schedule.warmup_steps + 1), (steps + 1) // 2, steps})
    return {step: config.optimizer.lr * factor(step - 1) for step in wanted}
