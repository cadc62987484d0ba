"""The part that all strategies share in which each rank runs the whole model on its own microbatches.

A strategy subclasses `DataParallelManager` and says in `shard` how the model is laid out, and in `sync_gradients` how
the reduction waits for the last microbatch. `single` shows the smallest one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from ..mesh.mesh import Mesh
from ..mesh.world import same_timeout
from ..model.budget import BudgetedBlocks, choose, without_choice
from ..model.knapsack import ONE_STAGE
from ..model.layout import ModelLayout, in_order
from ..model.merge import merging_of
from ..model.offload import OffloadedBlocks
from ..model.ties import note_ties
from ..model.weights import Weights, fill, materialize
from ..step.agreement import agree, announce
from ..step.batch import Terms
from ..step.forward_options import forward_options, forward_takes
from ..step.message import frozen_share
from ..step.objective import Given, Tally, without_columns
from ..step.recorder import Recorder
from ..step.rope_length import RopeLength
from ..step.router_loss import RouterLoss
from ..step.row_head import RowHead
from ..strategy.ask import model_layout
from ..strategy.contract import Batch, Objective, TokenStatistic
from ..tensors.norms import check_clip
from .call_order import check_new, check_nothing_pending, take
from .duties import Duties
from .ending import Ending, Findings
from .forward import Forward
from .freezing import TrainableParameters
from .gradients import Gradients
from .row_loss import RowLoss
from .start import asks_for_router_loss, check_reduce_dtype, check_trainable, equal_weights, share_random_state
from .steps import Steps


class DataParallelManager(Duties):
    """Forward, backward and clipping for strategies with one model part on every rank; see also `Duties`.

    Attributes:
        module: what `parallelize` returned, which is called; a wrapper around `model`, or `model` itself.
        layout: the model's structure as it was before sharding.
        gradients: of what is trained; there after `parallelize`.
    """

    module: nn.Module
    layout: ModelLayout
    gradients: Gradients
    in_pipeline: bool = False
    """Whether the model is one stage of a pipeline; see `parallelize_stage`."""
    activations: BudgetedBlocks | OffloadedBlocks | None = None
    """What `checkpoint_blocks` has returned: blocks that hold what a budget allows, or in host memory."""

    def __init__(self, config: BaseModel, mesh: Mesh) -> None:
        super().__init__(config, mesh)
        self._gradients_are_checked = False
        self._steps, self._recorder = Steps(mesh, self.trainable), Recorder()

    # -- the contract

    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        if not self.in_pipeline:
            check_new(model, has_model=self._parallelized)
            note_ties(model)
        check_trainable(model, may_be_frozen=self.in_pipeline, router_loss=True)
        if not self.in_pipeline:
            self.check_model(model)
            self.merging = merging_of(model)
        check_reduce_dtype(model, self.sums_dtype)
        self.layout = model_layout(model)
        config = getattr(model, "config", None)
        # A pipeline adds it over its stages.
        router_loss = RouterLoss(config) if asks_for_router_loss(model) and not self.in_pipeline else None
        self._taken = forward_takes(model)
        options = {in_parts: forward_options(model, in_parts=in_parts) for in_parts in (False, True)}
        # Sharding changes the class. Innermost of what is put around, so before anything is sharded.
        rope_length = RopeLength(model)
        name, head = type(model).__name__, RowHead(model, self.layout.head) if self.layout.head else None
        self.model = model
        self.module = self._sharded(model, equal_weights(model, weights, self.mesh))
        self.may_train = TrainableParameters(model)
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
                vocab_size=getattr(config, "vocab_size", None),
            ),
            router_loss=router_loss,
            vocab_size=getattr(config, "vocab_size", None),
            rope_length=rope_length,
            after_trial=self.after_eval,
        )
        self._parallelized = True
        take(model.modules())
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

    def forward_backward(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        self.settle()
        given = self._given(objective)
        agreed = agree(microbatches, num_tokens, self.mesh, self._terms(given))
        microbatches, num_tokens = agreed.microbatches, agreed.num_tokens
        check_nothing_pending(self.trainable())
        if not self.module.training:
            self.module.train()
        losses = []
        with self.in_step(without_columns(given, microbatches), agreed.longest):
            tally = self._tally(given, microbatches)
            self._choose_activations(without_columns(given, microbatches))
            for index, batch in enumerate(microbatches):
                is_last = index == len(microbatches) - 1
                with self.sync_gradients(is_last=is_last):
                    loss = self._loss(batch, num_tokens, len(microbatches), tally)
                    loss.backward()
                self.after_backward(is_last=is_last)
                losses.append(loss.detach())
        findings = self.finish_gradients()
        self.drop_frozen()
        return self._summed(losses, tally, self._steps.trained([findings], None, tally))

    @contextmanager
    def in_step(self, microbatches: Sequence[Batch], longest: int) -> Iterator[None]:
        """Around all forwards and backwards of a step or evaluation, whose longest row has so many tokens."""
        with self.may_train.unfrozen(), self.forward.around_step(longest), self.around_step(microbatches):
            yield

    def eval_loss(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        given = self._given(objective)
        losses, tally = self._evaluated(microbatches, num_tokens, given)
        return self._summed(losses, tally, self._steps.evaluated(tally))

    def token_stats(self, microbatches: Sequence[Batch], names: Sequence[TokenStatistic]) -> list[dict[str, Tensor]]:
        self._recorder.begin(names)
        self._require_model()
        given = self._steps.noting(self._recorder, self._taken)
        self._evaluated(microbatches, None, given)
        return self._recorder.found

    def _evaluated(
        self, microbatches: Sequence[Batch], num_tokens: Tensor | None, given: Given | None
    ) -> tuple[list[Tensor], Tally | None]:
        agreed = agree(microbatches, num_tokens, self.mesh, self._terms(given))
        microbatches, num_tokens = agreed.microbatches, agreed.num_tokens
        was_training = self.module.training
        self.module.eval()
        try:
            with self.in_step(without_columns(given, microbatches), agreed.longest), torch.no_grad():
                tally = self._tally(given, microbatches)
                losses = [self._loss(batch, num_tokens, len(microbatches), tally) for batch in microbatches]
        finally:
            self.module.train(was_training)
            self.after_eval()
        return losses, tally

    def _summed(self, losses: Sequence[Tensor], tally: Tally | None, ending: Ending) -> Tensor:
        """The loss of a step from the shares of this rank's microbatches; scalar, equal on all ranks. Collective."""
        alike = self.mesh.group("tp") if self.mesh.degrees.tp > 1 else None
        further = None if tally is None else tally.sums / self.forward.sharers
        over = self.mesh.group("dp_cp")
        total = ending.add_up(losses, losses[0].device, further=further, over=over, alike=alike)
        for axis in self.axes:
            axis.add_losses(total)
        return self._steps.loss(total, tally, ending).to(losses[0].dtype)

    def _given(self, objective: Objective | None) -> Given | None:
        self._require_model()
        return self._steps.given(objective, self._taken)

    def _tally(self, given: Given | None, microbatches: Sequence[Batch]) -> Tally | None:
        """Before the first forward: what is to be found out of the model, and of an objective."""
        takes_loss = given is None or given.on == "tokens"
        self.forward.try_out(without_columns(given, microbatches), takes_loss=takes_loss)
        return self._steps.tally(given, functools.partial(self.forward.try_objective, microbatches[0]))

    def _terms(self, given: Given | None) -> Terms:
        frozen = frozen_share(self.mesh, ((name, 0, 1) for name in self.may_train.frozen()))
        return replace(self.forward.terms(self.check_step, given), frozen=frozen)

    def check_step(self, microbatches: Sequence[Batch]) -> None:
        """Refuse a step that this rank cannot run; no collective.

        Raises:
            StrategyError: see `TrainableParameters.check_unfrozen`; as it is told on all ranks.
            BatchError: see `check_batches`.
        """
        self.may_train.check_unfrozen()
        self.check_batches(microbatches)

    def announce(self, microbatches: Sequence[Batch], *, objective: Objective | None = None) -> Tensor:
        return announce(microbatches, self.mesh, self._terms(self._given(objective)))

    @property
    def last_sums(self) -> Mapping[str, Tensor]:
        return self._steps.last_sums

    def read(self, *values: Tensor) -> list[float]:
        return self._steps.read(*values)

    def settle(self) -> None:
        self._steps.settle()

    def _choose_activations(self, microbatches: Sequence[Batch]) -> None:
        """Where there is a budget: choose what blocks hold. Collective, once."""
        largest, world = max(microbatches, key=lambda batch: batch["input_ids"].numel()), self.mesh.world
        for blocks in without_choice([self.activations]):
            choose([blocks], [lambda: self.forward.rehearse(largest)], [world], ONE_STAGE, world)

    def _loss(self, batch: Batch, num_tokens: Tensor, microbatches: int, tally: Tally | None) -> Tensor:
        self.mesh.world.progress.move()
        divided = self.forward.divide(batch, None if tally is None else tally.given)
        return self.forward.share_of_loss(divided, num_tokens, microbatches=microbatches, tally=tally)

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
        self.check_axes()
        return findings

    def check_axes(self) -> None:
        """Refuse, in the first step, how an axis divides the model, if the reduced gradients show it. Collective, once.

        Raises:
            StrategyError: on all ranks.
        """
        if self.axes and not self._gradients_are_checked:
            self._gradients_are_checked = True
            defects = [axis.gradient_defect(self.parts) for axis in self.axes]
            self.mesh.world.raise_together(next((defect for defect in defects if defect is not None), None))

    def gradient_norms(self) -> dict[str, float]:
        self._require_model()
        parts = {parameter: self.layout.part_of(name) for name, parameter in self.named_trainable()}
        names = in_order(parts.values())
        norms = self.gradients.squares(parts, names).sqrt()
        return dict(zip(names, norms.tolist(), strict=True))

    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        check_clip(max_norm, norm_type)
        norm = self.gradients.total_norm(norm_type)
        if max_norm is not None:
            self.gradients.scale(norm, max_norm)
        return norm
