"""A stage that trains: a part of a model under a manager of the inner strategy.

What is done when is said in `orders` and `actions`; how a model is taken apart, in `meshwright_pipeline.cut`.

[Note: what is received] Who replaces forwards, and in which order, is said in `meshwright.model.forward_order`. After
all of them the first block gets a hook before all others, by which it takes what was received: sharding sees that as
the block's own input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.base.types import Batch
from meshwright.manager.data_parallel import DataParallelManager
from meshwright.model.weight_gradients import WeightGradients
from meshwright.model.weights import Weights
from meshwright.step.objective import Given, Tally
from meshwright.step.token_loss import split_targets
from meshwright.step.tokens import Outputs, Tokens

from ..cut.boundary import Boundary, Crossing, size_of
from ..cut.cut import Cut
from ..cut.given_stages import with_hidden
from ..cut.stage_model import enter_stage
from .actions import Kinds, Tensors
from .batches import Idle
from .routing import StageRouters


@dataclass(frozen=True)
class StageOptions:
    """How a stage runs.

    Attributes:
        is_first: whether it takes tokens, not hidden states.
        is_last: whether it computes the loss.
        dtype: of what crosses boundaries, where it is of floating point; None: its own.
        splits: whether the schedule splits backwards in two.
        routers: those of the model, where a router loss is added; see [Note: sums that cross] in `routing`.
    """

    is_first: bool
    is_last: bool
    dtype: torch.dtype | None
    splits: bool
    routers: StageRouters | None = None


class PipelineStage:
    """One stage on this rank; see `actions.Stage`.

    Args:
        manager: of the inner strategy, without a model yet.
        boundary: of the stage's part of the model.
        options: how it runs.
    """

    def __init__(self, manager: DataParallelManager, boundary: Boundary, options: StageOptions) -> None:
        self.manager = manager
        self.is_first, self.is_last = options.is_first, options.is_last
        self._num_tokens = torch.ones(())
        self._microbatches = 1
        self._tally: Tally | None = None
        self._uncounted: Tally | None = None
        self._boundary, self._options = boundary, options
        self._store = WeightGradients()

    @property
    def reduces_later(self) -> bool:
        """See `actions.Stage`; known after `parallelize`."""
        return self.manager.reduces_later

    def parallelize(self, model: nn.Module, cut: Cut, blocks: range, weights: Weights | None) -> None:
        """Shard the stage's part of the model, of which it has these blocks; see [Note: what is received].

        Args:
            model: what `take_stage` has left for this stage.
            cut: of the whole model.
            blocks: indices of the stage's blocks.
            weights: of the whole model; None: the model has its own.
        """
        for block in blocks if self._options.splits else ():
            self._store.watch(model.get_submodule(cut.blocks[block]))
        self.manager.parallelize_stage(model, weights)
        if not self.is_first:
            enter_stage(model, cut, blocks, self._boundary)
        if self._options.routers is not None:
            self._options.routers.watch(model)

    def begin_step(self, num_tokens: Tensor, *, microbatches: int) -> None:
        """Take what the losses of a step are divided by.

        Args:
            num_tokens: unmasked targets of the global batch, int64 scalar.
            microbatches: of the pipeline, in the step, without idle ones.
        """
        self._num_tokens, self._microbatches = num_tokens, microbatches

    def minimize(self, tally: Tally | None) -> None:
        """Take an objective in the place of the token loss."""
        self._tally = tally
        self._uncounted = None if tally is None else _Uncounted(tally.given, (), self.manager.mesh.device)

    def forward(self, batch: Batch, received: Tensors) -> Tensors:
        """See `actions.Stage`; where there is a router loss, its sums are the last of what crosses."""
        routers = self._options.routers
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
        return (output[0] + routers.loss.share(sums, group=group, microbatches=self._microbatches),)

    def _forward(self, batch: Batch, received: Tensors) -> Tensors:
        self._boundary.start(batch, received)
        try:
            given = self._given(batch, received)
            if self.is_last:
                tally = self._uncounted if isinstance(batch, Idle) else self._tally
                return (self.manager.forward.share_of_loss(given, self._num_tokens, tally=tally),)
            outputs = self.manager.forward.outputs(split_targets(given)[0])
            return outputs if isinstance(outputs, tuple) else (outputs,)
        finally:
            self._boundary.end()

    def _given(self, batch: Batch, received: Tensors) -> Batch:
        """What the module is called with, and the labels."""
        return batch

    def try_out(self, batch: Batch, *, takes_loss: bool) -> None:
        """See `Forward.try_out`."""
        with self._receiving():
            self.manager.forward.try_out([batch], takes_loss=self.is_last and takes_loss)

    def try_objective(self, batch: Batch, given: Given) -> tuple[str, ...]:
        """See `Forward.try_objective`; of the last stage."""
        with self._receiving():
            return self.manager.forward.try_objective(batch, given)

    def rehearse(self, batch: Batch) -> None:
        """See `Forward.rehearse`."""
        with self._receiving():
            self.manager.forward.rehearse(batch)

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
        """See `actions.Stage`."""
        with self.manager.sync_gradients(is_last=is_last):
            work()
        self.manager.after_backward(is_last=is_last)

    def backward_input(self, work: Callable[[], object]) -> Callable[[], None]:
        """See `actions.Stage`; what is left are the weights of linear layers in blocks."""
        with self.manager.without_weights(), self._store.collecting() as rest:
            work()
        self.manager.after_backward(is_last=False)

        def finish() -> None:
            for each in rest:
                each()

        return finish

    def backward_weight(self, rest: Callable[[], object], *, is_last: bool) -> None:
        """See `actions.Stage`."""
        with self.manager.sync_gradients(is_last=False):
            rest()
        if is_last:
            self.manager.after_backward(is_last=False)
            self.reduce()
        else:
            self.manager.after_weights()

    def reduce(self) -> None:
        """See `actions.Stage`; over the stage's ranks."""
        self.manager.reduce_gradients()

    def entering(self, batch: Batch) -> Kinds:
        """See `actions.Stage`; floating point in the dtype that is set for crossings."""
        return [*self._kinds(self._boundary.entering, batch), *self._sums]

    def leaving(self, batch: Batch) -> Kinds:
        """As `entering`, of the boundary behind the stage."""
        return [*self._kinds(self._boundary.leaving, batch), *self._sums]

    @property
    def _sums(self) -> Kinds:
        routers = self._options.routers
        return [routers.kind] if routers is not None else []

    def _kinds(self, crossings: Sequence[Crossing], batch: Batch) -> Kinds:
        dtype = self._options.dtype
        return [
            (each.shape(*size_of(batch)), dtype if dtype and each.dtype.is_floating_point else each.dtype)
            for each in crossings
        ]


