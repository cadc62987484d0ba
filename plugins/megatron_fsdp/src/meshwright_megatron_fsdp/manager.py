"""The `megatron_fsdp` manager: NVIDIA's Megatron-FSDP with ZeRO 0 to 3 and HSDP, on GPUs and on a CPU.

The package shards parameters, gradients and optimizer state in its own buffers, unit by unit. Gradients are summed,
never averaged. Tensor parallelism is meshwright's, with plain tensors: each data-parallel group trains this rank's
shards like a separate model, and the package does not know about `tp`.
Source: megatron-fsdp 0.6.1, github.com/NVIDIA/Megatron-LM; Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.plugin import (
    ChunkedTensor,
    ContextParallel,
    DataParallelManager,
    GradientReport,
    Mesh,
    MeshError,
    ModelError,
    OptimizerFactory,
    ParameterSharding,
    StrategyError,
    TensorParallel,
    checkpoint_blocks,
    coerce_config,
    from_device_mesh,
    has_meta_tensors,
    uses_expandable_segments,
    warn,
    warn_unused_options,
)

from ._compat.cpu_torch import use_cpu_torch
from ._compat.package import has_nccl_allocator, import_package
from ._compat.wrap_model import wrap_model
from ._compat.wrapped_model import (
    count_units_without_double_buffer,
    find_shard_ranges,
    unshard_parameters,
    use_sharded_parameters,
    wait_for_prefetched_gathers,
)
from .config import AXES, MegatronFSDPConfig
from .gradient_reducer import GradientReducer
from .shard_layout import MegatronShardLayout
from .units import build_mixed_precision_policy, find_units, replace_meta_parameters

_UNUSED_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "calculate_per_token_loss": "the loss is per token of the global batch under every strategy",
        "gradient_reduce_div_fusion": "gradients are summed, and nothing divides them",
    }
)


class MegatronFSDPManager(DataParallelManager):
    """Megatron-FSDP over dp_shard, and HSDP if dp_replicate is above 1; see `DataParallelManager`.

    In a hand-written training loop, run each microbatch's forward and backward within
    `microbatch_context(is_last=...)`. The optimizer's step waits for the reduction and drops the
    gradients. The optimizer keeps your learning rates, groups and state: it is not stepped to initialize its state.

    Args:
        config: options, or a mapping of them.
        device_mesh: a `meshwright.Mesh`, or a DeviceMesh of torch; see `meshwright.mesh.mesh.from_device_mesh`.
        moe_mesh: must be None, since experts are not sharded over a separate mesh yet.

    Raises:
        MeshError: the DeviceMesh is not supported, or its backend differs from the config's.
        StrategyError: megatron-fsdp is missing or its version is not supported, or an option has no effect on this
            mesh.
    """

    config: MegatronFSDPConfig
    supports_meta_device: ClassVar[bool] = True
    tensor_parallel: TensorParallel | None = None
    """Shards the model along `tp`; None if `tp` has one rank."""

    def __init__(
        self,
        config: MegatronFSDPConfig | Mapping[str, Any],
        device_mesh: Mesh | DeviceMesh,
        moe_mesh: DeviceMesh | None = None,
    ) -> None:
        config = coerce_config(MegatronFSDPConfig, config, where="MegatronFSDPManager")
        if moe_mesh is not None:
            raise MeshError("moe_mesh is not supported yet: experts are not sharded over ep. Leave it out.")
        mesh = from_device_mesh(device_mesh, AXES)
        super().__init__(config, mesh)
        import_package()
        mesh.check_backend(config.backend)
        _check_options(config, mesh)
        options_by_axis = {"tp": ("sequence_parallel", "tp_plan"), "cp": ("cp_attention",)}
        warn_unused_options(config, mesh, by_axis=options_by_axis, unsupported=_UNUSED_OPTIONS)

    def shard(self, model: nn.Module) -> nn.Module:
        config, mesh = self.config, self.mesh
        if config.init_fsdp_with_meta_device and not has_meta_tensors(model):
            raise ModelError(
                "init_fsdp_with_meta_device=true, but the model has memory for its weights. Build it under "
                "torch.device('meta'), or set init_fsdp_with_meta_device=false, which takes both."
            )
        policy = build_mixed_precision_policy(config, model)
        units = find_units(model, self.layout, config.megatron_fsdp_unit_modules)
        if mesh.degrees.cp > 1:
            context = mesh.world.run_on_all_ranks(
                lambda: ContextParallel(model, self.layout, mesh["cp"], attention=config.cp_attention)
            )
            self.axes.append(context)
        if mesh.degrees.tp > 1:
            # An error of one rank (from a plan file, say) is raised on all ranks.
            self.tensor_parallel = mesh.world.run_on_all_ranks(lambda: self._apply_tensor_parallel(model, units))
            self.axes.append(self.tensor_parallel)
        self.checkpointed_blocks = checkpoint_blocks(model, self.layout, config.activation_checkpointing)
        if has_meta_tensors(model):
            # Parameters that are not sharded keep this memory.
            replace_meta_parameters(model, mesh.device, without_memory=config.zero_stage == 3)
        if mesh.device.type == "cpu":
            use_cpu_torch(self)
        self._fsdp = wrap_model(model, mesh, config, units=units, policy=policy)
        self._warn_about_unequal_units()
        self.shard_layout = self._megatron_layout = MegatronShardLayout(
            find_shard_ranges(self._fsdp), self._find_tp_divisions()
        )
        self._reducer = GradientReducer(self._fsdp, units, config, mesh)
        self._reducer.set_is_last_microbatch(True)
        return self._fsdp

    def _warn_about_unequal_units(self) -> None:
        unlike, total = count_units_without_double_buffer(self._fsdp)
        if self.mesh.rank != 0 or not self.config.fsdp_double_buffer:
            return
        remedy = "Name equal classes in megatron_fsdp_unit_modules, or set fsdp_double_buffer=False."
        if total == 0:
            warn(f"fsdp_double_buffer=True has no effect here: the whole model is one unit. {remedy}", stacklevel=2)
        elif unlike:
            warn(
                f"fsdp_double_buffer=True serves {total - unlike} of {total} units, which are equal. The others have "
                f"other shapes or dtypes, and memory of their own. {remedy}",
                stacklevel=2,
            )

    def _apply_tensor_parallel(self, model: nn.Module, units: Sequence[nn.Module]) -> TensorParallel:
        config = self.config
        tensor_parallel = TensorParallel(
            model,
            self.layout,
            self.mesh["tp"],
            plan=config.tp_plan,
            sequence_parallel=config.sequence_parallel,
            use_plain_tensors=True,
        )
        tensor_parallel.apply([name for name, module in model.named_modules() if module in units])
        return tensor_parallel

    def _find_tp_divisions(self) -> dict[nn.Parameter, ParameterSharding]:
        tensor_parallel = self.tensor_parallel
        if tensor_parallel is None:
            return {}
        named = self._fsdp.param_and_grad_buffer.optimizer_named_parameters
        return {parameter: tensor_parallel.shardings[name] for name, parameter in named}

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Build the optimizer over sharded parameters. Its step waits for the reduction and drops the gradients."""
        self._require_model()
        use_sharded_parameters(self._fsdp)
        optimizer = super().build_optimizer(factory)
        optimizer.register_step_pre_hook(self._pre_step_hook)
        optimizer.register_step_post_hook(self._post_step_hook)
        return optimizer

    @contextmanager
    def microbatch_context(self, *, is_last: bool) -> Iterator[None]:
        self._reducer.set_is_last_microbatch(is_last)
        yield
        self._reducer.set_is_last_microbatch(True)

    def report_gradients(self) -> GradientReport:
        return self._reducer.finish()

    def after_eval(self) -> None:
        # Without a backward, nothing frees parameters that forward has gathered. They would be stale after a step.
        wait_for_prefetched_gathers(self._fsdp)
        if self.config.overlap_param_gather:
            self._fsdp.synchronize_param_gather()
        use_sharded_parameters(self._fsdp)

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        self._require_model()
        with unshard_parameters(self._fsdp), super().unshard() as parts:
            yield parts

    def load_state_dict(self, state: Any, *, full: bool = False) -> None:
        super().load_state_dict(state, full=full)
        self._install_weights()

    def after_load(self) -> None:
        self._install_weights()

    def parameter_chunks(self) -> dict[str, ChunkedTensor | None]:
        """Return chunks in the dtypes in which modules compute; main weights are rounded to them after a step."""
        chunks, named = super().parameter_chunks(), dict(self.model.named_parameters())
        return {
            name: each and replace(each, dtype=self._megatron_layout.find_compute_dtype(named[name]))
            for name, each in chunks.items()
        }

    def drop_gradients(self) -> None:
        self._pre_step_hook()
        super().drop_gradients()
        self._post_step_hook()

    def _pre_step_hook(self, *_: Any) -> None:
        if self._reducer.is_pending:
            self._reducer.finish().finalize(self.mesh.world)
            self.drop_frozen_gradients()
            # For hand-written training loops; `forward_backward` has already done this.
            self.check_reduced_gradients()

    def _post_step_hook(self, *_: Any) -> None:
        self._fsdp.zero_grad_buffer()
        self._install_weights()

    def _install_weights(self) -> None:
        self._fsdp.install_optimized_model_weights()
        if not self.config.overlap_param_gather:
            self._fsdp.start_param_sync(force_sync=True)


