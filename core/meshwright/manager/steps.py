"""The steps and evaluations of a manager: how they run and end, their objectives, and what they may train.

[Note: frozen later] Strategies lay out units and hooks for the parameters that train when `parallelize` is called. A
parameter that is frozen later still gets a gradient, since within a step all have the flags of `parallelize`; it is
dropped before the norm is taken and the optimizer steps. One that was frozen in `parallelize` cannot be trained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.errors import ConfigError, StrategyError
from ..base.types import Batch, Objective, TokenStatistic
from ..mesh.mesh import Mesh
from ..step.agreement import Terms, agree, announce, frozen_share
from ..step.axis import Axis
from ..step.objective import OF_MODEL, Given, Tally, without_columns
from ..step.tokens import Recorder
from .forward import Forward
from .gradients import Ending, Findings
from .start import check_nothing_pending

if TYPE_CHECKING:
    from ..model.budget import BudgetedBlocks
    from ..model.offload import OffloadedBlocks


class TrainableParameters:
    """The parameters of one model that may train, by name; see [Note: frozen later]."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self._model.named_parameters() if name in self._names)

    def frozen(self) -> set[str]:
        return {name for name, parameter in self.named() if not parameter.requires_grad}

    def check_unfrozen(self) -> None:
        """Refuse a parameter that requires a gradient now, but did not in `parallelize`; StrategyError on this rank."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and name not in self._names:
                raise StrategyError(
                    f"{name} requires a gradient, but was frozen when the model was parallelized, so no optimizer "
                    f"holds it. Call parallelize with all parameters unfrozen that are to train at some time, and "
                    f"freeze them afterwards."
                )

    @contextmanager
    def unfrozen(self) -> Iterator[None]:
        """Give all parameters the flags of `parallelize` within the context."""
        frozen = [parameter for _, parameter in self.named() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)


_KEPT = 8
"""Number of recent objectives that are not tried again."""


class Steps:
    """The steps of one manager; `trainable` yields what it trains on this rank."""

    def __init__(self, mesh: Mesh, trainable: Callable[[], Iterable[nn.Parameter]]) -> None:
        self._mesh, self._trainable, self._ending = mesh, trainable, Ending()
        self._known: list[tuple[Given, tuple[str, ...]]] = []
        self.last_sums: Mapping[str, Tensor] = {}

    # -- objectives

    def given(self, objective: Objective | None, taken: frozenset[str]) -> Given | None:
        if objective is None:
            return None
        new = Given(objective, taken | OF_MODEL)
        return next((known for known, _ in self._known if known == new), new)

    def noting(self, recorder: Recorder, taken: frozenset[str]) -> Given | None:
        """Return the `Given` of a recorder, which asks for the statistics it records and no others."""
        if (given := self.given(recorder, taken)) is not None:
            given.expect(recorder.names)
        return given

    def tally(self, given: Given | None, find: Callable[[Given], tuple[str, ...]] | None) -> Tally | None:
        """Return the tally of an objective for one step; try the objective first if it is new. Collective then."""
        if given is None:
            return None
        names = next((names for known, names in self._known if known is given), None)
        if names is None:
            names = self._agreed_names(given, find)
            self._known = [*self._known[1 - _KEPT :], (given, names)]
        return Tally(given, names, self._mesh.device)

    def _agreed_names(self, given: Given, find: Callable[[Given], tuple[str, ...]] | None) -> tuple[str, ...]:
        world = self._mesh.world
        found = world.together(lambda: find(given) if find is not None else None)
        told: list[tuple[str, ...] | None] = [None] * world.size
        dist.all_gather_object(told, found, group=world.group)
        names = {each for each in told if each is not None}
        if len(names) != 1:
            raise ConfigError(f"the {given.name} returns other sums on different ranks: {sorted(names)}.")
        return names.pop()

    # -- the end of a step

    def trained(self, parts: Sequence[Findings], shared: Findings | None, tally: Tally | None) -> Ending:
        """Return the end of a step, to be added up, with the findings of its parts; see `Ending`."""
        self._ending = Ending([*parts, *self._found(tally)], shared)
        return self._ending

    def evaluated(self, tally: Tally | None) -> Ending:
        return Ending([replace(each, void=None) for each in self._found(tally)])

    def loss(self, total: Tensor, tally: Tally | None, ending: Ending) -> Tensor:
        """Return the loss, scalar, and keep the further sums; `total` is added up over all ranks."""
        self.last_sums = {} if tally is None else dict(zip(tally.names, total[1:].unbind(), strict=True))
        if ending is not self._ending:
            ending.settle(self._mesh.world)
        return total[0]

    def read(self, *values: Tensor) -> list[float]:
        return self._ending.settle(self._mesh.world, values)

    def settle(self) -> None:
        """Settle the last step before anything is made of it."""
        self._ending.settle(self._mesh.world)

    def _found(self, tally: Tally | None) -> list[Findings]:
        if tally is None:
            return []
        is_wrong = tally.is_wrong | (tally.defect is not None)
        values = is_wrong.double()[None]
        return [
            Findings(is_wrong=is_wrong, values=values, error=lambda told: tally.error(bool(told[0])), void=self._drop)
        ]

    def _drop(self) -> None:
        for parameter in self._trainable():
            parameter.grad = None


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
        from ..model.budget import ONE_STAGE, choose, without_choice

        largest, world = max(microbatches, key=lambda batch: batch["input_ids"].numel()), self._mesh.world
        for blocks in without_choice([self._manager.activations]):
            choose([blocks], [lambda: self._manager.forward.rehearse(largest)], [world], ONE_STAGE, world)