class _Uncounted(Tally):
    """An objective where what fills up a step is seen, which counts for nothing."""

    def __call__(self, seen: Tokens | Outputs, columns: Mapping[str, Tensor]) -> Tensor:
        return seen.nothing()


class GivenStage(PipelineStage):
    """A stage that the user has made; see [Note: given stages] in `given_stages`."""

    def parallelize_as_given(self, model: nn.Module, weights: Weights | None) -> None:
        """Shard the module; see `parallelize`."""
        if self._options.splits:
            self._store.watch(model)
        self.manager.parallelize_stage(model, weights)

    def try_out(self, batch: Batch, *, takes_loss: bool) -> None:
        self.manager.forward.try_out([batch], takes_loss=self.is_last and takes_loss, complete=self._completed)

    def try_objective(self, batch: Batch, given: Given) -> tuple[str, ...]:
        return self.manager.forward.try_objective(batch, given, complete=self._completed)

    def rehearse(self, batch: Batch) -> None:
        self.manager.forward.rehearse(batch, self._completed)

    def _completed(self, divided: Batch) -> Batch:
        """With random hidden states, where the module takes them."""
        kinds, device = self._kinds(self._boundary.entering, divided), divided["input_ids"].device
        return self._given(divided, tuple(torch.randn(shape, dtype=dtype, device=device) for shape, dtype in kinds))

    def _given(self, batch: Batch, received: Tensors) -> Batch:
        return batch if self.is_first else with_hidden(batch, received[0])
