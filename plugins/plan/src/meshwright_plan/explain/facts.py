"""What is known of a run before it begins.

[Note: seen, not reported] A rank and its neighbour along an axis hold different pieces exactly where the strategy
divides along that axis. So a small model is laid out on a planned world for rank 0 and for the last rank along each
axis, and their pieces are compared.
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
BLOCKS_PER_STAGE = 2  # Blocks of the small model in each stage
_PADDING_TOLERANCE = 0.12  # How much more than its share a rank may hold: padding, and what is too small to be divided


@dataclass(frozen=True)
class MemoryShare:
    """The part of something that a rank holds."""

    bytes: int  # of the part
    full_bytes: int  # of the whole; 0: unknown
    sharded_axes: tuple[str, ...]  # along which it is divided
    replicated_axes: tuple[str, ...]  # axes along which ranks hold the same

    def fraction(self, degrees: Degrees) -> Fraction | None:
        """Return 1, or one over the degrees of the axes, if the bytes are about that part; None otherwise."""
        if not self.full_bytes:
            return None
        share = self.bytes / self.full_bytes
        for part in (Fraction(1, math.prod(getattr(degrees, axis) for axis in self.sharded_axes)), Fraction(1)):
            if part * (1 - Fraction(1, 100)) <= share <= part * (1 + _PADDING_TOLERANCE):
                return part
        return None


def find_shard_axes(job: TrainingJob) -> ShardAxes:
    """Return what divides parameters and optimizer state, and the state's bytes per trained element; see the note."""
    blocks, make = BLOCKS_PER_STAGE * job.degrees.pp, job.build_with_layers
    if make is not None and job.num_layers > blocks:
        try:
            return _compare_ranks(replace(job, build_model=lambda: make(blocks), num_layers=blocks))
        except MeshwrightError:
            pass  # A schedule may want more blocks
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
    """Rectangles of parameters and of optimizer state that a rank holds after a step, and bytes of an element of it."""
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
    """What sentences are made of."""

    config: RunConfig
    job: TrainingJob
    num_parameters: int  # number of parameters of the whole model
    num_trainable: int
    memory_breakdown: MemoryBreakdown  # by planned rank: parameters, gradients and optimizer state
    plan: Mapping[str, Any] | None
    unavailable_reason: str
    learning_rates: Mapping[int, float] | None  # learning rates by step; None: the number of steps is unknown
    run_action: RunAction | None
    refusal: str

    @property
    def degrees(self) -> Degrees:
        return self.job.degrees


def collect_facts(config: RunConfig, world_size: int) -> RunFacts:
    """Plan a run on so many ranks."""
    job = build_job(config, world_size)
    whole = list({id(each): each for each in job.build_model().parameters()}.values())
    trained = [each for each in whole if each.requires_grad]
    plan, why_not = None, ""
    held: MemoryBreakdown = {}
    try:
        plan = build_plan(config, world_size)
    except MeshwrightError as error:
        why_not = str(error)
    else:
        held = _break_down_memory(plan, job, whole, trained)
    fate, refusal = None, ""
    try:
        fate = choose_run_action(config, config.steps)
    except MeshwrightError as error:
        refusal = str(error)
    parameters, trainable = (sum(each.numel() for each in those) for those in (whole, trained))
    return RunFacts(
        config, job, parameters, trainable, held, plan, why_not, _compute_learning_rates(config), fate, refusal
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
    """Rates of the main group at the first step, after the warm-up, in the middle and at the end, by step from 1."""
    steps = config.steps
    if steps is None:
        return None
    schedule = config.schedule.resolve_warmup(steps)
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.optimizer.lr)
    (factor,) = build_scheduler(schedule, stand_in, steps).lr_lambdas
    wanted = sorted({1, min(steps, schedule.warmup_steps + 1), (steps + 1) // 2, steps})
    return {step: config.optimizer.lr * factor(step - 1) for step in wanted}
