"""Options of the `megatron_fsdp` strategy. Does not import torch.

Fields and defaults are those of the reference. Options that megatron-fsdp 0.6.1 adds follow them, under its names or
those of Megatron-Core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, field_validator, model_validator

from meshwright.plugin import (
    FLOAT16_REFUSAL,
    TRAINING_DTYPES,
    ActivationCheckpointing,
    StrategyConfig,
    activation_field,
)

if TYPE_CHECKING:
    from meshwright.plugin import Degrees

AXES = frozenset({"dp_replicate", "dp_shard", "cp", "tp"})
"""Mesh axes that the strategy supports."""
ZERO_STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Megatron-Core's names of ZeRO stages 0 to 3."""


def _normalize_dtype(value: Any) -> Any:
    """Return the name of a dtype, which is given as a name, with or without "torch.", or as torch.dtype."""
    name = str(value).removeprefix("torch.")
    if name not in TRAINING_DTYPES:
        raise ValueError(f"must be one of {', '.join(TRAINING_DTYPES)}; {FLOAT16_REFUSAL}")
    return name


# Not a Literal, since the conformance suite would expect exact results for each of its values.
DtypeName = Annotated[str, BeforeValidator(_normalize_dtype), WithJsonSchema({"enum": list(TRAINING_DTYPES)})]