def _check_options(config: MegatronFSDPConfig, mesh: Mesh) -> None:
    """Reject options that have no effect on this mesh, with a StrategyError on all ranks."""
    if mesh.degrees.dp_replicate > 1 and config.zero_stage == 0:
        raise StrategyError(
            f"ZeRO 0 copies everything, and Megatron-FSDP cannot do so over two axes (dp_replicate="
            f"{mesh.degrees.dp_replicate}). Set zero_dp_strategy=1 or more, or leave dp_replicate_size out."
        )
    if mesh.degrees.dp_replicate == 1 and config.is_outer_sharded:
        raise StrategyError(
            f"outer_dp_sharding_strategy={config.outer_dp_sharding_strategy} shards over dp_replicate, which has one "
            f"rank. Set outer_dp_sharding_strategy=0, or give the mesh a dp_replicate_size of 2 or more."
        )
    if config.nccl_ub and (mesh.device.type == "cpu" or not has_nccl_allocator()):
        why = "the mesh is on the CPU" if mesh.device.type == "cpu" else "neither apex nor megatron-core is installed"
        raise StrategyError(
            f"nccl_ub=true registers buffers with NCCL by an allocator of apex or megatron-core, but {why}. "
            f"Set nccl_ub=false."
        )
    if config.nccl_ub and uses_expandable_segments():
        raise StrategyError(
            "nccl_ub=true registers buffers with NCCL, which cannot take memory of expandable segments. "
            "Set PYTORCH_ALLOC_CONF=expandable_segments:False in the environment, or nccl_ub=false."
        )
