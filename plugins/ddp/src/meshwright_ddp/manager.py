"""The manager of `ddp`: replicate the model and sum gradients, with the engine that the configuration names."""

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

    With the distributed optimizer, this rank trains stretches of parameters, 1-D (see `optimizer.Shards`); without it,
    whole parameters.

    Args:
        config: options, or a mapping of them; the reference's class alone means the bucketed engine.
        device_mesh: a `meshwright.Mesh`, or a DeviceMesh of torch; see `meshwright.mesh.mesh.from_device_mesh`.

    Raises:
        MeshError: a DeviceMesh that is not understood, or another backend than the config says.
        StrategyError: the config hands over to another strategy.
    """

    config: DDPConfig
    supports_pipeline: ClassVar[bool] = True
    _torch_engine: TorchEngine | PipelineStageEngine | None = None
    _bucketed_engine: BucketedDataParallel | None = None

    def __init__(
        self, config: DDPConfig | DistributedDataParallelConfig | Mapping[str, Any], device_mesh: Mesh | DeviceMesh
    ) -> None:
        own = coerce_config(DDPConfig, config, where="DDPManager")
        own.check_not_delegated()
        mesh = from_device_mesh(device_mesh, AXES)
        super().__init__(own, mesh)
        mesh.check_backend(own.backend)

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
            # torch lays buckets out anew after the first step, and broadcasts the layout in the second.
            self.steady_after_steps = 2
            return self._torch_engine.module
        self._bucketed_engine = BucketedDataParallel(model, self.config, self.mesh)
        if self._bucketed_engine.shards is not None:
            self.shard_layout = self._bucketed_engine.shards
        return self._bucketed_engine

    # -- gradients

    def step_context(self, microbatches: Sequence[Batch]) -> AbstractContextManager[None]:
        """Begin a step of the bucketed engine. Collective with `align_param_gather`."""
        if self._bucketed_engine is not None:
            if self.module.training:
                # Also after a step that was left by an error.
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
        # With overlap the bucketed engine reduces in backward, and nothing waits for it there.
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
        """Yield parameters, or with the distributed optimizer this rank's shards, 1-D and possibly empty."""
        if self._shards is None:
            return super().iter_trainable()
        return (shard.optimizer_parameter for shard in self._shards)

    def build_gradients(self) -> Gradients:
        shards, wide = self._shards, self.config.reduce_dtype is not None
        return super().build_gradients() if shards is None else ShardGradients(shards, self.mesh, use_float64=wide)

    # -- the distributed optimizer

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Build the optimizer; with the distributed one over shards, in float32 where parameters are of half types."""
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
        """Return the state; "masters" holds the float32 values of parameters of half types, by name."""
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
        """Put masters in the place of the parameters that are rounded from them."""
        if self._shards is not None and self.has_optimizer:
            state.model.update(self._shards.sharded_masters())

    def _gather_parameters(self) -> None:
        if self._bucketed_engine is not None:
            self._bucketed_engine.param_gather.gather_all()
