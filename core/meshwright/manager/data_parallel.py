"""The base of strategies in which each rank runs the whole model on its own microbatches.

One thing, since a strategy may replace any method, and finds all of them here: steps, the optimizer, and the state.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.optim import Optimizer

from ..base.errors import StrategyError
from ..base.types import Batch, Objective, OptimizerFactory, TokenStatistic
from ..mesh.mesh import Mesh
from ..mesh.world import use_run_timeout
from ..model.layout import ModelLayout, sync_tie_config
from ..model.weights import Weights, load_weights, materialize
from ..optim.groups import ParamTraits, bind_to_model, describe_trained_params
from ..step.agreement import BatchRequirements, begin_step_sync, compute_frozen_share, finish_step_sync
from ..step.axis import Axis
from ..step.objective import BoundObjective, ObjectiveAccumulator, model_inputs
from ..step.tokens import StatisticsRecorder
from ..strategy.contract import StrategyManager
from ..strategy.registry import model_layout
from ..tensors import state as states
from ..tensors.norms import check_clip_options
from ..tensors.pieces import ChunkedTensor
from ..tensors.state import DTENSOR_LAYOUT, EMAWeights, OptimizerState, ShardedState, ShardLayout, TensorMeta
from .forward import ForwardRunner
from .gradients import GradientReport, Gradients, StepReduction
from .start import (
    check_no_pending_gradients,
    check_not_owned,
    check_reduce_dtype,
    check_trainable,
    mark_owned,
    require_model,
    require_optimizer,
    sync_initial_weights,
    sync_tp_rng,
)
from .steps import StepBookkeeping, TrainableParameters

if TYPE_CHECKING:
    from ..model.budget import BudgetedBlocks
    from ..model.offload import OffloadedBlocks


class DataParallelManager(StrategyManager):
    """Trains one model, or one stage of a pipeline, of which every rank runs all layers.

    A subclass implements `shard`, which lays out the model, and may replace the other hooks, which come first below.
    One thing, since a strategy may replace any method, and finds all steps here.

    Attributes:
        model: the Hugging Face model, unwrapped; its parameters may have been sharded in place.
        module: what `parallelize` returned: `model`, or a wrapper around it.
        layout: the structure of the model before sharding.
        axes: axes along which ranks share microbatches or the model, besides data parallelism; `shard` appends them in
            the order in which they divide a microbatch.
        parts: how parameters and optimizer state are divided over ranks; set it if they are not DTensors.
        activations: what `checkpoint_blocks` returned.
        is_pipeline_stage: the model is one stage of a pipeline; see `parallelize_stage`.
        parameter_names: name of each parameter that the optimizer trains; set by `build_optimizer`.
    """

    model: nn.Module
    module: nn.Module
    layout: ModelLayout
    axes: list[Axis]
    parts: ShardLayout = DTENSOR_LAYOUT
    may_train: TrainableParameters
    parameter_names: Mapping[nn.Parameter, str]
    averages: EMAWeights | None = None
    activations: BudgetedBlocks | OffloadedBlocks | None = None
    in_pipeline: bool = False
    forward: ForwardRunner
    gradients: Gradients
    shards_on_meta: ClassVar[bool] = False
    """Whether `shard` takes a model on the meta device, which gets memory and values afterwards."""
    runs_in_pipeline: ClassVar[bool] = False
    """Whether the strategy supports `is_pipeline_stage`."""
    _optimizer: Optimizer | None = None
    _parallelized = False

    def __init__(self, config: BaseModel, mesh: Mesh) -> None:
        self.config, self.mesh, self.axes = config, mesh, []
        self._gradients_are_checked = False
        self._steps, self._recorder = StepBookkeeping(mesh, self.trainable), StatisticsRecorder()

    # -- hooks: the model

    @abstractmethod
    def shard(self, model: nn.Module) -> nn.Module:
        """Lay `model` out over the mesh, gradients reduced by SUM, and return the module to call."""

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model, before anything is changed, with the same ModelError on all ranks; once for all stages."""

    @property
    def parameters_on(self) -> torch.device:
        """Device of the parameters after `shard`."""
        return self.mesh.device

    def trainable(self) -> Iterator[nn.Parameter]:
        """The parameters that may train, each once, as they are after sharding; see [Note: frozen later]."""
        return (parameter for _, parameter in self.may_train.named())

    # -- hooks: steps

    def check_batches(self, microbatches: Sequence[Batch]) -> None:
        """Refuse microbatches of this rank with a BatchError, which all ranks raise; no collective."""
        self.forward.check_division(microbatches)

    def around_step(self, microbatches: Sequence[Batch]) -> AbstractContextManager[None]:
        """Context of all forwards and backwards of a step or evaluation."""
        return nullcontext()

    def sync_gradients(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Context of forward and backward of one microbatch; defers the reduction unless `is_last`."""
        return nullcontext()

    def after_backward(self, *, is_last: bool) -> None:
        """Called after each microbatch's backward, and after each part of one that a pipeline runs by itself."""

    def check_gradients(self) -> GradientReport | None:
        """Called when the gradients of a step are reduced; return what this rank has found, if anything."""
        return None

    def after_eval(self) -> None:
        """Called after forwards that no backward follows."""

    @property
    def sums_dtype(self) -> str | None:
        """Dtype in which gradients are summed; None: their own."""
        return getattr(self.config, "reduce_dtype", None)

    def make_gradients(self) -> Gradients:
        # Sums that do not depend on the layout need a clip factor that does not, either.
        return Gradients(self.trainable, self.parts, self.mesh, use_float64=self.sums_dtype is not None)

    # -- hooks: the optimizer and its state

    def named_trainable(self) -> Sequence[tuple[str, nn.Parameter]]:
        """What the optimizer trains, by name, as `parts` knows it."""
        return list(self.may_train.named())

    def optimizer_state(self, *, full: bool) -> dict[str, Any]:
        """Return the optimizer's part of `state_dict`."""
        names = self.parameter_names
        return states.get_optimizer_state_dict(
            self.optimizer, names, self.mesh.world, full=full, shard_layout=self.parts
        )

    def load_optimizer_state(self, state: Mapping[str, Any], *, full: bool) -> None:
        """Load the optimizer's part of `state_dict`."""
        names = self.parameter_names
        states.load_optimizer_state_dict(
            self.optimizer, names, state, self.mesh.world, full=full, shard_layout=self.parts
        )

    def after_loading(self) -> None:
        """Called when parameters and optimizer state have been written in place."""

    # -- hooks: in a pipeline

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced in the last backward of a step only."""
        return True

    @property
    def reduces_later(self) -> bool:
        """Whether `reduce_gradients` may follow the last backward, which then runs like the others."""
        return False

    def reduce_gradients(self) -> None:
        """Reduce gradients of which all backwards ran with `is_last=False`. Collective."""

    def without_weights(self) -> AbstractContextManager[None]:
        """Context of a backward that leaves out gradients of weights, which follow later."""
        return self.sync_gradients(is_last=False)

    def after_weights(self) -> None:
        """Called after each deferred weight-gradient pass except the last, which is followed by the reduction."""
        self.after_backward(is_last=False)

    # -- the model

    def _require_model(self) -> None:
        require_model(self.model if self._parallelized else None)

    @property
    def model_parts(self) -> Sequence[nn.Module]:
        self._require_model()
        return [self.model]

    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        if not self.in_pipeline:
            check_not_owned(model, has_model=self._parallelized)
            sync_tie_config(model)
        check_trainable(model, may_be_frozen=self.in_pipeline, supports_router_loss=True)
        if not self.in_pipeline:
            self.check_model(model)
            from ..model.merge import build_merger

            self.merging = build_merger(model)
        check_reduce_dtype(model, self.sums_dtype)
        self.layout = model_layout(model)
        forward = ForwardRunner(
            model,
            self.layout.head,
            self.mesh,
            self.axes,
            chunk_rows=getattr(self.config, "loss_chunk_rows", None),
            is_pipeline_stage=self.in_pipeline,
            after_probe=self.after_eval,
        )
        self.model = model
        self.module = self._sharded(model, sync_initial_weights(model, weights, self.mesh))
        self.may_train = TrainableParameters(model)
        self.gradients = self.make_gradients()
        forward.attach(self.module)
        self.forward = forward
        self._parallelized = True
        mark_owned(model.modules())
        return self.module

    def parallelize_stage(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        """Parallelize one stage of a pipeline, which calls the other methods by itself; the stage may train nothing."""
        self.in_pipeline = True
        return self.parallelize(model, weights)

    def _sharded(self, model: nn.Module, weights: Weights | None) -> nn.Module:
        if weights is not None:
            sync_tp_rng(self.mesh)
        if weights is not None and not self.shards_on_meta:
            materialize(model, self.mesh.device)
            load_weights(model, weights)
        with use_run_timeout():
            module = self.shard(model)
        if weights is not None and self.shards_on_meta:
            materialize(model, self.mesh.device, parameter_device=self.parameters_on)
            load_weights(model, weights, self.parts.pieces)
            self.after_loading()
        return module

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        self._require_model()
        with ExitStack() as whole:
            for axis in self.axes:
                whole.enter_context(axis.whole())
            yield [self.model]

    # -- steps

    def forward_backward(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        self._require_model()
        self._steps.settle()
        given = self._given(objective)
        agreed = finish_step_sync(microbatches, num_tokens, self.mesh, self._terms(given))
        check_no_pending_gradients(self.trainable())
        if not self.module.training:
            self.module.train()
        microbatches, losses = agreed.microbatches, list[Tensor]()
        inputs, count = model_inputs(given, microbatches), len(microbatches)
        with self.in_step(inputs, agreed.longest):
            tally = self._tally(given, microbatches)
            self._choose_activations(inputs)
            for index, batch in enumerate(microbatches):
                is_last = index == len(microbatches) - 1
                with self.sync_gradients(is_last=is_last):
                    loss = self.forward.loss(batch, agreed.num_tokens, count, tally)
                    loss.backward()
                self.after_backward(is_last=is_last)
                losses.append(loss.detach())
        findings = self.finish_gradients()
        self.drop_frozen()
        return self._summed(losses, tally, self._steps.trained([findings], None, tally))

    def eval_loss(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        self._require_model()
        losses, tally = self._evaluated(microbatches, num_tokens, self._given(objective))
        return self._summed(losses, tally, self._steps.evaluated(tally))

    def token_stats(self, microbatches: Sequence[Batch], names: Sequence[TokenStatistic]) -> list[dict[str, Tensor]]:
        self._require_model()
        self._recorder.begin(names)
        self._evaluated(microbatches, None, self._steps.noting(self._recorder, self.forward.taken))
        return self._recorder.found

    def announce(self, microbatches: Sequence[Batch], *, objective: Objective | None = None) -> Tensor:
        self._require_model()
        return begin_step_sync(microbatches, self.mesh, self._terms(self._given(objective)))

    @property
    def last_sums(self) -> Mapping[str, Tensor]:
        return self._steps.last_sums

    def read(self, *values: Tensor) -> list[float]:
        return self._steps.read(*values)

    @contextmanager
    def in_step(self, microbatches: Sequence[Batch], max_length: int) -> Iterator[None]:
        """Context of all forwards and backwards of a step or evaluation whose longest row has `max_length` tokens."""
        with self.may_train.unfrozen(), self.forward.around_step(max_length), self.around_step(microbatches):
            yield

    def check_step(self, microbatches: Sequence[Batch]) -> None:
        """Refuse a step that this rank cannot run, with a BatchError or StrategyError; no collective."""
        self.may_train.check_unfrozen()
        self.check_batches(microbatches)

    def finish_gradients(self) -> GradientReport:
        """Complete the gradients after the last backward of a step. Collective; StrategyError on all ranks."""
        for axis in self.axes:
            axis.add_gradients(self.trainable())
        filled = self.gradients.take_findings()
        findings = self.check_gradients() or filled
        self.check_axes()
        return findings

    def check_axes(self) -> None:
        """Check once that reduced gradients fit how axes divide the model. Collective; StrategyError on all ranks."""
        if self.axes and not self._gradients_are_checked:
            self._gradients_are_checked = True
            defects = [axis.gradient_defect(self.parts) for axis in self.axes]
            self.mesh.world.raise_together(next((defect for defect in defects if defect is not None), None))

    def gradient_norms(self) -> dict[str, float]:
        self._require_model()
        return self.gradients.norms_by_part(self.layout, self.named_trainable())

    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        check_clip_options(max_norm, norm_type)
        norm = self.gradients.total_norm(norm_type)
        if max_norm is not None:
            self.gradients.scale(norm, max_norm)
        return norm

    def _evaluated(
        self, microbatches: Sequence[Batch], num_tokens: Tensor | None, objective: BoundObjective | None
    ) -> tuple[list[Tensor], ObjectiveAccumulator | None]:
        agreed = finish_step_sync(microbatches, num_tokens, self.mesh, self._terms(objective))
        microbatches = agreed.microbatches
        inputs, count = model_inputs(objective, microbatches), len(microbatches)
        with self.forward.evaluating(), self.in_step(inputs, agreed.longest), torch.no_grad():
            tally = self._tally(objective, microbatches)
            return [self.forward.loss(batch, agreed.num_tokens, count, tally) for batch in microbatches], tally

    def _summed(
        self, losses: Sequence[Tensor], accumulator: ObjectiveAccumulator | None, reduction: StepReduction
    ) -> Tensor:
        """Add up the losses of all microbatches and ranks. Scalar, equal on all ranks. Collective."""
        alike = self.mesh.group("tp") if self.mesh.degrees.tp > 1 else None
        further = None if accumulator is None else accumulator.sums / self.forward.sharers
        over = self.mesh.group("dp_cp")
        total = reduction.add_up(losses, losses[0].device, extra_sums=further, group=over, replica_group=alike)
        for axis in self.axes:
            axis.add_losses(total)
        return self._steps.loss(total, accumulator, reduction).to(losses[0].dtype)

    def _given(self, objective: Objective | None) -> BoundObjective | None:
        return self._steps.given(objective, self.forward.taken)

    def _tally(self, objective: BoundObjective | None, microbatches: Sequence[Batch]) -> ObjectiveAccumulator | None:
        takes_loss = objective is None or objective.on == "tokens"
        self.forward.try_out(model_inputs(objective, microbatches), needs_token_loss=takes_loss)
        return self._steps.tally(objective, functools.partial(self.forward.try_objective, microbatches[0]))

    def _terms(self, objective: BoundObjective | None) -> BatchRequirements:
        frozen = compute_frozen_share(self.mesh, ((name, 0, 1) for name in self.may_train.frozen()))
        return self.forward.terms(self.check_step, objective, frozen)

    def _choose_activations(self, microbatches: Sequence[Batch]) -> None:
        """Choose, under a memory budget, which activations blocks keep. Collective, once."""
        if self.activations is None:
            return
        from ..model.budget import SINGLE_STAGE, choose_saved_activations, find_undecided

        largest, world = max(microbatches, key=lambda batch: batch["input_ids"].numel()), self.mesh.world
        for blocks in find_undecided([self.activations]):
            choose_saved_activations([blocks], [lambda: self.forward.rehearse(largest)], [world], SINGLE_STAGE, world)

    # -- the optimizer

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Make the optimizer, and check that it steps what it gets as it would step whole parameters. Collective."""
        from ..optim.trial import call_optimizer_factory, check_optimizer

        self._require_model()
        named, trained = self.named_trainable(), self.what_is_trained()
        self.parameter_names = {parameter: name for name, parameter in named}
        optimizer = self.mesh.world.together(lambda: call_optimizer_factory(bind_to_model(factory, trained), named))
        check_optimizer(optimizer, self.parts, self.mesh.world)
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self._steps.settle())
        optimizer.register_step_pre_hook(lambda *_: self.drop_frozen())
        return optimizer

    def what_is_trained(self) -> dict[str, ParamTraits]:
        """Describe the unsharded parameters that the optimizer trains, by name."""
        named = self.named_trainable()
        return describe_trained_params(self.model, self.layout, named, lambda each: self.parts.shape(each, each))

    @property
    def optimizer(self) -> Optimizer:
        return require_optimizer(self._optimizer)

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer is not None

    def drop_frozen(self) -> None:
        """Drop the gradients of parameters that are frozen now; see [Note: frozen later]."""
        frozen = self.may_train.frozen()
        for name, trained in self.named_trainable() if frozen else ():
            if name in frozen:
                trained.grad = None

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def drop_gradients(self) -> None:
        self._steps.settle()
        self.optimizer.zero_grad(set_to_none=True)

    # -- averages

    def keep_averages(self) -> Sequence[EMAWeights]:
        """Begin moving averages of the weights; see `meshwright.train.loop.ema.Averaging`."""
        require_optimizer(self._optimizer)
        if self.averages is not None:
            raise StrategyError("this manager keeps an average of its weights already. Use that one.")
        self.averages = EMAWeights(self.parameter_names, self.parts)
        return [self.averages]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the averages in place of the weights. Collective. StrategyError if none are kept."""
        if self.averages is None:
            raise StrategyError("this manager keeps no average of its weights. Make one first (mw.EMA).")
        with self.loading(None):
            exchanged = self.averages.exchange()
        try:
            yield
        finally:
            with self.loading(None):
                exchanged.undo()

    # -- state

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        self._require_model()
        state: dict[str, Any] = {
            "model": states.get_model_state_dict(self.model, self.mesh.world, full=full, shard_layout=self.parts)
        }
        if self._optimizer is not None:
            state["optimizer"] = self.optimizer_state(full=full)
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        self._require_model()
        states.load_model_state_dict(self.model, state["model"], self.mesh.world, full=full, shard_layout=self.parts)
        if self._optimizer is not None:
            self.load_optimizer_state(state.get("optimizer", {}), full=full)

    def sharded_state(self) -> ShardedState:
        optimizer = self._optimizer and states.get_sharded_optimizer_state(
            self._optimizer, self.parameter_names, self.parts
        )
        return replace(self._sharded_weights(), optimizer=optimizer)

    def parameter_pieces(self) -> dict[str, ChunkedTensor | None]:
        self._require_model()
        return {
            name: states.to_chunked_tensor(value, value, self.parts) for name, value in self.model.named_parameters()
        }

    @contextmanager
    def loading(self, optimizer: OptimizerState[TensorMeta] | None) -> Iterator[ShardedState]:
        state = self._sharded_weights()
        if optimizer is None:
            yield state
        else:
            with states.load_sharded_optimizer(self.optimizer, self.parameter_names, optimizer, self.parts) as target:
                yield replace(state, optimizer=target)
        self.after_loading()

    def _sharded_weights(self) -> ShardedState:
        self._require_model()
        averages = self.averages.sharded() if self.averages is not None else {}
        return ShardedState(states.get_sharded_model_state(self.model, self.parts), averages=averages)
