"""This rank's actions, for as many microbatches as a step brings.

What an action does is said in `actions`, and how a schedule orders them in `meshwright_pipeline.schedule`.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import PipelineConfig, number_of_microbatches, schedule_of
from ..schedule.order import Action, Exchange, Kind, Schedule
from ..schedule.timeline import with_communication


class Orders:
    """The schedule that the options ask for, seen from one rank; each number of microbatches is worked out once.

    Args:
        config: options of the pipeline.
        stages: of the whole model.
        ranks: size of the axis `pp`.
        rank: this one, along `pp`.

    Attributes:
        placement: the rank along `pp` of each stage.
        here: numbers of this rank's stages, ascending.
        splits: whether backwards come in two parts, the gradients of weights last.

    Raises:
        ConfigError: the schedule does not take these numbers, or its file cannot be used.
    """

    def __init__(self, config: PipelineConfig, *, stages: int, ranks: int, rank: int) -> None:
        self._config, self._stages, self._ranks, self._rank = config, stages, ranks, rank
        self._known: dict[tuple[int, bool], tuple[Action | Exchange, ...]] = {}
        # What does not depend on the number of microbatches, with some number that the schedule takes.
        sequences = config.run_size or config.pp_microbatch_size
        schedule = self.schedule(number_of_microbatches(config, sequences=sequences))
        self.placement = schedule.placement
        self.here = schedule.stages_of(rank)
        self.splits = any(action.kind is Kind.BACKWARD_INPUT for order in schedule.orders for action in order)

    def run_length(self, microbatches: int) -> int:
        """Microbatches of one run of the schedule, where a step has so many of `pp_microbatch_size` sequences.

        Raises:
            ConfigError: they do not divide into runs.
        """
        return number_of_microbatches(self._config, sequences=microbatches * self._config.pp_microbatch_size)

    def actions(self, microbatches: int, *, train: bool) -> tuple[Action | Exchange, ...]:
        """What this rank does in one run, with its exchanges, in order.

        Args:
            microbatches: of the run.
            train: False: forwards alone.
        """
        if (microbatches, train) not in self._known:
            schedule = self.schedule(microbatches)
            if not train:
                forwards = tuple(tuple(a for a in order if a.kind is Kind.FORWARD) for order in schedule.orders)
                schedule = replace(schedule, orders=forwards)
            self._known[microbatches, train] = with_communication(schedule)[self._rank]
        return self._known[microbatches, train]

    def schedule(self, microbatches: int) -> Schedule:
        """Of all ranks, for one run."""
        return schedule_of(self._config, ranks=self._ranks, stages=self._stages, microbatches=microbatches)
