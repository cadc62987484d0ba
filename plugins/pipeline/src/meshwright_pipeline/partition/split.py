"""Assign blocks to stages, and estimate the step time of the stages for plans. Uses only names and numbers.

`analyzer` determines where a model can be split; `config` determines the number of stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from meshwright.plugin import ConfigError

from ..config import BlockCountConfig, PipelineConfig, compute_num_microbatches, compute_num_stages, resolve_schedule
from ..schedule.actions import ActionKind, Schedule, compute_timeline
from ..schedule.specs import find_schedule_spec

if TYPE_CHECKING:
    from torch import nn

    from meshwright.plugin import ModelLayout

EMBEDDING_COST = 0.1
"""Cost of an embedding parameter, relative to a parameter of a matrix product. The lookup is free, but the optimizer
updates each parameter, which takes a short time relative to a step."""


def split_model(
    model: nn.Module,
    layout: ModelLayout,
    config: PipelineConfig,
    stages: int,
    *,
    blocks: Sequence[str],
    runs_in: Callable[[str, range], bool] = lambda module, stage: True,
) -> list[range]:
    """Return the range of blocks of each stage, according to the options.

    `blocks` are in execution order. The model may be on the meta device.
    """
    if isinstance(config, BlockCountConfig):
        return [range(*each) for each in pairwise([0, *accumulate(config.blocks_per_stage)])]
    if config.module_fqns_per_model_part is not None:
        named = dict(model.named_modules())
        return split_by_names(
            config.module_fqns_per_model_part,
            blocks=blocks,
            modules=named.keys(),
            holders=[name for name, module in named.items() if name and list(module.parameters(recurse=False))],
            runs_in=runs_in,
        )
    if config.layers_per_stage is not None:
        return split_blocks([1.0] * len(blocks), stages)
    return split_blocks(
        [count_parameters(model, block) for block in blocks], stages, **compute_end_costs(model, layout)
    )


def count_parameters(model: nn.Module, name: str | None) -> int:
    return sum(parameter.numel() for parameter in model.get_submodule(name).parameters()) if name else 0


def compute_end_costs(model: nn.Module, layout: ModelLayout) -> dict[str, float]:
    """Return the costs of the first and last stage besides their blocks, in parameters of matrix products."""
    return {
        "first": EMBEDDING_COST * count_parameters(model, layout.embedding),
        "last": count_parameters(model, layout.head),
    }


def split_blocks(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Divide consecutive blocks among stages, so that the cost of the most expensive stage is minimal.

    Ties are resolved by the smallest sum of squares, which is the most even division, then by fewer blocks on earlier
    stages, which hold more microbatches at once. `first` and `last` are the costs of the first and last stage besides
    their blocks (embedding, head), in the unit of `costs`.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(
            f"{len(costs)} blocks cannot be divided into {stages} stages, since each stage needs one. "
            f"Use between 1 and {len(costs)} stages."
        )
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        at_ends = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return sums[stop] - sums[start] + at_ends

    largest, _ = _find_best_cuts(cost, len(costs), stages, combine=max)
    # Tolerance for rounding in differences of sums.
    limit = largest * (1 + 1e-9)

    def square(stage: int, start: int, stop: int) -> float:
        value = cost(stage, start, stop)
        return value**2 if value <= limit else math.inf

    _, cuts = _find_best_cuts(square, len(costs), stages, combine=lambda one, other: one + other)
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _find_best_cuts(
    cost: Callable[[int, int, int], float], blocks: int, stages: int, *, combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Return the minimal combined cost of `stages` consecutive ranges, and their limits, from 0 to `blocks`."""
    best = {stop: (cost(0, 0, stop), [0, stop]) for stop in range(1, blocks - stages + 2)}
    for stage in range(1, stages):
        best = {
            stop: min(
                (
                    (combine(value, cost(stage, start, stop)), [*cuts, stop])
                    for start, (value, cuts) in best.items()
                    if start < stop
                ),
                # Costs that are equal up to rounding are ties, which the earlier cuts win.
                key=lambda option: (float(f"{option[0]:.9g}"), option[1]),
            )
            for stop in range(stage + 1, blocks - stages + stage + 2)
        }
    return best[blocks]


