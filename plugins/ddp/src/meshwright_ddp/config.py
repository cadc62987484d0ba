"""Options of the `ddp` strategy. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from meshwright.plugin import (
    ActivationCheckpointing,
    StrategyConfig,
    StrategyError,
    activation_field,
    suggest_match,
    warn_deprecated,
)

ShardingStrategy = Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]

AXES = frozenset({"dp_replicate"})
"""Mesh axes that the strategy supports."""
COMM_HOOKS = ("fp16_compress", "bf16_compress", "power_sgd")

# Options that are rejected, and what they need.
_UNSUPPORTED_OPTIONS = {
    "fp8_param_gather": "parameters in fp8, which Transformer Engine brings",
    "reuse_grad_buf_for_mxfp8_param_ag": "parameters in mxfp8, which Transformer Engine brings",
    "nccl_ub": "Megatron's allocator for user buffers of NCCL",
    "disable_symmetric_registration": "nccl_ub, which needs Megatron's allocator for user buffers of NCCL",
}

_MEGATRON_FSDP_ONLY = (
    "data_parallel_sharding_strategy",
    "gradient_reduce_div_fusion",
    "suggested_communication_unit_size",
    "preserve_fp32_weights",
    "keep_fp8_transpose_cache",
    "fsdp_double_buffer",
    "outer_dp_sharding_strategy",
)

# Options that have an effect only together with others.
_REQUIRED_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "overlap_param_gather": ("use_distributed_optimizer", "overlap_grad_reduce"),
    "align_param_gather": ("overlap_param_gather",),
    "pad_buckets_for_high_nccl_busbw": ("use_distributed_optimizer",),
    "reduce_scatter_with_fp32_accumulation": ("use_distributed_optimizer",),
    "num_distributed_optimizer_instances": ("use_distributed_optimizer",),
    "bucket_size": ("overlap_grad_reduce",),
    "num_buckets": ("overlap_grad_reduce",),
}

# Pairs of incompatible options, with the reason.
_EXCLUSIVE_OPTIONS = {
    ("bucket_size", "num_buckets"): "both say how large buckets are",
    ("reduce_scatter_with_fp32_accumulation", "num_distributed_optimizer_instances"): "instances sum their parts twice",
    ("reduce_scatter_with_fp32_accumulation", "average_in_collective"): "the pieces are summed outside the collective",
    (
        "param_name_patterns_for_fp32_local_accumulation",
        "grad_reduce_in_fp32",
    ): "gradients that are reduced in float32 accumulate in it, too",
}


class DistributedDataParallelConfig(StrategyConfig):
    """Options of the bucketed engine. Fields, order and defaults are those of Megatron-Core's class of this name."""

    grad_reduce_in_fp32: bool = Field(default=False, description="Accumulate and reduce gradients in float32.")
    overlap_grad_reduce: bool = Field(
        default=False, description="Reduce a bucket of gradients as soon as backward has yielded them."
    )
    overlap_param_gather: bool = Field(
        default=False,
        description="With the distributed optimizer: gather updated parameters during the next forward, not after the "
        "step. Needs overlap_grad_reduce.",
    )
    align_param_gather: bool = Field(
        default=False,
        description="Start all overlapped gathers together when a step begins, on all stages of a pipeline at once, "
        "instead of each after the one before it, on a stage that has got its first microbatch.",
    )
    use_distributed_optimizer: bool = Field(
        default=False, description="Each rank holds and steps its share of the optimizer's state (ZeRO stage 1)."
    )
    num_distributed_optimizer_instances: int = Field(
        default=1,
        ge=1,
        description="Copies of the distributed optimizer's state, each over as many of the ranks. With "
        "use_megatron_fsdp: its ranks along dp_replicate.",
    )
    check_for_nan_in_grad: bool = Field(
        default=False,
        description="Stop all ranks where a gradient is NaN or Inf, before it is reduced; names the parameter.",
    )
    check_for_large_grads: bool = Field(
        default=False, description="Warn of gradients ten times as large as any of the first hundred."
    )
    bucket_size: int | None = Field(
        default=None,
        ge=1,
        description="Elements after which a bucket of gradients ends, with overlap_grad_reduce. "
        "null: 40,000,000, or 1,000,000 for each rank where that is more.",
    )
    num_buckets: int | None = Field(
        default=None, ge=1, description="bucket_size as a share: the elements of all parameters divided by this."
    )
    pad_buckets_for_high_nccl_busbw: bool = Field(
        default=False, description="With the distributed optimizer: pad buckets to multiples of 2^16 elements."
    )
    reduce_scatter_with_fp32_accumulation: bool = Field(
        default=False, description="Send gradients as they are, and sum them in float32 where they arrive."
    )
    average_in_collective: bool = Field(
        default=False,
        description="Let the collective average. The gradients stay sums: what it divides by is multiplied in before.",
    )
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = Field(
        default=(),
        strict=False,  # a list will do, which is all that YAML knows
        description="Shell patterns of parameter names, or 'all': their gradients add up over microbatches in float32 "
        "before they are rounded to what is reduced.",
    )
    fp8_param_gather: bool = Field(default=False, description="Refused: needs Transformer Engine.")
    reuse_grad_buf_for_mxfp8_param_ag: bool = Field(default=False, description="Refused: needs Transformer Engine.")
    use_megatron_fsdp: bool = Field(default=False, description="Hand over to the strategy megatron_fsdp.")
    use_custom_fsdp: bool = Field(default=False, description="Old name of use_megatron_fsdp, with a warning.")
    data_parallel_sharding_strategy: ShardingStrategy = Field(
        default="no_shard", description="With use_megatron_fsdp: what it shards."
    )
    gradient_reduce_div_fusion: bool = Field(
        default=True, description="With use_megatron_fsdp: divide gradients within their reduction, not before it."
    )
    suggested_communication_unit_size: int | None = Field(
        default=None, ge=1, description="With use_megatron_fsdp only."
    )
    preserve_fp32_weights: bool = Field(default=True, description="With use_megatron_fsdp only.")
    keep_fp8_transpose_cache: bool = Field(default=False, description="With use_megatron_fsdp only.")
    nccl_ub: bool = Field(default=False, description="Refused without use_megatron_fsdp: needs Megatron's allocator.")
    fsdp_double_buffer: bool = Field(default=False, description="With use_megatron_fsdp only.")
    outer_dp_sharding_strategy: ShardingStrategy = Field(
        default="no_shard",
        description="With use_megatron_fsdp: what is sharded over num_distributed_optimizer_instances, too: optim.",
    )
    disable_symmetric_registration: bool = Field(default=False, description="Refused without use_megatron_fsdp.")
    delay_wgrad_compute: bool = Field(
        default=False,
        description="Compute gradients of the weights of linear layers after the backward of a microbatch, which then "
        "waits for less; their inputs stay in memory until then.",
    )

    @property
    def delegates_to_megatron_fsdp(self) -> bool:
        return self.use_megatron_fsdp or self.use_custom_fsdp

    @property
    def grad_dtype(self) -> str | None:
        """Name of the dtype in which gradients are accumulated and reduced; None: the parameters' own."""
        return "float32" if self.grad_reduce_in_fp32 else self.reduce_dtype

    def check_not_delegated(self) -> None:
        """Raise StrategyError for `use_megatron_fsdp` if delegation to another strategy is not possible."""
        if self.delegates_to_megatron_fsdp:
            raise StrategyError(
                "use_megatron_fsdp=true hands over to the strategy megatron_fsdp, which another manager runs. Build it "
                "with get_strategy('ddp').build(config, mesh) or from_config(..., strategy='ddp', config=config), or "
                "leave use_megatron_fsdp out."
            )

    @property
    def non_default_options(self) -> list[str]:
        fields = type(self).model_fields.items()
        return [name for name, info in fields if getattr(self, name) != info.get_default(call_default_factory=True)]

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_combinations()
        return self

    def _check_combinations(self) -> None:
        if self.use_custom_fsdp:
            warn_deprecated("use_custom_fsdp", since="0.1.0", removed_in="1.0.0", remedy="Set use_megatron_fsdp=true.")
        changed = self.non_default_options
        if self.delegates_to_megatron_fsdp:
            return
        for name in _MEGATRON_FSDP_ONLY:
            if name in changed:
                raise ValueError(
                    f"{name}={getattr(self, name)} acts only with use_megatron_fsdp. "
                    f"Set use_megatron_fsdp=true, or leave {name} out"
                )
        for name, missing in _UNSUPPORTED_OPTIONS.items():
            if name in changed:
                raise ValueError(f"{name}=true needs {missing}; it is not available here. Leave {name} out")
        for name, needed in _REQUIRED_OPTIONS.items():
            for other in needed:
                if name in changed and other not in changed:
                    raise ValueError(
                        f"{name}={getattr(self, name)} acts only with {other}. Set {other}=true, or leave {name} out"
                    )
        for (one, two), reason in _EXCLUSIVE_OPTIONS.items():
            if one in changed and two in changed:
                raise ValueError(f"{one} and {two} do not go together: {reason}. Leave one out")
        if self.grad_reduce_in_fp32 and self.reduce_dtype == "float64":
            raise ValueError("grad_reduce_in_fp32 and reduce_dtype=float64 differ. Leave one out")


