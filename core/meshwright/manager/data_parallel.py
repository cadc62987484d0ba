"""The part that all strategies share in which each rank runs the whole model on its own microbatches.

A strategy subclasses `DataParallelManager` and says in `shard` how the model is laid out, and in `sync_gradients` how
the reduction waits for the last microbatch. `single` shows the smallest one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from ..mesh.mesh import Mesh
from ..mesh.world import same_timeout
from ..model.budget import BudgetedBlocks, choose, without_choice
from ..model.knapsack import ONE_STAGE
from ..model.layout import ModelLayout
from ..model.offload import OffloadedBlocks
from ..model.weights import Weights, fill, materialize
from ..step.agreement import agree, announce
from ..step.batch import Terms
from ..step.forward_options import forward_options
from ..step.router_loss import RouterLoss
from ..step.row_head import RowHead
from ..strategy.ask import model_layout
from ..strategy.contract import Batch
from ..tensors.norms import check_clip
from .call_order import check_new, check_nothing_pending
from .ending import Ending, Findings
from .forward import Forward
from .gradients import Gradients
from .row_loss import RowLoss
from .start import asks_for_router_loss, check_reduce_dtype, check_trainable, equal_weights, share_random_state
from .stateful import StatefulManager


class DataParallelManager(StatefulManager):
    """Forward, backward and clipping for strategies with one model part on every rank; see also `StatefulManager`.

    Attributes:
        module: what `parallelize` returned, which is called; a wrapper around `model`, or `model` itself.
        layout: the model's structure as it was before sharding.
        forward: calls the module, and knows the axes; there after `parallelize`.
        gradients: of what is trained; there after `parallelize`.
    """

    module: nn.Module
    layout: ModelLayout
    forward: Forward
    gradients: Gradients
    shards_on_meta: ClassVar[bool] = False
    """Whether `shard` takes a model on the meta device, which gets memory and values afterwards; else it gets them
    before, and `shard` sees a whole model."""
    in_pipeline: bool = False
    """Whether the model is one stage of a pipeline; see `parallelize_stage`."""
    activations: BudgetedBlocks | OffloadedBlocks | None = None
    """What `checkpoint_blocks` has returned: blocks that hold what a budget allows, or in host memory."""
    runs_in_pipeline: ClassVar[bool] = False
    """Whether the strategy heeds `in_pipeline`."""

    def __init__(self, config: BaseModel, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._gradients_are_checked = False
        self._ending = Ending()

    # -- what a strategy says

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that the strategy cannot train, before anything is changed; also for all the stages of a
        pipeline, which then are not asked.

        Raises:
            ModelError: on all ranks alike.
        """

    @abstractmethod
    def shard(self, model: nn.Module) -> nn.Module:
        """Lay `model` out over the mesh, gradients reduced by SUM, and return the module to call."""

    def sync_gradients(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch; defers the reduction unless `is_last`."""
        return nullcontext()

    def after_backward(self, *, is_last: bool) -> None:
        """Called after each microbatch's backward."""

    def check_batches(self, microbatches: Sequence[Batch]) -> None:
        """Refuse microbatches of this rank that the strategy cannot train on; no collective.

        Raises:
            BatchError: as it is told on all ranks.
        """
        self.forward.check_division(microbatches)

    def around_step(self, microbatches: Sequence[Batch]) -> AbstractContextManager[None]:
        """Around all forwards and backwards of a step or evaluation."""
        return nullcontext()

    def after_eval(self) -> None:
        """Called after forwards that no backward follows."""

    @property
    def parameters_on(self) -> torch.device:
        """Where parameters lie after `shard`; the mesh's device unless they are offloaded."""
        return self.mesh.device

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced in the last backward of a step only."""
        return True

    @property
    def sums_dtype(self) -> str | None:
        """The dtype in which gradients are summed; None: their own."""
        return getattr(self.config, "reduce_dtype", None)

    def make_gradients(self) -> Gradients:
        """What is clipped; for strategies to replace whose gradients are divided in their own way."""
        wide = self.sums_dtype is not None
        # Who asks for sums that do not depend on the layout wants the same of the factor that clips them.
        return Gradients(self.trainable, self.parts, self.mesh, wide=wide)

    @property
    def reduces_later(self) -> bool:
        """In a pipeline: whether a last backward would wait for its reductions, and may be run as others are, with
        `reduce_gradients` to follow when what it gives to the stage before is on its way."""
        return False

    def reduce_gradients(self) -> None:
        """In a pipeline whose backwards were all run with `is_last=False`: what the last one does. Collective."""

    def check_gradients(self) -> Findings | None:
        """Called after the last microbatch, when gradients are reduced.

        Returns:
            Which of them this rank has used, and what may be wrong with them, to be told to all; None: nothing.
        """
        return None

    # -- the contract

    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        check_new(has_model=self._parallelized)
        check_trainable(model, may_be_frozen=self.in_pipeline, router_loss=True)
        if not self.in_pipeline:
            self.check_model(model)
        check_reduce_dtype(model, self.sums_dtype)
        self.layout = model_layout(model)
        config = getattr(model, "config", None)
        # A pipeline adds it over its stages.
        router_loss = RouterLoss(config) if asks_for_router_loss(model) and not self.in_pipeline else None
        options = {in_parts: forward_options(model, in_parts=in_parts) for in_parts in (False, True)}
        # Sharding changes the class. Innermost of what is put around, so before anything is sharded.
        name, head = type(model).__name__, RowHead(model, self.layout.head) if self.layout.head else None
        self.model = model
        self.module = self._sharded(model, equal_weights(model, weights, self.mesh))
        self.gradients = self.make_gradients()
        self.forward = Forward(
            self.module,
            self.mesh,
            self.axes,
            options=options[self.in_pipeline or any(axis.divides_sequences for axis in self.axes)],
            row_loss=RowLoss(
                head,
                getattr(self.config, "loss_chunk_rows", None),
                is_divided=any(axis.divides_vocabulary for axis in self.axes),
                model=name,
            ),
            router_loss=router_loss,
            vocab_size=getattr(config, "vocab_size", None),
            after_trial=self.after_eval,
        )
        self._parallelized = True
        return self.module

    def _sharded(self, model: nn.Module, weights: Weights | None) -> nn.Module:
        if weights is not None:
            share_random_state(self.mesh)
        if weights is not None and not self.shards_on_meta:
            materialize(model, self.mesh.device)
            fill(model, weights)
        with same_timeout():
            module = self.shard(model)
        if weights is not None and self.shards_on_meta:
            materialize(model, self.mesh.device, parameters_on=self.parameters_on)
            fill(model, weights, self.parts.pieces)
            self.after_loading()
        return module

    def parallelize_stage(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        """`parallelize` for a model that is one stage of a pipeline.

        The pipeline then calls the methods below by itself: many forwards may come before their backwards,
        `sync_gradients` surrounds backwards alone, and the stage may have no parameter that trains.
        """
        self.in_pipeline = True
        return self.parallelize(model, weights)

    def forward_backward(self, microbatches: Sequence[Batch], *, num_tokens: Tensor) -> Tensor:
        self._require_model()
        self.settle()
        agreed = agree(microbatches, num_tokens, self.mesh, self._terms)
        microbatches, num_tokens = agreed.microbatches, agreed.num_tokens
        check_nothing_pending(self.trainable())
        if not self.module.training:
            self.module.train()
        losses = []
        with self.forward.around_step(), self.around_step(microbatches):
            self.forward.try_out(microbatches)
            self._choose_activations(microbatches)
            for index, batch in enumerate(microbatches):
                is_last = index == len(microbatches) - 1
                with self.sync_gradients(is_last=is_last):
                    loss = self._loss(batch, num_tokens, len(microbatches))
                    loss.backward()
                self.after_backward(is_last=is_last)
                losses.append(loss.detach())
        self._ending = Ending([self.finish_gradients()])
        return self.forward.sum_over_ranks(losses, self._ending)

    def eval_loss(self, microbatches: Sequence[Batch], *, num_tokens: Tensor) -> Tensor:
        self._require_model()
        agreed = agree(microbatches, num_tokens, self.mesh, self._terms)
        microbatches, num_tokens = agreed.microbatches, agreed.num_tokens
        was_training = self.module.training
        self.module.eval()
        try:
            with self.forward.around_step(), self.around_step(microbatches), torch.no_grad():
                self.forward.try_out(microbatches)
                losses = [self._loss(batch, num_tokens, len(microbatches)) for batch in microbatches]
        finally:
            self.module.train(was_training)
            self.after_eval()
        return self.forward.sum_over_ranks(losses, Ending())

    @property
    def _terms(self) -> Terms:
        return self.forward.terms(self.check_batches)

    def announce(self, microbatches: Sequence[Batch]) -> Tensor:
        self._require_model()
        return announce(microbatches, self.mesh, self._terms)

    def read(self, *values: Tensor) -> list[float]:
        return self._ending.settle(self.mesh.world, values)

    def settle(self) -> None:
        self._ending.settle(self.mesh.world)

    def _choose_activations(self, microbatches: Sequence[Batch]) -> None:
        """Where there is a budget: choose what blocks hold. Collective, once."""
        largest, world = max(microbatches, key=lambda batch: batch["input_ids"].numel()), self.mesh.world
        for blocks in without_choice([self.activations]):
            choose([blocks], [lambda: self.forward.rehearse(largest)], [world], ONE_STAGE, world)

    def _loss(self, batch: Batch, num_tokens: Tensor, microbatches: int) -> Tensor:
        return self.forward.share_of_loss(self.forward.divide(batch), num_tokens, microbatches=microbatches)

    def finish_gradients(self) -> Findings:
        """After the last backward of a step: all that is left before the gradients are whole. Collective.

        Returns:
            What is to be told to all ranks.

        Raises:
            StrategyError: on all ranks; the gradients of the first step are not what they should be.
        """
        for axis in self.axes:
            axis.add_gradients(self.trainable())
        filled = self.gradients.take_findings()
        findings = self.check_gradients() or filled
        if self.axes and not self._gradients_are_checked:
            self._gradients_are_checked = True
            defects = [axis.gradient_defect(self.parts) for axis in self.axes]
            self.mesh.world.raise_together(next((defect for defect in defects if defect is not None), None))
        return findings

    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        check_clip(max_norm, norm_type)
        norm = self.gradients.total_norm(norm_type)
        if max_norm is not None:
            self.gradients.scale(norm, max_norm)
        return norm
