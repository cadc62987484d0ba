"""What a plan needs to know of stages to tell a deep pipeline from shallow ones; see `meshwright.plan.stages`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from meshwright.strategy.registry import model_layout

from ..config import CountedBlocks, PipelineConfig, number_of_microbatches, number_of_stages, schedule_of
from ..schedule.order import Kind, Schedule
from ..schedule.rules import schedule_rule
from ..schedule.timeline import timeline
from .split import split_model


@dataclass(frozen=True)
class InStages:
    """A model in stages.

    Attributes:
        blocks: of each stage.
        ranks: of the pipeline.
    """

    config: PipelineConfig
    blocks: tuple[int, ...]
    ranks: int

    def with_blocks(self, blocks: Sequence[int]) -> PipelineConfig:
        """Options under which stages have so many."""
        values = {name: getattr(self.config, name) for name in PipelineConfig.model_fields}
        values |= {"layers_per_stage": None, "round_virtual_stages_to_pp_multiple": None}
        return CountedBlocks(**values, blocks_per_stage=tuple(blocks))

    def steady(self, ranks: int, rows: int) -> tuple[int, int] | None:
        """From how many microbatches of a step on, and in steps of how many, more of them add the same; None: unknown.

        Args:
            ranks: of the pipeline.
            rows: sequences of a microbatch.
        """
        pieces, rest = divmod(rows, self.config.pp_microbatch_size)
        if rest or self.config.run_size is not None or self.config.pp_schedule_csv is not None:
            return None
        least, step = schedule_rule(str(self.config.pp_schedule)).steady(ranks)
        if step % pieces and step > 1:
            return None
        return -(-least // pieces), max(1, step // pieces)

    def placement(self, ranks: int, sequences: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return self._schedule(ranks, sequences).placement

    def seconds(self, costs: Sequence[float], *, forward: float, ranks: int, sequences: int) -> float:
        """How long a step takes, if messages take no time.

        Args:
            costs: of a sequence on each stage, there and back [s].
            forward: the share of it that does not come in a backward; gradients of weights that come behind it do.
            ranks: of the pipeline.
            sequences: of a step, on each data-parallel rank.
        """
        schedule = self._schedule(ranks, sequences)
        splits = any(action.kind is Kind.BACKWARD_INPUT for order in schedule.orders for action in order)
        first = forward / 2 if splits else forward
        kinds = {
            Kind.FORWARD: first,
            Kind.BACKWARD: 1 - first,
            Kind.BACKWARD_INPUT: 1 - forward,
            Kind.BACKWARD_WEIGHT: first,
        }
        size = self.config.pp_microbatch_size
        times = timeline(schedule, kinds, stage_costs=[cost * size for cost in costs])
        return max(rank[-1][2] for rank in times if rank) * sequences / (schedule.microbatches * size)

    def _schedule(self, ranks: int, sequences: int) -> Schedule:
        microbatches = number_of_microbatches(self.config, sequences=sequences)
        stages = len(self.blocks) // self.ranks * ranks
        return schedule_of(self.config, ranks=ranks, stages=stages, microbatches=microbatches)


def in_stages(model: nn.Module, config: PipelineConfig, ranks: int) -> InStages | None:
    """How a model is divided; None where the user has named the modules of stages, or gives them.

    Raises:
        ConfigError: it does not divide as the options say.
    """
    if config.module_fqns_per_model_part is not None or not config.patch_inner_model:
        return None
    layout = model_layout(model)
    stages = number_of_stages(config, layers=len(layout.blocks), ranks=ranks)
    split = split_model(model, layout, config, stages, blocks=layout.blocks)
    return InStages(config, tuple(len(blocks) for blocks in split), ranks)
