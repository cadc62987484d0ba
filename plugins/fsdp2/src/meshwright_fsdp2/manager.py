"""The `fsdp2` manager: shard transformer blocks with FSDP2.

[Note: order] Expert and tensor parallelism are applied first, since they change the parameters. Then comes activation
checkpointing, which compile must trace; then compile; then sharding, whose hooks run outside of compiled blocks. A
model on the meta device gets its weights last.
Source: Zhao et al. 2023, arXiv:2304.11277; torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from meshwright.plugin import (
    ActivationOptions,
    Batch,
    ContextParallel,
    DataParallelManager,
    ExpertParallel,
    GradientReport,
    Mesh,
    MeshError,
    OptimizerFactory,
    StrategyError,
    TensorParallel,
    check_expert_parallel,
    checkpoint_blocks,
    coerce_config,
    compile_blocks,
    format_activation_option,
    from_device_mesh,
    needs_identical_operators,
    split_groups_by_mesh,
    warn_unused_options,
)

from ._compat import enable_async_tensor_parallel, reduce_accumulated_grads, upcast_accumulated_grads
from .config import AXES, FSDP2Config
from .forward_wrappers import (
    cast_residual_stream,
    check_not_packed,
    compute_norms_in_float32,
    run_forward_in_context,
    skip_packed_sequence_check,
)
from .sharding import ParameterUsage, ShardedUnits, shard_units
from .unit_options import UnitOptions, find_accumulation_dtype
from .units import FSDPUnit, find_nested_unit_modules, find_units, split_units_by_dtype


class FSDP2Manager(DataParallelManager):
    """Fully sharded data parallelism, and HSDP if dp_replicate is above 1; see `DataParallelManager`.

    Args:
        config: options, or a mapping of them.
        device_mesh: a `meshwright.Mesh`, or a DeviceMesh of torch; see `meshwright.mesh.mesh.from_device_mesh`.
        moe_mesh: the expert mesh, which must equal the one derived from the degrees. None: use the derived one.

    Raises:
        MeshError: the DeviceMesh is not supported, or its backend differs from the config's.
        StrategyError: an option has no effect on this mesh.
        ConfigError: a policy is invalid.
    """

    config: FSDP2Config
    supports_meta_device: ClassVar[bool] = True
    supports_pipeline: ClassVar[bool] = True
    _is_in_step: bool = False
    tensor_parallel: TensorParallel | None = None
    """Shards the model along `tp`; None if `tp` has one rank."""
    expert_parallel: ExpertParallel | None = None
    """Shards experts along `ep`; None if `ep` has one rank."""

    def __init__(
        self,
        config: FSDP2Config | Mapping[str, Any],
        device_mesh: Mesh | DeviceMesh,
        moe_mesh: DeviceMesh | None = None,
    ) -> None:
        config = coerce_config(FSDP2Config, config, where="FSDP2Manager")
        mesh = from_device_mesh(device_mesh, AXES, moe_mesh)
        if moe_mesh is not None:
            mesh.check_expert_mesh(moe_mesh)
        super().__init__(config, mesh)
        mesh.check_backend(config.backend)
        _check_options(config, mesh)
        tp_options = ("sequence_parallel", "tp_plan", "enable_async_tensor_parallel")
        warn_unused_options(config, mesh, by_axis={"tp": tp_options, "cp": ("cp_attention",)})
        self._unit_options = UnitOptions.from_config(config, mesh)

    def check_model(self, model: nn.Module) -> None:
        check_expert_parallel(model, self.mesh.degrees.ep)

    def shard(self, model: nn.Module) -> nn.Module:
        # An error of one rank (from its compiler, say) is raised on all ranks.
        self.mesh.world.run_on_all_ranks(lambda: self._apply_parallelism(model))
        self._sharding: ShardedUnits = shard_units(
            model,
            self.layout,
            self._unit_options,
            tensor_parallel=self.tensor_parallel,
            expert_parallel=self.expert_parallel,
        )
        if self.config.enable_fsdp2_prefetch:
            self._sharding.set_prefetch(
                forward=self.config.fsdp2_forward_prefetch_depth, backward=self.config.fsdp2_backward_prefetch_depth
            )
        if self.tensor_parallel is not None and not self.is_pipeline_stage:
            self.tensor_parallel.check_first_backward(model)
        self._wrap_forward(model)
        self._usage = ParameterUsage(model, self._sharding.named_modules)
        return model

    def build_optimizer(self, factory: OptimizerFactory) -> Optimizer:
        """Build the optimizer over the DTensor shards. Experts get separate groups if it is foreach or fused."""
        optimizer = super().build_optimizer(factory)
        if self.expert_parallel is not None:
            split_groups_by_mesh(optimizer)
        return optimizer

    @property
    def parameter_device(self) -> torch.device:
        return torch.device("cpu") if self._unit_options.is_offloading else self.mesh.device

    def _apply_parallelism(self, model: nn.Module) -> None:
        if self.mesh.degrees.cp > 1:
            context_parallel = ContextParallel(model, self.layout, self.mesh["cp"], attention=self.config.cp_attention)
            self.axes.append(context_parallel)
        if needs_identical_operators(self.config.activation_checkpointing):
            units = find_units(model, self.layout)
            _check_selective_checkpointing([*(inner for inner, _ in split_units_by_dtype(model, units)), *units])
        if self.mesh.degrees.ep > 1:
            self.expert_parallel = ExpertParallel(model, self.mesh)
        if self.mesh.degrees.tp > 1:
            self.tensor_parallel = TensorParallel(
                model,
                self.layout,
                self.mesh["tp"],
                plan=self.config.tp_plan,
                sequence_parallel=self.config.sequence_parallel,
                excluded=self.expert_parallel.module_names if self.expert_parallel is not None else (),
            )
        if self.expert_parallel is not None:
            self.expert_parallel.apply()
        if self.tensor_parallel is not None:
            self.tensor_parallel.apply(find_nested_unit_modules(model, self.layout))
        self.axes += [axis for axis in (self.tensor_parallel, self.expert_parallel) if axis is not None]
        save_routing = self.expert_parallel is not None
        mode = self.config.activation_checkpointing
        self.checkpointed_blocks = checkpoint_blocks(model, self.layout, mode, save_routing=save_routing)
        self._compile_blocks(model)
        if self._unit_options.residual_dtype is not None:
            cast_residual_stream(model, self.layout, self._unit_options.residual_dtype)
            if self.mesh.device.type == "cpu":
                compute_norms_in_float32(model)

    def maybe_compile(self, model: nn.Module) -> None:
        """Do nothing, for training loops of the reference: `parallelize` compiles if `enable_compile` is set."""
        self._require_model()

    def _compile_blocks(self, model: nn.Module) -> None:
        if self.config.enable_compile:
            experts = self.expert_parallel.module_names if self.expert_parallel is not None else ()
            if self.mesh.world.is_real:
                compile_blocks(model, self.layout, device=self.mesh.device, excluded=experts)
            if self.tensor_parallel is not None:
                # Wrapped outside of the traced code: compiled code sees plain tensors.
                self.tensor_parallel.localize_blocks()
            if self.config.enable_async_tensor_parallel and self.mesh.degrees.tp > 1:
                enable_async_tensor_parallel(self.mesh.group("tp"))

    def after_eval(self) -> None:
        # Without a backward, nothing frees parameters that forward keeps for it. They would be stale after a step.
        self._sharding.reshard()

    def check_microbatches(self, microbatches: Sequence[Batch]) -> None:
        super().check_microbatches(microbatches)
        if self.config.patch_is_packed_sequence:
            check_not_packed(microbatches)

    @contextmanager
    def step_context(self, microbatches: Sequence[Batch]) -> Iterator[None]:
        # Covers backward too: recomputed attention must take the same path.
        if not self.config.patch_is_packed_sequence:
            yield
            return
        self._is_in_step = True
        try:
            with skip_packed_sequence_check():
                yield
        finally:
            self._is_in_step = False

    def _wrap_forward(self, model: nn.Module) -> None:
        """Apply forward options to the model's own forward, so that they also work in hand-written training loops."""
        if self.config.patch_is_packed_sequence:
            run_forward_in_context(model, self._check_unpacked_outside_step)
        if self.config.autocast_dtype is not None:
            dtype = getattr(torch, self.config.autocast_dtype)
            run_forward_in_context(model, lambda inputs: torch.autocast(self.mesh.device.type, dtype=dtype))

    @contextmanager
    def _check_unpacked_outside_step(self, inputs: Batch) -> Iterator[None]:
        # Ranks train together, but may generate separately, with positions that restart after padding.
        if self._is_in_step or not torch.is_grad_enabled():
            yield
            return
        self.mesh.world.run_on_all_ranks(lambda: check_not_packed([inputs]))
        with skip_packed_sequence_check():
            yield

    @contextmanager
    def microbatch_context(self, *, is_last: bool) -> Iterator[None]:
        """Run one microbatch; its gradients are reduced as `defer_fsdp_grad_sync` says."""
        root = self._sharding.root
        defer = self.config.defer_fsdp_grad_sync
        root.set_is_last_backward(is_last)
        root.set_requires_gradient_sync(is_last or defer is not True)
        root.set_requires_all_reduce(is_last or defer != "reduce_scatter")
        if self.config.reshard_after_forward is False:
            # Parameters that forward has gathered and cast stay for the full step; the optimizer needs shards.
            root.set_reshard_after_backward(is_last)
        if is_last or defer is not True:
            upcast_accumulated_grads(self._sharding.unit_modules)
        yield

    @contextmanager
    def input_backward_context(self) -> Iterator[None]:
        # Deferred weight gradients are reduced later, together with the existing gradients.
        root = self._sharding.root
        root.set_is_last_backward(False)
        root.set_requires_gradient_sync(False)
        yield

    def after_weight_backward(self) -> None:
        # For FSDP the microbatch has ended; the next one's gradients would be added to these in their own dtype.
        if self.reduces_once_per_step:
            upcast_accumulated_grads(self._sharding.unit_modules)
        else:
            with self.microbatch_context(is_last=False):
                reduce_accumulated_grads(self._sharding.root)

    @property
    def accumulation_dtype(self) -> str | None:
        return find_accumulation_dtype(self.config)

    @property
    def reduces_once_per_step(self) -> bool:
        return self.config.defer_fsdp_grad_sync is True

    @property
    def can_defer_reduction(self) -> bool:
        return self.reduces_once_per_step

    def reduce_gradients(self) -> None:
        with self.microbatch_context(is_last=True):
            reduce_accumulated_grads(self._sharding.root)

    def report_gradients(self) -> GradientReport:
        return self._usage.build_report()

    @contextmanager
    def unshard(self) -> Iterator[Sequence[nn.Module]]:
        self._require_model()
        with self._sharding.unshard(), super().unshard() as parts:
            yield parts