class MegatronFSDPConfig(StrategyConfig):
    """Options of `megatron_fsdp`, without mesh sizes. Positional arguments are in the reference's order."""

    sequence_parallel: bool = Field(
        default=False,
        description="With tensor parallelism: split norms and the residual stream along the sequence, too.",
    )
    tp_plan: dict[str, Any] | str | None = Field(
        default=None,
        description="Tensor-parallel plan, by module name; or the import path of one, or of a function that makes it. "
        "null: the model's own, or one that is derived from its structure.",
    )
    cp_attention: Literal["allgather", "ulysses"] = Field(
        default="allgather",
        description="With context parallelism: how attention sees all positions. allgather: keys and values are "
        "gathered. ulysses: positions are exchanged for heads, whose number cp_size must divide.",
    )
    megatron_fsdp_unit_modules: list[str] | None = Field(
        default=None,
        description="Classes whose modules are gathered and reduced as one unit each, by name or full path; "
        "null: the blocks of the model.",
    )
    zero_dp_strategy: Literal[0, 1, 2, 3] = Field(
        default=3, description="What is sharded: 0: nothing, 1: optimizer state, 2: gradients too, 3: parameters too."
    )
    init_fsdp_with_meta_device: bool = Field(
        default=False,
        description="Refuse a model that is not on the meta device, so that no rank ever holds it whole; false: take "
        "both.",
    )
    grad_reduce_in_fp32: bool = Field(
        default=False, description="Accumulate and sum gradients in float32 at least; false: in the parameters' dtype."
    )
    preserve_fp32_weights: bool = Field(
        default=False,
        description="The optimizer trains a copy of the weights in float32 at least; false: the weights themselves.",
    )
    overlap_grad_reduce: bool = Field(
        default=True,
        description="Reduce gradients during backward. false: after the last one of a step; ZeRO 0 and 1 only.",
    )
    overlap_param_gather: bool = Field(
        default=True,
        description="Gather parameters during forward. false: all of them after each step; ZeRO 1 and 2 only.",
    )
    check_for_nan_in_grad: bool = Field(
        default=True, description="Refuse a step whose summed gradients hold a NaN or infinity, on all ranks."
    )
    average_in_collective: bool = Field(
        default=False,
        description="Let collectives average gradients, which are multiplied back afterwards: guards half precision "
        "against overflow in large sums.",
    )
    disable_bucketing: bool = Field(
        default=False,
        description="One bucket for all that is in no unit, instead of several of about 40 million elements.",
    )
    calculate_per_token_loss: bool = Field(
        default=False,
        description="Nothing depends on it: the loss is per token of the global batch and gradients are summed under "
        "every strategy.",
    )
    keep_fp8_transpose_cache: bool = Field(
        default=False,
        description="For float8 parameters of TransformerEngine, which are not supported: true is refused.",
    )
    nccl_ub: bool = Field(
        default=False, description="Register buffers with NCCL. CUDA only, with an allocator of apex or Megatron-Core."
    )
    fsdp_double_buffer: bool = Field(
        default=False, description="Gather and reduce units in two buffers that stay allocated. Needs equal units."
    )
    activation_checkpointing: ActivationCheckpointing = activation_field(
        "every second matrix product, attention and communication"
    )
    backend: str = Field(
        default="nccl",
        description="Backend of the process group for the mesh's device, which is checked. nccl means what the device "
        "uses: nccl on CUDA, gloo on a CPU.",
    )
    data_parallel_sharding_strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] | None = Field(
        default=None,
        description="zero_dp_strategy by Megatron-Core's name, which goes before its default; null: what "
        "zero_dp_strategy says.",
    )
    outer_dp_sharding_strategy: Literal[0, 1, "no_shard", "optim"] = Field(
        default=0,
        description="Over dp_replicate: 0 or no_shard: copies. 1 or optim: optimizer state is sharded; ZeRO 3 only.",
    )
    gradient_reduce_div_fusion: bool = Field(
        default=True,
        description="Divide gradients within their reduction, not before it. Gradients are sums here, which nothing "
        "divides, so both give the same.",
    )
    suggested_communication_unit_size: int | None = Field(
        default=None,
        ge=1,
        description="Elements up to which gradients wait for their reduction, and half of which are gathered ahead; "
        "null: 1e9.",
    )
    report_nan_in_param_grad: bool = Field(
        default=False,
        description="Look at each parameter's gradient on each rank before it is reduced, and tell the names of those "
        "that hold a NaN or infinity. Slow.",
    )
    disable_symmetric_registration: bool = Field(
        default=False, description="With nccl_ub: register buffers without symmetric windows."
    )
    main_params_dtype: DtypeName | None = Field(
        default=None,
        description="Dtype of the weights that the optimizer trains; null: what preserve_fp32_weights says.",
    )
    main_grads_dtype: DtypeName | None = Field(
        default=None, description="Dtype in which gradients are accumulated; null: what grad_reduce_in_fp32 says."
    )
    grad_comm_dtype: DtypeName | None = Field(
        default=None, description="Dtype in which gradients are sent; null: the one in which they are accumulated."
    )

    @classmethod
    def variants(cls, *, degrees: Degrees, is_dtype_free: bool, **_: Any) -> list[dict[str, Any]]:
        """Return options worth planning on a mesh; see [Note: variants] in `meshwright_plan.search.candidates`."""
        options: dict[str, Any] = {"sequence_parallel": True} if degrees.tp > 1 else {}
        if is_dtype_free:
            options |= {"model.dtype": "bfloat16", "preserve_fp32_weights": True, "grad_reduce_in_fp32": True}
        return [options | {"zero_dp_strategy": stage} for stage in (3, 2, 1)]

    @property
    def zero_stage(self) -> int:
        name = self.data_parallel_sharding_strategy
        return self.zero_dp_strategy if name is None else ZERO_STAGES.index(name)

    @property
    def is_outer_sharded(self) -> bool:
        return self.outer_dp_sharding_strategy in (1, "optim")

    @field_validator("megatron_fsdp_unit_modules")
    @classmethod
    def _check_units(cls, value: list[str] | None) -> list[str] | None:
        if value == []:
            raise ValueError("must name a class at least. Leave it out to take the model's blocks")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> MegatronFSDPConfig:
        stage, named = self.zero_stage, self.data_parallel_sharding_strategy
        if self.zero_dp_strategy not in (stage, type(self).model_fields["zero_dp_strategy"].default):
            raise ValueError(
                f"zero_dp_strategy={self.zero_dp_strategy} and data_parallel_sharding_strategy={named}, which is "
                f"{stage}, differ. Give one"
            )
        if self.is_outer_sharded and stage != 3:
            raise ValueError(
                f"outer_dp_sharding_strategy={self.outer_dp_sharding_strategy} needs ZeRO 3, not {stage}. "
                f"Set zero_dp_strategy=3, or outer_dp_sharding_strategy=0"
            )
        if not self.overlap_grad_reduce and stage > 1:
            raise ValueError(
                f"overlap_grad_reduce=false needs whole gradients on each rank, which ZeRO {stage} does not keep. "
                f"Set zero_dp_strategy=1, or overlap_grad_reduce=true"
            )
        if not self.overlap_param_gather and stage not in (1, 2):
            why = "nothing is gathered" if stage == 0 else "parameters are gathered for each use"
            raise ValueError(
                f"overlap_param_gather=false has no meaning with ZeRO {stage}, where {why}. "
                f"Set zero_dp_strategy=2, or overlap_param_gather=true"
            )
        if self.suggested_communication_unit_size is not None and stage == 0:
            raise ValueError(
                "suggested_communication_unit_size acts on gathering and scattering, which ZeRO 0 does not do. "
                "Leave it out, or set zero_dp_strategy to 1 or more"
            )
        if self.disable_symmetric_registration and not self.nccl_ub:
            raise ValueError(
                "disable_symmetric_registration=true acts only with nccl_ub. "
                "Set nccl_ub=true, or disable_symmetric_registration=false"
            )
        for option, value in (
            ("main_params_dtype", self.preserve_fp32_weights),
            ("main_grads_dtype", self.grad_reduce_in_fp32 or self.reduce_dtype),
        ):
            if getattr(self, option) is not None and value:
                other = {"main_params_dtype": "preserve_fp32_weights"}.get(option, "grad_reduce_in_fp32, reduce_dtype")
                raise ValueError(f"{option}={getattr(self, option)} and {other} say the same thing. Give one")
        if self.grad_reduce_in_fp32 and self.reduce_dtype:
            raise ValueError(
                f"grad_reduce_in_fp32=true and reduce_dtype={self.reduce_dtype} say the same thing. Give one"
            )
        if self.keep_fp8_transpose_cache:
            raise ValueError(
                "keep_fp8_transpose_cache=true acts on float8 parameters of TransformerEngine, which are not "
                "supported. Set keep_fp8_transpose_cache=false"
            )
        return self


# The reference's fields end with `backend`.
_NOT_IN_REFERENCE = (*StrategyConfig.model_fields, "cp_attention")
_REFERENCE_FIELDS = [name for name in MegatronFSDPConfig.model_fields if name not in _NOT_IN_REFERENCE]
MegatronFSDPConfig.positional_fields = tuple(_REFERENCE_FIELDS[: _REFERENCE_FIELDS.index("backend") + 1])