_BUCKETED_ONLY = tuple(
    name for name in DistributedDataParallelConfig.model_fields if name not in StrategyConfig.model_fields
)
_KEYWORD_ONLY = ("num_buckets", "param_name_patterns_for_fp32_local_accumulation")
"""Options of later versions of Megatron-Core, keyword-only."""
DistributedDataParallelConfig.positional_fields = tuple(name for name in _BUCKETED_ONLY if name not in _KEYWORD_ONLY)


class DDPConfig(DistributedDataParallelConfig):
    """Options of `ddp`: the engine, its own options, and options of both engines."""

    positional_fields: ClassVar[tuple[str, ...]] = ("activation_checkpointing", "backend")
    engine: Literal["torch", "bucketed"] = Field(
        default="torch",
        description="torch: DistributedDataParallel of PyTorch. bucketed: our own, after Megatron-Core's, with the "
        "distributed optimizer.",
    )
    activation_checkpointing: ActivationCheckpointing = activation_field()
    backend: str = Field(
        default="nccl",
        description="Backend of the process group for the mesh's device, which is checked. nccl means what the device "
        "uses: nccl on CUDA, gloo on a CPU.",
    )
    bucket_cap_mb: int = Field(default=25, ge=1, description="Size of a gradient bucket [MiB].")
    gradient_as_bucket_view: bool = Field(
        default=False, description="Let gradients be views of the buckets: one copy less."
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="Needed where a step leaves out some trainable parameters; costs a walk of the graph.",
    )
    static_graph: bool = Field(
        default=False,
        description="Promise that every step uses the same parameters in the same way; unused ones are "
        "allowed, several microbatches in a step are not.",
    )
    broadcast_buffers: bool = Field(
        default=True, description="Give all ranks the first one's buffers (running statistics) before each forward."
    )
    comm_hook: str | None = Field(
        default=None,
        description="Compress gradients before they travel: fp16_compress, bf16_compress or power_sgd. All round.",
        json_schema_extra={"anyOf": [{"enum": list(COMM_HOOKS)}, {"type": "null"}]},
    )
    comm_hook_options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of torch's PowerSGDState, for power_sgd."
    )

    @classmethod
    def variants(cls, *, is_dtype_free: bool, **_: Any) -> list[dict[str, Any]]:
        """Return options worth planning; see [Note: variants] in `meshwright_plan.search.candidates`."""
        fp32: dict[str, Any] = {"model.dtype": "float32"} if is_dtype_free else {}
        mixed = {"model.dtype": "bfloat16", "grad_reduce_in_fp32": True} if is_dtype_free else {}
        bucketed = {"engine": "bucketed", "overlap_grad_reduce": True}
        distributed = {"use_distributed_optimizer": True, "overlap_param_gather": True}
        # Only the distributed optimizer has float32 masters of half-precision parameters.
        return [
            fp32 | {"engine": "torch", "gradient_as_bucket_view": True},
            fp32 | bucketed,
            mixed | bucketed | distributed,
        ]

    @field_validator("comm_hook")
    @classmethod
    def _check_comm_hook(cls, value: str | None) -> str | None:
        if value is not None and value not in COMM_HOOKS:
            raise ValueError(f"is no hook.{suggest_match(value, COMM_HOOKS)} Allowed: {', '.join(COMM_HOOKS)}, or null")
        return value

    @model_validator(mode="before")
    @classmethod
    def _from_reference_config(cls, values: Any) -> Any:
        # The reference's class has only options of the bucketed engine.
        if isinstance(values, DistributedDataParallelConfig) and not isinstance(values, cls):
            return {**values.to_dict(), "engine": "bucketed"}
        return values

    def _check_combinations(self) -> None:
        # Check this first: requirements of an option do not matter if its engine is not used.
        self._check_engine()
        super()._check_combinations()
        if self.comm_hook is not None and self.reduce_dtype is not None:
            raise ValueError(
                f"comm_hook={self.comm_hook} rounds what reduce_dtype={self.reduce_dtype} would sum exactly. "
                f"Leave one out"
            )
        if self.comm_hook_options and self.comm_hook != "power_sgd":
            raise ValueError("comm_hook_options are those of power_sgd. Set comm_hook=power_sgd, or leave them out")

    def _check_engine(self) -> None:
        unavailable, owner = (_TORCH_ONLY, "torch") if self.engine == "bucketed" else (_BUCKETED_ONLY, "bucketed")
        for name in self.non_default_options if not self.delegates_to_megatron_fsdp else ():
            if name in unavailable:
                raise ValueError(
                    f"{name}={getattr(self, name)} is an option of the {owner} engine, but engine={self.engine}. "
                    f"Set engine={owner}, or leave {name} out"
                )


_COMMON_OPTIONS = ("engine", "activation_checkpointing", "backend", *StrategyConfig.model_fields)
_TORCH_ONLY = tuple(name for name in DDPConfig.model_fields if name not in (*_BUCKETED_ONLY, *_COMMON_OPTIONS))
