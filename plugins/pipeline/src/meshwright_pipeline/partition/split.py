"""Which blocks each stage holds, and how long a step of such stages takes, for plans. Names and numbers only.

Where a model can be cut at all is found by `study`; how many stages there are, in `config`.
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
"""Cost of an element of an embedding, where one of a matrix product costs 1: looking up is free, but the optimizer
updates each element, in a time that is short against that of a step's tokens and not nothing."""


def split_model(
    model: nn.Module,
    layout: ModelLayout,
    config: PipelineConfig,
    stages: int,
    *,
    blocks: Sequence[str],
    runs_in: Callable[[str, range], bool] = lambda module, stage: True,
) -> list[range]:
    """Divide a whole model, which may be on the meta device, as the options say; `blocks` are in the order in which
    they run.
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
    """What the first and the last stage bear besides their blocks, in elements that take part in a product."""
    return {
        "first": EMBEDDING_COST * count_parameters(model, layout.embedding),
        "last": count_parameters(model, layout.head),
    }


def split_blocks(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Divide consecutive blocks among stages so that the most expensive stage is as cheap as it can be.

    Among such divisions the one with the least sum of squares is taken, which is the most even; among those, the one
    that gives earlier stages fewer blocks, as they hold more microbatches at once. `first` and `last` are what the ends
    bear besides their blocks (embedding, head), in the unit of `costs`.
    """
    if not 1 <= stages <= len(costs):
        raise ConfigError(
            f"{len(costs)} blocks cannot be divided into {stages} stages, each of which needs one. "
            f"Use between 1 and {len(costs)} stages."
        )
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        at_ends = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        return sums[stop] - sums[start] + at_ends

    largest, _ = _find_best_cuts(cost, len(costs), stages, combine=max)
    # Differences of sums have been rounded.
    limit = largest * (1 + 1e-9)

    def square(stage: int, start: int, stop: int) -> float:
        value = cost(stage, start, stop)
        return value**2 if value <= limit else math.inf

    _, cuts = _find_best_cuts(square, len(costs), stages, combine=lambda one, other: one + other)
    return [range(start, stop) for start, stop in pairwise(cuts)]


def _find_best_cuts(
    cost: Callable[[int, int, int], float], blocks: int, stages: int, *, combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least combined cost of `stages` consecutive ranges, and their ends, from 0 to `blocks`."""
    best = {stop: (cost(0, 0, stop), [0, stop]) for stop in range(1, blocks - stages + 2)}
    for stage in range(1, stages):
        best = {
            stop: min(
                (
                    (combine(value, cost(stage, start, stop)), [*cuts, stop])
                    for start, (value, cuts) in best.items()
                    if start < stop
                ),
                # Equal except for rounding; then the earlier cuts.
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
    """The indices of each stage's blocks, where the user has named the modules of each in `parts`.

    A name stands for its module and all inside it. Modules without parameters may be named on several stages, or not at
    all. `holders` are modules with parameters of their own; `runs_on_stage` says whether a stage with these blocks uses
    a module that is in no block.
    """
    for stage, names in enumerate(parts):
        for name in names:
            if name not in modules:
                raise _config_error(f"stage {stage} names {name!r}, which is no module of the model")
            around = [block for block in blocks if _is_inside(name, block) and name != block]
            if around:
                raise _config_error(
                    f"stage {stage} names {name!r}, a part of the block {around[0]!r}. Name the whole block"
                )
    # A module that contains the blocks belongs to no stage: its own parameters go where they are used.
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
        raise _config_error(f"stage {empty} holds no block. Give each stage one, or name fewer stages")
    for name in needed:
        if not any(_is_inside(name, block) for block in blocks) and not runs_in(name, ranges[stage_of[name]]):
            able = [stage for stage, held in enumerate(ranges) if runs_in(name, held)]
            raise _config_error(f"{name!r} is on stage {stage_of[name]}, but runs on {able}. Name it there")
    return ranges


def _assign_stages(parts: Sequence[Sequence[str]], modules: Sequence[str]) -> dict[str, int]:
    """The stage of each of these modules, which are all to be on one."""
    stage_of: dict[str, int] = {}
    for name in dict.fromkeys(modules):
        found = [stage for stage, names in enumerate(parts) for each in names if _is_inside(name, each)]
        if not found:
            raise _config_error(f"{name!r} is on no stage. Add it to the stage that is to hold it")
        if len(found) > 1:
            raise _config_error(f"{name!r} is named {len(found)} times, on stages {found}. Leave one of them")
        stage_of[name] = found[0]
    return stage_of


def _config_error(text: str) -> ConfigError:
    return ConfigError(f"module_fqns_per_model_part: {text}.")


def _is_inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


# -- for plans


@dataclass(frozen=True)
class PipelineCostModel:
    """What a plan needs to know of a model in stages; see `meshwright_plan.pipeline_extrapolation`."""

    config: PipelineConfig
    blocks_per_stage: tuple[int, ...]
    """Of each stage."""
    pp_size: int
    """Of the pipeline."""

    def config_with_blocks(self, blocks: Sequence[int]) -> PipelineConfig:
        values = {name: getattr(self.config, name) for name in PipelineConfig.model_fields}
        values |= {"layers_per_stage": None, "round_virtual_stages_to_pp_multiple": None}
        return BlockCountConfig(**values, blocks_per_stage=tuple(blocks))

    def find_steady_state(self, ranks: int, rows: int) -> tuple[int, int] | None:
        """From how many microbatches of `rows` sequences on, and in steps of how many, more of them add the same; None:
        unknown."""
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
        """How long a step takes [s], if messages take no time, with the costs of a sequence on each stage, there and
        back [s].

        `forward` is the share that does not come in a backward; gradients of weights that come behind it do.
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
    """How a model is divided; None where the user has named the modules of stages, or gives them."""
    if config.module_fqns_per_model_part is not None or not config.patch_inner_model:
        return None
    stages = compute_num_stages(config, num_layers=len(layout.blocks), pp_size=pp_size)
    split = split_model(model, layout, config, stages, blocks=layout.blocks)
    return PipelineCostModel(config, tuple(len(blocks) for blocks in split), pp_size)
