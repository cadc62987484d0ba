"""The steps and evaluations of a manager whose ranks each run the whole model on their own microbatches."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from ..base.types import Batch, Objective, TokenStatistic
from ..mesh.mesh import Mesh
from ..step.agreement import agree, announce, frozen_share
from ..step.axis import Axis
from ..step.batch import Terms
from ..step.objective import Given, Tally, without_columns
from ..step.tokens import Recorder
from .ending import Ending, Findings
from .forward import Forward
from .freezing import TrainableParameters
from .start import check_nothing_pending
from .steps import Steps

if TYPE_CHECKING:
    from ..model.budget import BudgetedBlocks
    from ..model.offload import OffloadedBlocks


class Runnable(Protocol):
    """What a `StepRunner` uses of a manager; see `DataParallelManager`."""

    mesh: Mesh
    module: nn.Module
    forward: Forward
    axes: list[Axis]
    may_train: TrainableParameters
    activations: BudgetedBlocks | OffloadedBlocks | None

    def trainable(self) -> Iterator[nn.Parameter]: ...
    def in_step(self, microbatches: Sequence[Batch], longest: int) -> AbstractContextManager[None]: ...
    def check_step(self, microbatches: Sequence[Batch]) -> None: ...
    def sync_gradients(self, *, is_last: bool) -> AbstractContextManager[None]: ...
    def after_backward(self, *, is_last: bool) -> None: ...
    def finish_gradients(self) -> Findings: ...
    def drop_frozen(self) -> None: ...


class StepRunner:
    """Runs the steps of one manager; the methods are those of `StrategyManager`."""

    def __init__(self, manager: Runnable) -> None:
        self._manager, self._mesh = manager, manager.mesh
        self.steps, self._recorder = Steps(manager.mesh, manager.trainable), Recorder()

    def forward_backward(
        self, microbatches: Sequence[Batch], num_tokens: Tensor, objective: Objective | None
    ) -> Tensor:
        manager = self._manager
        self.steps.settle()
        given = self._given(objective)
        agreed = agree(microbatches, num_tokens, self._mesh, self._terms(given))
        check_nothing_pending(manager.trainable())
        if not manager.module.training:
            manager.module.train()
        inputs, count, losses = without_columns(given, agreed.microbatches), len(agreed.microbatches), []
        with manager.in_step(inputs, agreed.longest):
            tally = self._tally(given, agreed.microbatches)
            self._choose_activations(inputs)
            for number, batch in enumerate(agreed.microbatches, start=1):
                with manager.sync_gradients(is_last=number == count):
                    loss = manager.forward.loss(batch, agreed.num_tokens, count, tally)
                    loss.backward()
                manager.after_backward(is_last=number == count)
                losses.append(loss.detach())
        findings = manager.finish_gradients()
        manager.drop_frozen()
        return self._summed(losses, tally, self.steps.trained([findings], None, tally))

    def eval_loss(self, microbatches: Sequence[Batch], num_tokens: Tensor, objective: Objective | None) -> Tensor:
        losses, tally = self._evaluated(microbatches, num_tokens, self._given(objective))
        return self._summed(losses, tally, self.steps.evaluated(tally))

    def token_stats(self, microbatches: Sequence[Batch], names: Sequence[TokenStatistic]) -> list[dict[str, Tensor]]:
        self._recorder.begin(names)
        self._evaluated(microbatches, None, self.steps.noting(self._recorder, self._manager.forward.taken))
        return self._recorder.found

    def announce(self, microbatches: Sequence[Batch], objective: Objective | None) -> Tensor:
        return announce(microbatches, self._mesh, self._terms(self._given(objective)))

    def _evaluated(
        self, microbatches: Sequence[Batch], num_tokens: Tensor | None, given: Given | None
    ) -> tuple[list[Tensor], Tally | None]:
        forward = self._manager.forward
        agreed = agree(microbatches, num_tokens, self._mesh, self._terms(given))
        inputs = without_columns(given, agreed.microbatches)
        with forward.evaluating(), self._manager.in_step(inputs, agreed.longest), torch.no_grad():
            tally = self._tally(given, agreed.microbatches)
            count = len(agreed.microbatches)
            return [forward.loss(batch, agreed.num_tokens, count, tally) for batch in agreed.microbatches], tally

    def _summed(self, losses: Sequence[Tensor], tally: Tally | None, ending: Ending) -> Tensor:
        """Add up the losses of all microbatches and ranks. Scalar, equal on all ranks. Collective."""
        mesh, manager = self._mesh, self._manager
        alike = mesh.group("tp") if mesh.degrees.tp > 1 else None
        further = None if tally is None else tally.sums / manager.forward.sharers
        total = ending.add_up(losses, losses[0].device, further=further, over=mesh.group("dp_cp"), alike=alike)
        for axis in manager.axes:
            axis.add_losses(total)
        return self.steps.loss(total, tally, ending).to(losses[0].dtype)

    def _given(self, objective: Objective | None) -> Given | None:
        return self.steps.given(objective, self._manager.forward.taken)

    def _tally(self, given: Given | None, microbatches: Sequence[Batch]) -> Tally | None:
        """Try out the model and a new objective before the first forward."""
        forward = self._manager.forward
        forward.try_out(without_columns(given, microbatches), takes_loss=given is None or given.on == "tokens")
        return self.steps.tally(given, functools.partial(forward.try_objective, microbatches[0]))

    def _terms(self, given: Given | None) -> Terms:
        manager = self._manager
        frozen = frozen_share(self._mesh, ((name, 0, 1) for name in manager.may_train.frozen()))
        return manager.forward.terms(manager.check_step, given, frozen)

    def _choose_activations(self, microbatches: Sequence[Batch]) -> None:
        """Choose, under a memory budget, which activations blocks keep. Collective, once."""
        if self._manager.activations is None:
            return
        from ..model.budget import choose, without_choice
        from ..model.knapsack import ONE_STAGE

        largest, world = max(microbatches, key=lambda batch: batch["input_ids"].numel()), self._mesh.world
        for blocks in without_choice([self._manager.activations]):
            choose([blocks], [lambda: self._manager.forward.rehearse(largest)], [world], ONE_STAGE, world)
