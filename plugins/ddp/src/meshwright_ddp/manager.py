"""The manager of `ddp`: replicate the model and sum gradients, with the engine that the config selects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.plugin import (
    Batch,
    ChunkedTensor,
    DataParallelManager,
    GradientReport,
    Gradients,
    Mesh,
    OptimizerFactory,
    OptimizerState,
    ShardedState,
    TensorMeta,
    checkpoint_blocks,
    coerce_config,
    from_device_mesh,
)

from .bucketed_ddp import BucketedDataParallel
from .config import AXES, DDPConfig, DistributedDataParallelConfig
from .distributed_optimizer import OptimizerShardLayout, ShardGradients
from .torch_engine import PipelineStageEngine, TorchEngine


class DDPManager(DataParallelManager):
    """Replicated data parallelism; see `DataParallelManager`.

    With the distributed optimizer, this rank trains 1-D shards of parameters (see `OptimizerShardLayout`); without it,
    full parameters.

    Args:
        config: options, or a mapping of them. An instance of the reference's class selects the bucketed engine.
        device_mesh: a `meshwright.Mesh`, or a DeviceMesh of torch; see `meshwright.mesh.mesh.from_device_mesh`.

    Raises:
        MeshError: the DeviceMesh is not supported, or its backend differs from the config's.
        StrategyError: the config delegates to another strategy.
    """

    config: DDPConfig
    supports_pipeline: ClassVar[bool] = True
    _torch_engine: TorchEngine | PipelineStageEngine | None = None
    _bucketed_engine: BucketedDataParallel | None = None

    def __init__(
        self, config: DDPConfig | DistributedDataParallelConfig | Mapping[str, Any], device_mesh: Mesh | DeviceMesh
    ) -> None:
        ddp_config = coerce_config(DDPConfig, config, where="DDPManager")
        ddp_config.check_not_delegated()
        mesh = from_device_mesh(device_mesh, AXES)
        super().__init__(ddp_config, mesh)
        mesh.check_backend(ddp_config.backend)

    @property
    def _shards(self) -> OptimizerShardLayout | None:
        return self._bucketed_engine.shards if self._bucketed_engine is not None else None

    def shard(self, model: nn.Module) -> nn.Module:
        model.to(self.mesh.device)
        self.checkpointed_blocks = checkpoint_blocks(model, self.layout, self.config.activation_checkpointing)
        if self.config.engine == "torch" and self.is_pipeline_stage:
            self._torch_engine = PipelineStageEngine(self, self.config)
            return model
        if self.config.engine == "torch":
            self._torch_engine = TorchEngine(model, self.config, self.mesh)
            # torch rebuilds buckets after the first step, and broadcasts the layout in the second.
            self.steady_after_steps = 2
            return self._torch_engine.module
        self._bucketed_engine = BucketedDataParallel(model, self.config, self.mesh)
        if self._bucketed_engine.shards is not None:
            self.shard_layout = self._bucketed_engine.shards
        return self._bucketed_engine

    # -- gradients

    def step_context(self, microbatches: Sequence[Batch]) -> AbstractContextManager[None]:
        """Start a step of the bucketed engine. Collective with `align_param_gather`."""
        if self._bucketed_engine is not None:
            if self.module.training:
                # Also needed after a step that exited with an error.
                self._bucketed_engine.zero_grad_buffer()
            self._bucketed_engine.param_gather.begin_step()
        return nullcontext()

    def microbatch_context(self, *, is_last: bool) -> AbstractContextManager[None]:
        if self._torch_engine is not None:
            return self._torch_engine.microbatch_context(is_last=is_last)
        return nullcontext() if is_last or self._bucketed_engine is None else self._bucketed_engine.no_sync()

    def after_backward(self, *, is_last: bool) -> None:
        if self._torch_engine is not None:
            self._torch_engine.after_backward(is_last=is_last)

    @property
    def can_defer_reduction(self) -> bool:
        # With overlap, the bucketed engine reduces during backward, so it cannot wait for deferred gradients.
        return self._bucketed_engine is None or not self._bucketed_engine.config.overlap_grad_reduce

    def reduce_gradients(self) -> None:
        if isinstance(self._torch_engine, PipelineStageEngine):
            self._torch_engine.reduce_gradients()
        elif self._bucketed_engine is not None:
            self._bucketed_engine.start_grad_sync()

    def report_gradients(self) -> GradientReport | None:
        return (
            self._bucketed_engine.finish_grad_reduction(allow_unused=True)
            if self._bucketed_engine is not None
            else None
        )

    def iter_trainable(self) -> Iterator[nn.Parameter]:
        """Yield parameters; with the distributed optimizer this rank's shards, 1-D and possibly empty."""
        if self._shards is None:
            return super().iter_trainable()
        return (shard.optimizer_parameter for shard in self._shards)

    def build_gradients(self) -> Gradients:
        shards, use_float64 = self._shards, self.config.reduce_dtype is not None
        return (
            super().build_gradients() if shards is None else ShardGradients(shards, self.mesh, use_float64=use_float64)
        )

    # -- the distributed optimizer

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Build the optimizer; the distributed one runs over shards, in float32 for half-precision parameters."""
        self._require_model()
        shards, engine = self._shards, self._bucketed_engine
        if shards is None or engine is None:
            return super().build_optimizer(factory)
        shards.copy_model_to_masters()
        optimizer = super().build_optimizer(factory)
        optimizer.register_step_post_hook(lambda *_: engine.after_optimizer_step())
        return optimizer

    def named_trainable_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        if self._shards is None:
            return super().named_trainable_parameters()
        return [(shard.name, shard.optimizer_parameter) for shard in self._shards]

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        self._gather_parameters()
        with super().unshard() as parts:
            yield parts

    def state_dict(self, *, full: bool = False) -> dict[str, Any]:
        self._gather_parameters()
        return super().state_dict(full=full)

    def load_state_dict(self, state: Mapping[str, Any], *, full: bool = False) -> None:
        self._gather_parameters()
        super().load_state_dict(state, full=full)

    def optimizer_state_dict(self, *, full: bool) -> dict[str, Any]:
        """Return the state; "masters" has the float32 values of half-precision parameters, by name."""
        state = super().optimizer_state_dict(full=full)
        masters = self._shards.copy_masters(full=full) if self._shards is not None else {}
        if state and masters:
            state["masters"] = masters
        return state

    def load_optimizer_state_dict(self, state: Mapping[str, Any], *, full: bool) -> None:
        super().load_optimizer_state_dict(state, full=full)
        if self._shards is not None:
            self._shards.load_masters(state.get("masters", {}), full=full, group=self.mesh.world.group)

    def sharded_state(self) -> ShardedState:
        self._gather_parameters()
        state = super().sharded_state()
        self._replace_with_masters(state)
        return state

    def parameter_chunks(self) -> dict[str, ChunkedTensor | None]:
        self._gather_parameters()
        return super().parameter_chunks()

    @contextmanager
    def load_sharded_state(self, optimizer: OptimizerState[TensorMeta] | None) -> Iterator[ShardedState]:
        self._gather_parameters()
        with super().load_sharded_state(optimizer) as target:
            self._replace_with_masters(target)
            yield target

    def after_load(self) -> None:
        if self._bucketed_engine is not None and self.has_optimizer:
            self._bucketed_engine.after_optimizer_step()

    def _replace_with_masters(self, state: ShardedState) -> None:
        """Replace parameters by the masters that they are rounded from."""
        if self._shards is not None and self.has_optimizer:
            state.model.update(self._shards.sharded_masters())

    def _gather_parameters(self) -> None:
        if self._bucketed_engine is not None:
            self._bucketed_engine.param_gather.gather_all()
