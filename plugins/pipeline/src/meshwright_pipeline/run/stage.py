"""A stage that trains: a part of a model under a manager of the inner strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.manager.data_parallel import DataParallelManager
from meshwright.model.weight_gradients import WeightGradients
from meshwright.model.weights import Weights
from meshwright.step.token_loss import split_targets
from meshwright.strategy.contract import Batch

from ..cut.boundary import Boundary, Crossing, size_of
from ..cut.given_stages import with_hidden
from ..cut.stage_model import Cut, enter_stage
from .actions import Kinds, Tensors
from .routing import Idle, StageRouters
from .users_loss import LossFn


class PipelineStage:
    """One stage on this rank; see `actions.Stage`.

    Args:
        manager: of the inner strategy, with the stage's part of the model.
        boundary: of that model.
        is_first: whether it takes tokens, not hidden states.
        is_last: whether it computes the loss.
        dtype: of what crosses boundaries, where it is of floating point; None: its own.
        loss: on the last stage, in the place of the token loss; see [Note: loss_fn].
        splits: whether the schedule splits backwards in two.
        routers: those of the model, where a router loss is added; see [Note: sums that cross] in `routing`.

    Attributes:
        num_tokens: of the step.
        microbatches: of the step, without idle ones.
    """

    def __init__(
        self,
        manager: DataParallelManager,
        boundary: Boundary,
        *,
        is_first: bool,
        is_last: bool,
        dtype: torch.dtype | None,
        loss: LossFn | None,
        splits: bool,
        routers: StageRouters | None = None,
    ) -> None:
        self.manager = manager
        self.is_first, self.is_last = is_first, is_last
        self.num_tokens = torch.ones(())
        self.microbatches = 1
        self._routers = routers
        self._boundary, self._dtype, self._loss = boundary, dtype, loss
        self._store, self._splits = WeightGradients(), splits

    def parallelize(self, cut: Cut, blocks: range, weights: Weights | None) -> None:
        """Shard the stage's part of the model, of which it has these blocks."""
        model = self.manager.model
        for block in blocks if self._splits else ():
            self._store.watch(model.get_submodule(cut.blocks[block]))
        self.manager.parallelize(model, weights)
        if not self.is_first:
            enter_stage(model, cut, blocks, self._boundary)
        if self._routers is not None:
            self._routers.watch(model)

    def forward(self, batch: Batch, received: Tensors) -> Tensors:
        routers = self._routers
        if routers is None:
            return self._forward(batch, received)
        shape, dtype = routers.kind
        before = torch.zeros(shape, dtype=dtype, device=self.manager.mesh.device) if self.is_first else received[-1]
        with routers.noting() as logits:
            output = self._forward(batch, received[:-1])
        mask = torch.zeros_like(batch["input_ids"]) if isinstance(batch, Idle) else self.manager.forward.own_mask(batch)
        sums = routers.added(before, logits, mask)
        if not self.is_last:
            return (*output, sums)
        group = self.manager.mesh.group("dp_cp")
        return (output[0] + routers.loss.share(sums, group=group, microbatches=self.microbatches),)

    def _forward(self, batch: Batch, received: Tensors) -> Tensors:
        self._boundary.start(batch, received)
        try:
            given = self._given(batch, received)
            if self.is_last and self._loss is None:
                return (self.manager.forward.share_of_loss(given, self.num_tokens),)
            inputs, targets_BS = split_targets(given)
            outputs = self.manager.forward.outputs(inputs)
            if self._loss is not None and self.is_last:
                return (self._loss(outputs.logits, targets_BS) / self.num_tokens,)
            return outputs if isinstance(outputs, tuple) else (outputs,)
        finally:
            self._boundary.end()

    def _given(self, batch: Batch, received: Tensors) -> Batch:
        """What the module is called with, and the labels."""
        return batch

    def try_out(self, batch: Batch, *, training: bool) -> None:
        """See `Forward.try_out`."""
        with self._receiving():
            self.manager.forward.try_out([batch], training=training)

    @contextmanager
    def _receiving(self) -> Iterator[None]:
        """Forwards of the module begin the boundary, with random hidden states, which are as good as any."""

        def receive(module: nn.Module, args: Any, kwargs: Any) -> None:
            ids = kwargs["input_ids"]
            kinds = self._kinds(self._boundary.entering, kwargs)
            # Indices among them must be valid.
            self._boundary.start(
                kwargs,
                [
                    torch.zeros(shape, dtype=dtype, device=ids.device)
                    if not dtype.is_floating_point
                    else torch.randn(shape, dtype=dtype, device=ids.device)
                    for shape, dtype in kinds
                ],
            )

        hook = self.manager.module.register_forward_pre_hook(receive, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            self._boundary.end()

    def backward(self, work: Callable[[], object], *, is_last: bool) -> None:
        with self.manager.sync_gradients(is_last=is_last):
            work()
        self.manager.after_backward(is_last=is_last)

    def backward_input(self, work: Callable[[], object]) -> Callable[[], None]:
        with self.manager.sync_gradients(is_last=False), self._store.collecting() as rest:
            work()

        def finish() -> None:
            for each in rest:
                each()

        return finish

    def backward_weight(self, rest: Callable[[], object], *, is_last: bool) -> None:
        with self.manager.sync_gradients(is_last=False):
            rest()
        if is_last:
            self.manager.reduce_gradients()
        self.manager.after_backward(is_last=is_last)

    def entering(self, batch: Batch) -> Kinds:
        return [*self._kinds(self._boundary.entering, batch), *self._sums]

    def leaving(self, batch: Batch) -> Kinds:
        return [*self._kinds(self._boundary.leaving, batch), *self._sums]

    @property
    def _sums(self) -> Kinds:
        return [self._routers.kind] if self._routers is not None else []

    def _kinds(self, crossings: Sequence[Crossing], batch: Batch) -> Kinds:
        return [
            (each.shape(*size_of(batch)), self._dtype if self._dtype and each.dtype.is_floating_point else each.dtype)
            for each in crossings
        ]


class GivenStage(PipelineStage):
    """A stage that the user has made; see [Note: given stages] in `given_stages`."""

    def parallelize_as_given(self, weights: Weights | None) -> None:
        """Shard the module."""
        if self._splits:
            self._store.watch(self.manager.model)
        self.manager.parallelize(self.manager.model, weights)

    def _given(self, batch: Batch, received: Tensors) -> Batch:
        return batch if self.is_first else with_hidden(batch, received[0])