def _check_selective_checkpointing(units: Sequence[FSDPUnit]) -> None:
    # Units within a block are gathered at different points of forward and of recomputation, but selective
    # checkpointing needs the same operators in both.
    inner = next((unit for unit in units if not unit.is_block and not unit.is_root), None)
    if inner is not None:
        raise StrategyError(
            f"activation_checkpointing='selective', or with budget_gb, does not go with blocks of which a part is "
            f"gathered by itself ({', '.join(inner.names)}). Set activation_checkpointing=full."
        )


def _check_options(config: FSDP2Config, mesh: Mesh) -> None:
    """Reject options that have no effect on this mesh, with a StrategyError or MeshError on all ranks."""
    if config.enable_async_tensor_parallel and mesh.degrees.tp > 1 and mesh.device.type == "cpu":
        raise StrategyError(
            "enable_async_tensor_parallel=true overlaps kernels of a GPU, but the mesh is on the CPU. "
            "Set enable_async_tensor_parallel=false."
        )
    if config.enable_compile and isinstance(config.activation_checkpointing, ActivationOptions):
        raise StrategyError(
            f"activation_checkpointing={format_activation_option(config.activation_checkpointing)} acts on operators "
            "one by one, but with enable_compile=true a compiled block decides by itself what it holds. Set "
            "enable_compile=false, or activation_checkpointing to full or selective."
        )
    if config.enable_compile and config.activation_checkpointing and mesh.degrees.ep > 1:
        # torch may recompile a part between a forward and its recomputation, which would then save different tensors.
        raise StrategyError(
            f"activation_checkpointing={config.activation_checkpointing} recomputes blocks that are compiled whole, "
            f"but with ep_size={mesh.degrees.ep} blocks are compiled in parts, around their experts. "
            f"Set activation_checkpointing=false or enable_compile=false, or use ep_size=1."
        )
    reshard, shards = config.reshard_after_forward, mesh.degrees.dp_shard * mesh.degrees.cp
    if isinstance(reshard, int) and not isinstance(reshard, bool) and (reshard > shards or shards % reshard):
        cp = " x cp" if mesh.degrees.cp > 1 else ""
        divisors = ", ".join(str(each) for each in range(2, shards + 1) if shards % each == 0) or "none"
        raise MeshError(
            f"reshard_after_forward={reshard} is no divisor of the {shards} ranks of dp_shard{cp}. "
            f"Use one of them ({divisors}), or true, false or null."
        )
    experts = mesh.degrees.ep_shard
    if mesh.degrees.ep > 1 and not isinstance(reshard, bool | None) and reshard < experts and experts % reshard:
        raise MeshError(
            f"reshard_after_forward={reshard} is no divisor of the {experts} ranks of ep_shard, which share experts. "
            f"Use one, or true, false or null."
        )