def split_by_names(
    parts: Sequence[Sequence[str]],
    *,
    blocks: Sequence[str],
    modules: Collection[str],
    holders: Collection[str],
    runs_in: Callable[[str, range], bool] = lambda module, stage: True,
) -> list[range]:
    """Return the range of blocks of each stage, from the module names of each stage in `parts`.

    A name includes all submodules. Modules without parameters may be named on several stages, or not at all. `holders`
    are modules with direct parameters. `runs_in` returns whether a stage with these blocks uses a module outside the
    blocks.
    """
    for stage, names in enumerate(parts):
        for name in names:
            if name not in modules:
                raise _config_error(f"stage {stage} names {name!r}, which is not a module of the model. Correct it")
            around = [block for block in blocks if _is_inside(name, block) and name != block]
            if around:
                raise _config_error(
                    f"stage {stage} names {name!r}, a part of the block {around[0]!r}. Name the full block"
                )
    # A module that contains blocks belongs to no stage: its direct parameters go where they are used.
    needed = [name for name in holders if not any(_is_inside(block, name) and block != name for block in blocks)]
    stage_of = _assign_stages(parts, [*blocks, *needed])
    order = [stage_of[block] for block in blocks]
    for (before, after), name in zip(pairwise(order), blocks[1:], strict=True):
        if after < before:
            raise _config_error(
                f"{name!r} is on stage {after}, but blocks before it are on stage {before}. Keep their order"
            )
    ranges = [range(order.index(stage), order.index(stage) + order.count(stage)) for stage in sorted(set(order))]
    if len(ranges) < len(parts):
        empty = next(stage for stage in range(len(parts)) if stage not in order)
        raise _config_error(f"stage {empty} has no block. Give each stage one, or name fewer stages")
    for name in needed:
        if not any(_is_inside(name, block) for block in blocks) and not runs_in(name, ranges[stage_of[name]]):
            able = [stage for stage, held in enumerate(ranges) if runs_in(name, held)]
            raise _config_error(f"{name!r} is on stage {stage_of[name]}, but runs on {able}. Name it there")
    return ranges


def _assign_stages(parts: Sequence[Sequence[str]], modules: Sequence[str]) -> dict[str, int]:
    """Return the stage of each of these modules; each must be on exactly one."""
    stage_of: dict[str, int] = {}
    for name in dict.fromkeys(modules):
        found = [stage for stage, names in enumerate(parts) for each in names if _is_inside(name, each)]
        if not found:
            raise _config_error(f"{name!r} is on no stage. Add it to one")
        if len(found) > 1:
            raise _config_error(f"{name!r} is named {len(found)} times, on stages {found}. Name it once")
        stage_of[name] = found[0]
    return stage_of


def _config_error(text: str) -> ConfigError:
    return ConfigError(f"module_fqns_per_model_part: {text}.")


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


# -- for plans


@dataclass(frozen=True)
class PipelineCostModel:
    """Cost model of a model in stages, for plans; see `meshwright_plan.pipeline_extrapolation.StageCostModel`."""

    config: PipelineConfig
    blocks_per_stage: tuple[int, ...]
    """Number of blocks of each stage."""
    pp_size: int
    """Number of pipeline ranks."""

    def config_with_blocks(self, blocks: Sequence[int]) -> PipelineConfig:
        values = {name: getattr(self.config, name) for name in PipelineConfig.model_fields}
        values |= {"layers_per_stage": None, "round_virtual_stages_to_pp_multiple": None}
        return BlockCountConfig(**values, blocks_per_stage=tuple(blocks))

    def find_steady_state(self, ranks: int, rows: int) -> tuple[int, int] | None:
        """Return (least, step), in micro-batches of `rows` sequences; None if unknown.

        From `least` micro-batches on, each further `step` of them add the same actions."""
        pieces, rest = divmod(rows, self.config.pp_microbatch_size)
        if rest or self.config.sequences_per_run is not None or self.config.pp_schedule_csv is not None:
            return None
        least, step = find_schedule_spec(str(self.config.pp_schedule)).steady_state(ranks)
        if step % pieces and step > 1:
            return None
        return -(-least // pieces), max(1, step // pieces)

    def placement(self, ranks: int, sequences: int) -> tuple[int, ...]:
        return self._build_schedule(ranks, sequences).placement

    def estimate_step_seconds(self, costs: Sequence[float], *, forward: float, ranks: int, sequences: int) -> float:
        """Return the time of a step [s], if communication takes no time.

        `costs` are the times of forward and backward of one sequence on each stage [s]; `forward` is the fraction of
        this time outside of backwards, deferred weight gradients included.
        """
        schedule = self._build_schedule(ranks, sequences)
        first = forward / 2 if schedule.splits_backward else forward
        kinds = {
            ActionKind.FORWARD: first,
            ActionKind.BACKWARD: 1 - first,
            ActionKind.BACKWARD_INPUT: 1 - forward,
            ActionKind.BACKWARD_WEIGHT: first,
        }
        size = self.config.pp_microbatch_size
        times = compute_timeline(schedule, kinds, stage_costs=[cost * size for cost in costs])
        return max(rank[-1][2] for rank in times if rank) * sequences / (schedule.num_microbatches * size)

    def _build_schedule(self, ranks: int, sequences: int) -> Schedule:
        microbatches = compute_num_microbatches(self.config, num_sequences=sequences)
        stages = len(self.blocks_per_stage) // self.pp_size * ranks
        return resolve_schedule(self.config, num_ranks=ranks, num_stages=stages, num_microbatches=microbatches)


def build_cost_model(
    model: nn.Module, layout: ModelLayout, config: PipelineConfig, pp_size: int
) -> PipelineCostModel | None:
    """Return the cost model of a model in stages; None if the user named the modules of stages or supplies stages."""
    if config.module_fqns_per_model_part is not None or not config.patch_inner_model:
        return None
    stages = compute_num_stages(config, num_layers=len(layout.blocks), pp_size=pp_size)
    split = split_model(model, layout, config, stages, blocks=layout.blocks)
    return PipelineCostModel(config, tuple(len(blocks) for blocks in split), pp_size)
