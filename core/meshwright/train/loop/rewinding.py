"""Going back to a checkpoint that the same processes have saved."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ...base.errors import TrainingError
from ...checkpoint import first_whole, load_checkpoint
from ...checkpoint.manifest import exists
from ...strategy.contract import StrategyManager
from .bad_steps import Bad
from .extension import LoopExtension
from .options import Loop


class Saves(LoopExtension):
    """Keeps, for each checkpoint, what is not in it: learning rates, the schedule, and what the loop remembers.

    Settings of the optimizer that a run has changed since stay as they are.
    """

    def __init__(self, manager: StrategyManager, loop: Loop) -> None:
        self._manager, self._loop = manager, loop
        self._known: dict[int, tuple[list[Any], dict[str, Any] | None, Mapping[str, Any]]] = {}

    def begin(self, state: Mapping[str, Any]) -> None:
        self.before_save(self._loop.start, state)

    def before_save(self, step: int, state: Mapping[str, Any]) -> None:
        scheduler = self._loop.scheduler
        rates = [copy.deepcopy(group["lr"]) for group in self._manager.optimizer.param_groups]
        saved = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self._known[step] = rates, saved, copy.deepcopy(dict(state))

    def go_back(self, bad: Bad) -> tuple[int, Mapping[str, Any]]:
        """Load the newest valid checkpoint before a step. Collective.

        Returns:
            The number of its last step, and the loop's state then.

        Raises:
            TrainingError: there is none.
        """
        checkpointer, world = self._loop.checkpointer, self._manager.mesh.world
        if checkpointer is None:
            raise TrainingError("on_bad_step=rewind needs a checkpointer.")
        checkpointer.wait()
        steps = sorted((step for step in self._known if step < bad.step), reverse=True)
        there = world.from_first(lambda: [step for step in steps if exists(checkpointer.place(step))])
        found, _ = first_whole([checkpointer.place(step) for step in there], world)
        if found is None:
            raise TrainingError(
                f"step {bad.step}: {bad.reason}, and there is no checkpoint to go back to: on_bad_step=rewind goes "
                f"back to what this sitting has saved or begun with. No parameter was changed by this step. Lower "
                f"checkpoint.every, or set on_bad_step=skip."
            )
        load_checkpoint(self._manager, found, keep_settings=True)
        to = next(step for step in there if checkpointer.place(step) == found)
        rates, schedule, state = self._known[to]
        if self._loop.scheduler is not None:
            self._loop.scheduler.load_state_dict(copy.deepcopy(schedule))
        for group, rate in zip(self._manager.optimizer.param_groups, rates, strict=True):
            group["lr"] = copy.deepcopy(rate)
        return to, copy.deepcopy(dict(state))
