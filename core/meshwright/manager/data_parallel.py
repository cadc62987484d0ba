"""The part that all strategies share in which each rank runs the whole model on its own microbatches.

A strategy subclasses `DataParallelManager` and says in `shard` how the model is laid out, and in `sync_gradients` how
the reduction waits for the last microbatch. `single` shows the smallest one.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..base.errors import ModelError, StrategyError
from ..base.validation import NO_FLOAT16
from ..mesh.mesh import Mesh
from ..mesh.world import same_timeout
from ..model.layout import ModelLayout
from ..model.weights import Weights, deferred_weights, fill, is_meta, materialize
from ..step.batch import check_step
from ..step.forward_options import forward_options, with_router_logits
from ..step.router_loss import Notes, RouterLoss, find_routers
from ..step.token_loss import target_loss_sum, targets
from ..strategy.ask import model_layout
from ..strategy.contract import Batch, OptimizerFactory, StrategyManager
from ..tensors.norms import check_clip, scale_to_norm, total_grad_norm
from ..tensors.state import (
    DTENSORS,
    OptimizerState,
    Parts,
    ShardedState,
    TensorKind,
    load_model_state,
    load_optimizer_state,
    loading_optimizer,
    model_state,
    optimizer_state,
    sharded_model,
    sharded_optimizer,
)
from .optimizer_trial import call_factory, check_optimizer

if TYPE_CHECKING:
    from ..parallel.context import ContextParallel
    from ..parallel.tensor import TensorParallel


class DataParallelManager(StrategyManager):
    """Forward, backward, clipping, stepping and state for strategies with one model part on every rank.

    Attributes:
        model: the Hugging Face model, unwrapped; its parameters may have been sharded in place.
        module: what `parallelize` returned, which is called; a wrapper around `model`, or `model` itself.
        layout: the model's structure as it was before sharding.
        parameter_names: fully qualified names of what the optimizer trains, as it is after sharding.
        tensor_parallel: what shards the model along `tp`, for strategies that claim it and set this in `shard`; None
            where `tp` has one rank.
        context_parallel: what divides sequences along `cp`, for strategies that claim it and set this in `shard`; None
            where `cp` has one rank.
        parts: how parameters and optimizer state are divided over ranks, for strategies that use no DTensors.
    """

    model: nn.Module
    module: nn.Module
    layout: ModelLayout
    parameter_names: Mapping[nn.Parameter, str]
    tensor_parallel: TensorParallel | None = None
    context_parallel: ContextParallel | None = None
    parts: Parts = DTENSORS
    shards_on_meta: ClassVar[bool] = False
    """Whether `shard` takes a model on the meta device, which gets memory and values afterwards; else it gets them
    before, and `shard` sees a whole model."""
    in_pipeline: bool = False
    """Whether the model is one stage of a pipeline, which sets this before `parallelize`. It calls the methods below
    by itself: many forwards may come before their backwards, `sync_gradients` surrounds backwards alone, and the stage
    may have no parameter that trains."""
    runs_in_pipeline: ClassVar[bool] = False
    """Whether the strategy heeds `in_pipeline`."""

    def __init__(self, config: BaseModel, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self._optimizer: Optimizer | None = None
        self._parallelized = False
        self._plan_is_checked = False
        self._router_loss: RouterLoss | None = None
        self._router_loss_is_checked = False
        self._router_notes: Notes | None = None

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

    def trained_as(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer trains of a parameter of the model, which has its gradient after `check_gradients`."""
        return parameter

    def copy_of_gradient(self, trained: nn.Parameter) -> Tensor:
        """In a pipeline, of what `trained_as` gives: its gradient as it is added to those of copies on other stages, of
        the same shape on each."""
        gradient = trained.grad if trained.grad is not None else torch.zeros_like(trained)
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def take_sum_of_copies(self, trained: nn.Parameter, total: Tensor) -> None:
        """Make the sum of what `copy_of_gradient` has given on all stages the gradient. Collective on the stage.

        Args:
            total: it may be changed.
        """
        if trained.grad is None:
            trained.grad = torch.zeros_like(trained)
        local = trained.grad.to_local() if isinstance(trained.grad, DTensor) else trained.grad
        local.copy_(total)

    def reduce_gradients(self) -> None:
        """In a pipeline whose backwards were all run with `sync_gradients(is_last=False)`: what the last one does."""

    def check_gradients(self) -> None:
        """Called after the last microbatch: refuse gradients that the strategy cannot have reduced rightly."""

    # -- the contract

    @property
    def model_parts(self) -> Sequence[nn.Module]:
        self._require_model()
        return [self.model]

    def parallelize(self, model: nn.Module, weights: Weights | None = None) -> nn.Module:
        if self._parallelized:
            raise StrategyError("parallelize was called twice on one manager. Build another manager for another model.")
        check_trainable(model, may_be_frozen=self.in_pipeline, router_loss=True)
        if not self.in_pipeline:
            self.check_model(model)
        check_reduce_dtype(model, getattr(self.config, "reduce_dtype", None))
        self.layout = model_layout(model)
        self._config = getattr(model, "config", None)
        # A pipeline adds it over its stages.
        self._router_loss = RouterLoss(self._config) if asks_for_router_loss(model) and not self.in_pipeline else None
        self._forward_options = forward_options(model, in_parts=self.in_pipeline or self.mesh.degrees.cp > 1)
        if weights is None and is_meta(model):
            weights = deferred_weights(model, self.mesh)
        if weights is None:
            copy_from_first_rank(model, self.mesh)
        else:
            _share_random_state(self.mesh)
            if not self.shards_on_meta:
                materialize(model, self.mesh.device)
                fill(model, weights)
        self.model = model
        with same_timeout():
            self.module = self.shard(model)
        if weights is not None and self.shards_on_meta:
            materialize(model, self.mesh.device, parameters_on=self.parameters_on)
            fill(model, weights, self.parts.pieces)
            self.after_loading()
        self._parallelized = True
        return self.module

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        self._require_model()
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.parameter_names = {parameter: name for name, parameter in named}
        self._optimizer = self.made(factory, named)
        return self._optimizer

    def made(self, factory: OptimizerFactory, named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
        """The factory's optimizer, if it steps these parameters as it would step whole ones. Collective.

        Args:
            named: what is trained, as `parts` knows it.

        Raises:
            StrategyError: on all ranks alike; names the optimizer.
            ConfigError: of the factory of a run file, likewise.
        """
        optimizer = self.mesh.world.together(lambda: call_factory(factory, named))
        check_optimizer(optimizer, self.parts, self.mesh.world)
        return optimizer

    def forward_backward(self, microbatches: Sequence[Batch], *, num_tokens: Tensor) -> Tensor:
        self._require_model()
        microbatches = self._checked_step(microbatches, num_tokens)
        if any(parameter.grad is not None for parameter in self.trainable()):
            # A second reduction would reduce the first one's result again.
            raise StrategyError(
                "forward_backward was called while gradients of the last call are pending. Give all microbatches of a "
                "step in one call, and call optimizer_step (or set the gradients to None) before the next."
            )
        if not self.module.training:
            self.module.train()
        losses = []
        with self.attention_switched(), self.around_step(microbatches):
            self.check_context(microbatches)
            self.choose_loss(microbatches[0])
            for index, batch in enumerate(microbatches):
                is_last = index == len(microbatches) - 1
                with self.sync_gradients(is_last=is_last):
                    loss = self.share_of_loss(self.divide(batch), num_tokens, microbatches=len(microbatches))
                    loss.backward()
                self.after_backward(is_last=is_last)
                losses.append(loss.detach())
        self.check_gradients()
        self.check_plan()
        return self._sum_over_ranks(losses)

    def eval_loss(self, microbatches: Sequence[Batch], *, num_tokens: Tensor) -> Tensor:
        self._require_model()
        microbatches = self._checked_step(microbatches, num_tokens)
        was_training = self.module.training
        self.module.eval()
        try:
            with self.attention_switched(), self.around_step(microbatches), torch.no_grad():
                self.check_context(microbatches)
                losses = [
                    self.share_of_loss(self.divide(batch), num_tokens, microbatches=len(microbatches))
                    for batch in microbatches
                ]
        finally:
            self.module.train(was_training)
            self.after_eval()
        return self._sum_over_ranks(losses)

    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2.0) -> Tensor:
        check_clip(max_norm, norm_type)
        norm = self.grad_norm(norm_type)
        if max_norm is not None:
            self.scale_gradients(norm, max_norm)
        return norm

    def grad_norm(self, norm_type: float, *, without: Collection[nn.Parameter] = ()) -> Tensor:
        """The total norm of all gradients but those of some parameters; float64 scalar on the mesh's device, equal on
        all ranks."""
        # Who asks for sums that do not depend on the layout wants the same of the factor that clips them.
        wide = getattr(self.config, "reduce_dtype", None) is not None
        left_out = set(without)
        pairs = [(p.grad, p) for p in self.trainable() if p.grad is not None and p not in left_out]
        groups = [self.parts.groups(parameter) for _, parameter in pairs]
        gradients = [grad for grad, _ in pairs]
        return total_grad_norm(gradients, norm_type, wide=wide, groups=groups, device=self.mesh.device)

    def scale_gradients(self, norm: Tensor, max_norm: float) -> None:
        """Multiply all gradients by min(1, max_norm / norm)."""
        scale_to_norm([p.grad for p in self.trainable() if p.grad is not None], norm, max_norm)

    def optimizer_step(self) -> None:
        optimizer = self.optimizer
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        self._require_model()
        yield [self.model]

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        self._require_model()
        state: dict[str, Any] = {"model": model_state(self.model, self.mesh.world, full=full, parts=self.parts)}
        if self._optimizer is not None:
            state["optimizer"] = self.optimizer_state(full=full)
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        self._require_model()
        load_model_state(self.model, state["model"], self.mesh.world, full=full, parts=self.parts)
        if self._optimizer is not None:
            self.load_optimizer_state(state.get("optimizer", {}), full=full)

    def optimizer_state(self, *, full: bool) -> dict[str, Any]:
        """The optimizer's part of `state_dict`; for strategies to replace whose optimizer is divided in its own way."""
        return optimizer_state(self.optimizer, self.parameter_names, self.mesh.world, full=full, parts=self.parts)

    def load_optimizer_state(self, state: Mapping[str, Any], *, full: bool) -> None:
        """The optimizer's part of `load_state_dict`."""
        load_optimizer_state(self.optimizer, self.parameter_names, state, self.mesh.world, full=full, parts=self.parts)

    def sharded_state(self) -> ShardedState:
        self._require_model()
        optimizer = self._optimizer and sharded_optimizer(self._optimizer, self.parameter_names, self.parts)
        return ShardedState(sharded_model(self.model, self.parts), optimizer)

    @contextmanager
    def loading(self, optimizer: OptimizerState[TensorKind] | None) -> Iterator[ShardedState]:
        self._require_model()
        model = sharded_model(self.model, self.parts)
        if optimizer is None:
            yield ShardedState(model)
        else:
            with loading_optimizer(self.optimizer, self.parameter_names, optimizer, self.parts) as target:
                yield ShardedState(model, target)
        self.after_loading()

    def after_loading(self) -> None:
        """Called when parameters and optimizer state have been written in place."""

    # -- helpers

    def divide(self, batch: Batch) -> Batch:
        """This rank's part of a microbatch, as `share_of_loss` and `outputs` take it."""
        return batch if self.context_parallel is None else self.context_parallel.divide(batch)

    def attention_switched(self) -> AbstractContextManager[None]:
        """Around all forwards and backwards of a step or evaluation: attention knows of context parallelism."""
        return nullcontext() if self.context_parallel is None else self.context_parallel.switched()

    def share_of_loss(self, batch: Batch, num_tokens: Tensor, *, microbatches: int = 1) -> Tensor:
        """The forward of one microbatch: the sum of its token losses over the token count of the step, and its share of
        the router loss where the model's configuration asks for one.

        Args:
            batch: as `divide` gives it.
            microbatches: of the step; for the router loss alone, which pipelines add by themselves.
        """
        inputs, targets_BS = self.without_targets(self.on_device(batch))
        outputs: list[Any] = []

        def logits() -> Tensor:
            outputs.append(self.outputs(inputs))
            given: Tensor = outputs[0].logits
            return given

        with nullcontext() if self._router_notes is None else self._router_notes.noting() as noted:
            if self.tensor_parallel is not None:
                loss = self.tensor_parallel.target_loss_sum(logits, targets_BS) / num_tokens
            else:
                loss = target_loss_sum(logits(), targets_BS) / num_tokens
        if self._router_loss is None:
            return loss
        router_loss, mask = self._router_loss, self.own_mask(inputs)
        if noted is None and not self._router_loss_is_checked:
            self.mesh.world.together(lambda: router_loss.check(outputs[0], mask))
            self._router_loss_is_checked = True
        sums = router_loss.sums(outputs[0].router_logits if noted is None else noted, mask)
        return loss + router_loss.share(sums, group=self.mesh.group("dp_cp"), microbatches=microbatches)

    def own_mask(self, batch: Batch) -> Tensor | None:
        """The attention mask of the positions that this rank has of a microbatch; None where it has no mask."""
        mask = batch.get("attention_mask")
        return mask if mask is None or self.context_parallel is None else self.context_parallel.own(mask)

    def without_targets(self, batch: Batch) -> tuple[Batch, Tensor]:
        """What the model is called with, of a microbatch as `divide` gives it, and the label of each position."""
        if self.context_parallel is not None:
            return self.context_parallel.without_targets(batch)
        return {name: tensor for name, tensor in batch.items() if name != "labels"}, targets(batch["labels"])

    def outputs(self, inputs: Batch, **options: Any) -> Any:
        """What the module returns for a microbatch without labels, on this rank's device.

        Args:
            options: of its forward, beside those with which it is always called.
        """
        running = nullcontext(inputs) if self.context_parallel is None else self.context_parallel.running(inputs)
        with running as given:
            return self.module(**given, **{**self._forward_options, **options})

    def on_device(self, batch: Batch) -> dict[str, Tensor]:
        """A microbatch on this rank's device."""
        return {name: tensor.to(self.mesh.device, non_blocking=True) for name, tensor in batch.items()}

    def choose_loss(self, batch: Batch) -> None:
        """Before the first step, on a few tokens of one sequence: whether tensor parallelism can shard the loss."""
        parallel = self.tensor_parallel
        if parallel is None or not parallel.loss_is_open:
            return
        shape = batch["input_ids"].shape
        multiple = self.sequence_multiple
        length = min(shape[1], multiple * -(-_FEW_TOKENS // multiple))
        few = {name: tensor[:1, :length] if tensor.shape[:2] == shape else tensor[:1] for name, tensor in batch.items()}
        inputs, _ = self.without_targets(self.on_device(self.divide(few)))
        parallel.choose_loss(lambda: self.outputs(inputs).logits)

    def check_context(self, microbatches: Sequence[Batch]) -> None:
        """Before the first step: refuse a model that context parallelism would train wrongly.

        Args:
            microbatches: as they were given.

        Raises:
            ModelError, BatchError: on all ranks.
        """
        parallel = self.context_parallel
        if parallel is None or not parallel.is_open:
            return
        multiple = self.tensor_parallel.sequence_multiple if self.tensor_parallel is not None else 1
        ids = microbatches[0]["input_ids"].to(self.mesh.device)
        was_training = self.module.training
        self.module.eval()
        try:
            defect = parallel.check(ids, self.outputs, multiple)
            if defect is None:
                defect = self._find_routers(ids[:1, : multiple * -(-_FEW_TOKENS // multiple)])
        finally:
            self.module.train(was_training)
            self.after_eval()
        self.mesh.world.raise_together(defect)
        # Again, now that more is known of the model.
        self.mesh.world.together(lambda: self.check_division(microbatches))

    def _find_routers(self, ids_BS: Tensor) -> ModelError | None:
        """Under context parallelism: note the logits of routers from now on; what is wrong with them, if anything."""
        loss, parallel = self._router_loss, self.context_parallel
        if loss is None or parallel is None:
            return None
        try:
            with parallel.observed():
                run = functools.partial(
                    self.outputs, {"input_ids": ids_BS}, **with_router_logits(self._forward_options)
                )
                self._router_notes = find_routers(self.model, loss, run).watch(self.model)
        except ModelError as error:
            return error
        return None

    def check_plan(self) -> None:
        """In the first step: whether the tensor-parallel plan names every parameter that it should."""
        if self.tensor_parallel is None or self._plan_is_checked:
            return
        self._plan_is_checked = True
        names = self.tensor_parallel.differing_gradients(self.parts)
        told = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        self.mesh.world.raise_together(
            StrategyError(
                f"the tensor-parallel plan replicates {told}, whose gradients differ between the ranks of tp, so it "
                f"meets sharded activations. Give it the style replicated_with_grad_allreduce in tp_plan; nothing was "
                f"trained."
            )
            if names
            else None
        )

    def _checked_step(self, microbatches: Sequence[Batch], num_tokens: Tensor) -> list[Batch]:
        multiple = self.sequence_multiple
        checked = check_step(
            microbatches, num_tokens, self.mesh, vocab_size=self._vocab_size, sequence_multiple=multiple
        )
        if self.context_parallel is not None:
            self.mesh.world.together(lambda: self.check_division(checked))
        return checked

    def check_division(self, microbatches: Sequence[Batch]) -> None:
        """Refuse microbatches of this rank that context parallelism cannot divide; no collective.

        Raises:
            BatchError: see `ContextParallel.check_batch`.
        """
        if self.context_parallel is not None:
            for batch in microbatches:
                self.context_parallel.check_batch(batch)

    def _sum_over_ranks(self, losses: Sequence[Tensor]) -> Tensor:
        # In float64, so that the sum does not depend on how microbatches are spread over ranks.
        total = torch.stack(list(losses)).sum(dtype=torch.float64)
        dist.all_reduce(total, group=self.mesh.group("dp_cp"))
        return total.to(losses[0].dtype)

    def trainable(self) -> Iterator[nn.Parameter]:
        """The parameters that train, each once, as they are after sharding."""
        return (parameter for parameter in self.model.parameters() if parameter.requires_grad)

    def fill_missing_gradients(self) -> None:
        """Give zeros to parameters that other ranks have a gradient of and this one has not.

        For strategies that reduce parameter by parameter: afterwards all ranks have gradients of the same parameters,
        and those that no rank uses keep none, as under `single`. Collective.
        """
        parameters = list(self.trainable())
        used = self.mesh.world.reduce_ints([int(p.grad is not None) for p in parameters], dist.ReduceOp.MAX)
        for parameter, is_used in zip(parameters, used, strict=True):
            if is_used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    @property
    def _vocab_size(self) -> int | None:
        return getattr(self._config, "vocab_size", None)

    def _require_model(self) -> None:
        if not self._parallelized:
            raise StrategyError("the manager has no model yet: call manager.parallelize(model) first.")

    @property
    def has_optimizer(self) -> bool:
        """Whether `build_optimizer` has been called."""
        return self._optimizer is not None

    @property
    def sequence_multiple(self) -> int:
        """What the length of a sequence must be a multiple of."""
        parallels = (self.tensor_parallel, self.context_parallel)
        return math.prod(each.sequence_multiple for each in parallels if each is not None)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer.

        Raises:
            StrategyError: `build_optimizer` has not been called.
        """
        if self._optimizer is None:
            raise StrategyError("the manager has no optimizer yet: call manager.build_optimizer(factory) first.")
        return self._optimizer


_FEW_TOKENS = 8


def asks_for_router_loss(model: nn.Module) -> bool:
    """Whether the model's configuration asks for a router loss beside the token loss."""
    return bool(getattr(getattr(model, "config", None), "output_router_logits", False))


def check_trainable(model: nn.Module, *, may_be_frozen: bool = False, router_loss: bool = False) -> None:
    """Refuse what would train wrongly or not at all.

    Args:
        router_loss: the caller adds the router loss where the configuration asks for one.

    Raises:
        ModelError: on all ranks alike, since all hold the same model.
    """
    if not may_be_frozen and not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("no parameter of the model requires a gradient. Unfreeze what is to be trained.")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype is torch.float16:
            raise ModelError(
                f"{name} is to be trained in float16: {NO_FLOAT16}. Load the model in bfloat16 or float32."
            )
    if asks_for_router_loss(model) and not router_loss:
        raise ModelError(
            "config.output_router_logits=True asks for a router loss beside the token loss, which loops by hand, and "
            "pipelines whose stages are given (patch_inner_model=false), do not add. Set it to False to train on the "
            "token loss alone."
        )


def check_reduce_dtype(model: nn.Module, reduce_dtype: str | None) -> None:
    """Refuse sums that are coarser than what is summed.

    Raises:
        ModelError: on all ranks alike.
    """
    if reduce_dtype is None:
        return
    dtype = getattr(torch, reduce_dtype)
    for name, parameter in model.named_parameters():
        if torch.promote_types(dtype, parameter.dtype) != dtype:
            raise ModelError(
                f"reduce_dtype={reduce_dtype} is coarser than the gradients of {name} ({parameter.dtype}). "
                f"Leave reduce_dtype out, or use a wider one."
            )


def copy_from_first_rank(model: nn.Module, mesh: Mesh) -> None:
    """Give every rank that trains the same part of the model the parameters and buffers of the first one.

    Copies from different seeds or files would else train as a chimera, without any error. Ranks along `tp` also get
    the random state of the first, since dropout must fall on the same elements of what they all hold.
    """
    for axis in ("pp", "dp", "cp", "tp"):
        if getattr(mesh.degrees, axis) == 1:
            continue
        group = mesh.group(axis)
        for tensor in (*model.parameters(), *model.buffers()):
            staged = tensor.detach().to(mesh.device).contiguous()
            dist.broadcast(staged, group=group, group_src=0)
            tensor.data.copy_(staged)
    _share_random_state(mesh)


def _share_random_state(mesh: Mesh) -> None:
    if mesh.degrees.tp == 1:
        return
    seed = torch.randint(2**62, (1,)).to(mesh.device)
    dist.broadcast(seed, group=mesh.group("tp"), group_src=0)
    torch.manual_seed(int(seed))
