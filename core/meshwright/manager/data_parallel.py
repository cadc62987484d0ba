"""The base class of strategies in which each rank runs the full model on its own micro-batches.

One thing, since a strategy may override any method: steps, the optimizer and the state are in a single class.
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
from ..step.axis import Axis
from ..step.handshake import BatchRequirements, begin_step_sync, compute_frozen_share, finish_step_sync
from ..step.objective import BoundObjective, ObjectiveAccumulator, model_inputs
from ..step.tokens import StatisticsRecorder
from ..strategy.contract import StrategyManager
from ..strategy.registry import model_layout
from ..tensors import state as states
from ..tensors.chunks import ChunkedTensor
from ..tensors.ema_weights import EMAWeights
from ..tensors.norms import check_clip_options
from ..tensors.state import DTENSOR_LAYOUT, OptimizerState, ShardedState, ShardLayout, TensorMeta
from .forward_runner import ForwardRunner
from .gradients import GradientReport, Gradients, StepReduction
from .model_setup import (
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
from .step_bookkeeping import StepBookkeeping, TrainableParameters

if TYPE_CHECKING:
    from ..model.activation_budget import BudgetedBlocks
    from ..model.offload import OffloadedBlocks


class DataParallelManager(StrategyManager):
    """Train one model, or one pipeline stage, of which every rank runs all layers.

    One thing, since a strategy may override any method.

    A subclass implements `shard`, which lays out the model, and may override the other hooks, which come first below.

    Attributes:
        model: the unwrapped Hugging Face model; `shard` may have sharded its parameters in place.
        module: the module that `parallelize` returned: `model`, or a wrapper around it.
        layout: the structure of the model before sharding.
        axes: axes besides data parallelism along which ranks share micro-batches or the model. `shard` appends them in
            the order in which they divide a micro-batch.
        shard_layout: how parameters and optimizer state are sharded; set it if they are not DTensors.
        checkpointed_blocks: the result of `checkpoint_blocks`.
        is_pipeline_stage: whether the model is one stage of a pipeline; see `parallelize_stage`.
        parameter_names: name of each parameter that the optimizer trains; set by `build_optimizer`.
    """

    model: nn.Module
    module: nn.Module
    layout: ModelLayout
    axes: list[Axis]
    shard_layout: ShardLayout = DTENSOR_LAYOUT
    trainable_parameters: TrainableParameters
    parameter_names: Mapping[nn.Parameter, str]
    ema_weights: EMAWeights | None = None
    checkpointed_blocks: BudgetedBlocks | OffloadedBlocks | None = None
    is_pipeline_stage: bool = False
    forward_runner: ForwardRunner
    gradients: Gradients
    supports_meta_device: ClassVar[bool] = False
    """Whether `shard` accepts a model on the meta device, which is materialized and loaded afterwards."""
    supports_pipeline: ClassVar[bool] = False
    """Whether the strategy supports `is_pipeline_stage`."""
    _optimizer: Optimizer | None = None
    _is_parallelized = False

    def __init__(self, config: BaseModel, mesh: Mesh) -> None:
        self.config, self.mesh, self.axes = config, mesh, []
        self._has_checked_gradients = False
        self._bookkeeping, self._recorder = StepBookkeeping(mesh, self.iter_trainable), StatisticsRecorder()

    # -- hooks: the model

    @abstractmethod
    def shard(self, model: nn.Module) -> nn.Module:
        """Shard or replicate `model` over the mesh, with gradients reduced by SUM, and return the module to call."""

    def check_model(self, model: nn.Module) -> None:
        """Raise ModelError, the same on all ranks, for an unsupported model.

        Called before anything changes, once for all stages.
        """

    @property
    def parameter_device(self) -> torch.device:
        """Device of the parameters after `shard`."""
        return self.mesh.device

    def iter_trainable(self) -> Iterator[nn.Parameter]:
        """Iterate over the trainable parameters as they are after sharding, each once; see [Note: frozen later]."""
        return (parameter for _, parameter in self.trainable_parameters.named_parameters())

    # -- hooks: steps

    def check_microbatches(self, microbatches: Sequence[Batch]) -> None:
        """Raise BatchError for invalid micro-batches of this rank; the caller raises it on all ranks. No collective."""
        self.forward_runner.check_microbatches(microbatches)

    def step_context(self, microbatches: Sequence[Batch]) -> AbstractContextManager[None]:
        """Return the context of all forwards and backwards of a step or evaluation."""
        return nullcontext()

    def microbatch_context(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward and backward. It defers the reduction unless `is_last`."""
        return nullcontext()

    def after_backward(self, *, is_last: bool) -> None:
        """Hook called after the backward of each micro-batch.

        In a pipeline it is also called after each part of a backward that runs separately.
        """

    def report_gradients(self) -> GradientReport | None:
        """Hook called when the gradients of a step are reduced. Returns this rank's report, if it has one."""
        return None

    def after_eval(self) -> None:
        """Hook called after forwards that no backward follows."""

    @property
    def accumulation_dtype(self) -> str | None:
        """Dtype in which gradients are summed; None: their own dtype."""
        return getattr(self.config, "reduce_dtype", None)

    def build_gradients(self) -> Gradients:
        # If sums do not depend on the layout, neither may the clip factor.
        return Gradients(
            self.iter_trainable, self.shard_layout, self.mesh, use_float64=self.accumulation_dtype is not None
        )

    # -- hooks: the optimizer and its state

    def named_trainable_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return what the optimizer trains, with names, in the form that `shard_layout` expects."""
        return list(self.trainable_parameters.named_parameters())

    def optimizer_state_dict(self, *, full: bool) -> dict[str, Any]:
        """Return the optimizer's part of `state_dict`."""
        names = self.parameter_names
        return states.get_optimizer_state_dict(
            self.optimizer, names, self.mesh.world, full=full, shard_layout=self.shard_layout
        )

    def load_optimizer_state_dict(self, state: Mapping[str, Any], *, full: bool) -> None:
        """Load the optimizer's part of `state_dict`."""
        names = self.parameter_names
        states.load_optimizer_state_dict(
            self.optimizer, names, state, self.mesh.world, full=full, shard_layout=self.shard_layout
        )

    def after_load(self) -> None:
        """Hook called after parameters or optimizer state were written in place."""

    # -- hooks: in a pipeline

    @property
    def reduces_once_per_step(self) -> bool:
        """Whether gradients are reduced only in the last backward of a step."""
        return True

    @property
    def can_defer_reduction(self) -> bool:
        """Whether `reduce_gradients` may follow the last backward, which then runs like the others."""
        return False

    def reduce_gradients(self) -> None:
        """Reduce gradients whose backwards all ran with `is_last=False`. Collective."""

    def input_backward_context(self) -> AbstractContextManager[None]:
        """Return the context of a backward that defers weight gradients."""
        return self.microbatch_context(is_last=False)

    def after_weight_backward(self) -> None:
        """Hook called after each deferred weight-gradient pass except the last, which the reduction follows."""
        self.after_backward(is_last=False)

    # -- the model

    def _require_model(self) -> None:
        require_model(self.model if self._is_parallelized else None)

    @property
    def model_parts(self) -> Sequence[nn.Module]:
        self._require_model()
        return [self.model]

    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        if not self.is_pipeline_stage:
            check_not_owned(model, has_model=self._is_parallelized)
            sync_tie_config(model)
        check_trainable(model, may_be_frozen=self.is_pipeline_stage, supports_router_loss=True)
        if not self.is_pipeline_stage:
            self.check_model(model)
            from ..model.merge import build_merger

            self.adapter_merger = build_merger(model)
        check_reduce_dtype(model, self.accumulation_dtype)
        self.layout = model_layout(model)
        forward = ForwardRunner(
            model,
            self.layout.head,
            self.mesh,
            self.axes,
            chunk_rows=getattr(self.config, "loss_chunk_rows", None),
            is_pipeline_stage=self.is_pipeline_stage,
            after_probe=self.after_eval,
        )
        self.model = model
        self.module = self._shard_and_fill(model, sync_initial_weights(model, weights, self.mesh))
        self.trainable_parameters = TrainableParameters(model)
        self.gradients = self.build_gradients()
        forward.attach(self.module)
        self.forward_runner = forward
        self._is_parallelized = True
        mark_owned(model.modules())
        return self.module

    def parallelize_stage(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        """Parallelize one stage of a pipeline, which may have no trainable parameters.

        The pipeline calls the other methods itself.
        """
        self.is_pipeline_stage = True
        return self.parallelize(model, weights)

    def _shard_and_fill(self, model: nn.Module, weights: Weights | None) -> nn.Module:
        if weights is not None:
            sync_tp_rng(self.mesh)
        if weights is not None and not self.supports_meta_device:
            materialize(model, self.mesh.device)
            load_weights(model, weights)
        with use_run_timeout():
            module = self.shard(model)
        if weights is not None and self.supports_meta_device:
            materialize(model, self.mesh.device, parameter_device=self.parameter_device)
            load_weights(model, weights, self.shard_layout.get_local_chunks)
            self.after_load()
        return module

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        self._require_model()
        with ExitStack() as contexts:
            for axis in self.axes:
                contexts.enter_context(axis.unsharded())
            yield [self.model]

    # -- steps

    def forward_backward(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        self._require_model()
        self._bookkeeping.finalize()
        bound = self._bind_objective(objective)
        synced = finish_step_sync(microbatches, num_tokens, self.mesh, self._build_requirements(bound))
        check_no_pending_gradients(self.iter_trainable())
        if not self.module.training:
            self.module.train()
        microbatches, losses = synced.microbatches, list[Tensor]()
        inputs, count = model_inputs(bound, microbatches), len(microbatches)
        with self.enter_step(inputs, synced.max_length):
            accumulator = self._start_accumulator(bound, microbatches)
            self._choose_activations(inputs)
            for index, batch in enumerate(microbatches):
                is_last = index == len(microbatches) - 1
                with self.microbatch_context(is_last=is_last):
                    loss = self.forward_runner.compute_loss(batch, synced.num_tokens, count, accumulator)
                    loss.backward()
                self.after_backward(is_last=is_last)
                losses.append(loss.detach())
        report = self.finish_gradients()
        self.drop_frozen_gradients()
        return self._reduce_losses(losses, accumulator, self._bookkeeping.start_reduction([report], None, accumulator))

    def eval_loss(
        self, microbatches: Sequence[Batch], *, num_tokens: Tensor, objective: Objective | None = None
    ) -> Tensor:
        self._require_model()
        losses, accumulator = self._run_eval(microbatches, num_tokens, self._bind_objective(objective))
        return self._reduce_losses(losses, accumulator, self._bookkeeping.build_eval_reduction(accumulator))

    def token_stats(self, microbatches: Sequence[Batch], names: Sequence[TokenStatistic]) -> list[dict[str, Tensor]]:
        self._require_model()
        self._recorder.start(names)
        self._run_eval(
            microbatches, None, self._bookkeeping.bind_recorder(self._recorder, self.forward_runner.argument_names)
        )
        return self._recorder.recorded

    def begin_step_sync(self, microbatches: Sequence[Batch], *, objective: Objective | None = None) -> Tensor:
        self._require_model()
        return begin_step_sync(microbatches, self.mesh, self._build_requirements(self._bind_objective(objective)))

    @property
    def last_sums(self) -> Mapping[str, Tensor]:
        return self._bookkeeping.last_sums

    def read_scalars(self, *values: Tensor) -> list[float]:
        return self._bookkeeping.read_scalars(*values)

    @contextmanager
    def enter_step(self, microbatches: Sequence[Batch], max_length: int) -> Iterator[None]:
        """Enter the context of all forwards and backwards of a step or evaluation.

        `max_length` is the number of tokens in its longest row.
        """
        with (
            self.trainable_parameters.temporarily_unfrozen(),
            self.forward_runner.step_context(max_length),
            self.step_context(microbatches),
        ):
            yield

    def check_step(self, microbatches: Sequence[Batch]) -> None:
        """Raise BatchError or StrategyError if this rank cannot run a step; no collective."""
        self.trainable_parameters.check_unfrozen()
        self.check_microbatches(microbatches)

    def finish_gradients(self) -> GradientReport:
        """Complete the gradients after the last backward of a step. Collective; raises StrategyError on all ranks."""
        for axis in self.axes:
            axis.reduce_gradients(self.iter_trainable())
        default_report = self.gradients.take_report()
        report = self.report_gradients() or default_report
        self.check_reduced_gradients()
        return report

    def check_reduced_gradients(self) -> None:
        """Check once that reduced gradients fit the axes. Collective; raises StrategyError on all ranks."""
        if self.axes and not self._has_checked_gradients:
            self._has_checked_gradients = True
            errors = [axis.find_gradient_error(self.shard_layout) for axis in self.axes]
            self.mesh.world.raise_on_all_ranks(next((error for error in errors if error is not None), None))

    def gradient_norms(self) -> dict[str, float]:
        self._require_model()
        return self.gradients.compute_norms_by_part(self.layout, self.named_trainable_parameters())

    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        check_clip_options(max_norm, norm_type)
        norm = self.gradients.compute_total_norm(norm_type)
        if max_norm is not None:
            self.gradients.clip(norm, max_norm)
        return norm

    def _run_eval(
        self, microbatches: Sequence[Batch], num_tokens: Tensor | None, objective: BoundObjective | None
    ) -> tuple[list[Tensor], ObjectiveAccumulator | None]:
        synced = finish_step_sync(microbatches, num_tokens, self.mesh, self._build_requirements(objective))
        microbatches = synced.microbatches
        inputs, count = model_inputs(objective, microbatches), len(microbatches)
        with self.forward_runner.eval_mode(), self.enter_step(inputs, synced.max_length), torch.no_grad():
            accumulator = self._start_accumulator(objective, microbatches)
            return [
                self.forward_runner.compute_loss(batch, synced.num_tokens, count, accumulator) for batch in microbatches
            ], accumulator

    def _reduce_losses(
        self, losses: Sequence[Tensor], accumulator: ObjectiveAccumulator | None, reduction: StepReduction
    ) -> Tensor:
        """Sum the losses of all micro-batches and ranks. Scalar, equal on all ranks. Collective."""
        replica_group = self.mesh.group("tp") if self.mesh.degrees.tp > 1 else None
        extra_sums = None if accumulator is None else accumulator.sums / self.forward_runner.replicas
        group = self.mesh.group("dp_cp")
        total = reduction.all_reduce(
            losses, losses[0].device, extra_sums=extra_sums, group=group, replica_group=replica_group
        )
        for axis in self.axes:
            axis.reduce_losses(total)
        return self._bookkeeping.unpack_loss(total, accumulator, reduction).to(losses[0].dtype)

    def _bind_objective(self, objective: Objective | None) -> BoundObjective | None:
        return self._bookkeeping.bind_objective(objective, self.forward_runner.argument_names)

    def _start_accumulator(
        self, objective: BoundObjective | None, microbatches: Sequence[Batch]
    ) -> ObjectiveAccumulator | None:
        needs_token_loss = objective is None or objective.input_kind == "tokens"
        self.forward_runner.probe(model_inputs(objective, microbatches), needs_token_loss=needs_token_loss)
        return self._bookkeeping.start_accumulator(
            objective, functools.partial(self.forward_runner.probe_objective, microbatches[0])
        )

    def _build_requirements(self, objective: BoundObjective | None) -> BatchRequirements:
        frozen = compute_frozen_share(self.mesh, ((name, 0, 1) for name in self.trainable_parameters.find_frozen()))
        return self.forward_runner.build_requirements(self.check_step, objective, frozen)

    def _choose_activations(self, microbatches: Sequence[Batch]) -> None:
        """Choose once, under a memory budget, which activations blocks save. Collective."""
        if self.checkpointed_blocks is None:
            return
        from ..model.activation_budget import SINGLE_STAGE, choose_saved_activations, find_undecided

        largest, world = max(microbatches, key=lambda batch: batch["input_ids"].numel()), self.mesh.world
        for blocks in find_undecided([self.checkpointed_blocks]):
            choose_saved_activations(
                [blocks], [lambda: self.forward_runner.dry_run(largest)], [world], SINGLE_STAGE, world
            )

    # -- the optimizer

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Build the optimizer, and check that it steps sharded parameters as it would step full ones. Collective."""
        from ..optim.shard_check import call_optimizer_factory, check_optimizer

        self._require_model()
        named, trained = self.named_trainable_parameters(), self.describe_trained_params()
        self.parameter_names = {parameter: name for name, parameter in named}
        optimizer = self.mesh.world.run_on_all_ranks(
            lambda: call_optimizer_factory(bind_to_model(factory, trained), named)
        )
        check_optimizer(optimizer, self.shard_layout, self.mesh.world)
        self._optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self._bookkeeping.finalize())
        optimizer.register_step_pre_hook(lambda *_: self.drop_frozen_gradients())
        return optimizer

    def describe_trained_params(self) -> dict[str, ParamTraits]:
        """Describe the unsharded parameters that the optimizer trains, by name."""
        named = self.named_trainable_parameters()
        return describe_trained_params(
            self.model, self.layout, named, lambda each: self.shard_layout.get_full_shape(each, each)
        )

    @property
    def optimizer(self) -> Optimizer:
        return require_optimizer(self._optimizer)

    @property
    def has_optimizer(self) -> bool:
        return self._optimizer is not None

    def drop_frozen_gradients(self) -> None:
        """Drop the gradients of parameters that are currently frozen; see [Note: frozen later]."""
        frozen = self.trainable_parameters.find_frozen()
        for name, trained in self.named_trainable_parameters() if frozen else ():
            if name in frozen:
                trained.grad = None

    def optimizer_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def drop_gradients(self) -> None:
        self._bookkeeping.finalize()
        self.optimizer.zero_grad(set_to_none=True)

    # -- moving averages

    def enable_ema(self) -> Sequence[EMAWeights]:
        """Start moving averages of the weights; see `meshwright.training.loop.ema.EMA`."""
        require_optimizer(self._optimizer)
        if self.ema_weights is not None:
            raise StrategyError("this manager keeps an average of its weights already. Use that one.")
        self.ema_weights = EMAWeights(self.parameter_names, self.shard_layout)
        return [self.ema_weights]

    @contextmanager
    def swap_ema(self) -> Iterator[None]:
        """Replace the weights by their averages within the context. Collective. Raises StrategyError without EMA."""
        if self.ema_weights is None:
            raise StrategyError("this manager keeps no average of its weights. Make one first (mw.EMA).")
        with self.load_sharded_state(None):
            swapped = self.ema_weights.swap()
        try:
            yield
        finally:
            with self.load_sharded_state(None):
                swapped.restore()

    # -- state

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        self._require_model()
        state: dict[str, Any] = {
            "model": states.get_model_state_dict(self.model, self.mesh.world, full=full, shard_layout=self.shard_layout)
        }
        if self._optimizer is not None:
            state["optimizer"] = self.optimizer_state_dict(full=full)
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        self._require_model()
        states.load_model_state_dict(
            self.model, state["model"], self.mesh.world, full=full, shard_layout=self.shard_layout
        )
        if self._optimizer is not None:
            self.load_optimizer_state_dict(state.get("optimizer", {}), full=full)

    def sharded_state(self) -> ShardedState:
        optimizer = self._optimizer and states.get_sharded_optimizer_state(
            self._optimizer, self.parameter_names, self.shard_layout
        )
        return replace(self._get_sharded_weights(), optimizer=optimizer)

    def parameter_chunks(self) -> dict[str, ChunkedTensor | None]:
        self._require_model()
        return {
            name: states.to_chunked_tensor(value, value, self.shard_layout)
            for name, value in self.model.named_parameters()
        }

    @contextmanager
    def load_sharded_state(self, optimizer: OptimizerState[TensorMeta] | None) -> Iterator[ShardedState]:
        state = self._get_sharded_weights()
        if optimizer is None:
            yield state
        else:
            with states.load_sharded_optimizer(
                self.optimizer, self.parameter_names, optimizer, self.shard_layout
            ) as target:
                yield replace(state, optimizer=target)
        self.after_load()

    def _get_sharded_weights(self) -> ShardedState:
        self._require_model()
        ema_weights = self.ema_weights.to_chunked_tensors() if self.ema_weights is not None else {}
        return ShardedState(states.get_sharded_model_state(self.model, self.shard_layout), ema_weights=ema_weights)
