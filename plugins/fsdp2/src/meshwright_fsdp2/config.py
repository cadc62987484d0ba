"""Options of the `fsdp2` strategy. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from meshwright.plugin import (
    CHANGES_ROUNDING,
    FLOAT16_REFUSAL,
    TRAINING_DTYPES,
    ActivationCheckpointing,
    ConfigError,
    StrategyConfig,
    activation_field,
    allow_functions,
    check_import,
    suggest_match,
    warn,
)

if TYPE_CHECKING:
    from meshwright.plugin import Degrees

# The reference's tensor-parallel plan, which configs may name.
allow_functions("meshwright_fsdp2.get_hf_tp_shard_plan")

AXES = frozenset({"dp_replicate", "dp_shard", "cp", "tp", "ep"})
"""Mesh axes that the strategy supports."""
_POLICY_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "MixedPrecisionPolicy": {
        "param_dtype": "dtype",
        "reduce_dtype": "dtype",
        "output_dtype": "dtype",
        "cast_forward_inputs": "bool",
    },
    "CPUOffloadPolicy": {"pin_memory": "bool"},
}
_POLICY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "MixedPrecisionPolicy": {"_target_": "torch.distributed.fsdp.MixedPrecisionPolicy", "cast_forward_inputs": True},
    "CPUOffloadPolicy": {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy", "pin_memory": True},
}
"""Defaults of torch's policy arguments, if they are not None."""


def _policy_schema(name: str) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "dtype": {
            "anyOf": [{"enum": [*TRAINING_DTYPES, *(f"torch.{each}" for each in TRAINING_DTYPES)]}, {"type": "null"}]
        },
        "bool": {"type": "boolean"},
    }
    properties = {"_target_": {"type": "string"}} | {key: kinds[kind] for key, kind in _POLICY_ARGUMENTS[name].items()}
    policy = {"type": "object", "properties": properties, "additionalProperties": False}
    # A user's own class may have other arguments.
    own = {"type": "object", "properties": {"_target_": {"not": {"pattern": rf"^torch\..*\.{name}$"}}}}
    own["required"] = ["_target_"]
    return {"anyOf": [policy, own, {"type": "null"}]}


class FSDP2Config(StrategyConfig):
    """Options of `fsdp2`, without mesh sizes. Positional arguments are in the reference's order."""

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
    patch_is_packed_sequence: bool = Field(
        default=False,
        description="Wherever the model trains, answer transformers' check for packed sequences with false, which "
        "saves a synchronization with the GPU in every attention layer; packed data is refused then.",
    )
    # Adds float64 to the dtypes of other strategies.
    reduce_dtype: Literal["bfloat16", "float32", "float64"] | None = Field(  # type: ignore[assignment]
        default=None,
        description="Dtype in which gradients are accumulated over microbatches and summed over ranks; null: the "
        "gradients' own. bfloat16: they travel in it, rounded once, and are accumulated and summed in float32. float64 "
        "under float32 gradients makes the sum independent of its order, so that every strategy and world size prints "
        "the same losses.",
    )
    mp_policy: Annotated[Any, WithJsonSchema(_policy_schema("MixedPrecisionPolicy"))] = Field(
        default=None,
        description="Mixed precision: torch's MixedPrecisionPolicy, or a mapping of its param_dtype, reduce_dtype, "
        "output_dtype (of the whole model) and cast_forward_inputs, with or without `_target_`.",
    )
    offload_policy: Annotated[Any, WithJsonSchema(_policy_schema("CPUOffloadPolicy"))] = Field(
        default=None,
        description="Keep shards, gradients and optimizer state in CPU memory: torch's CPUOffloadPolicy, or a mapping "
        "of its pin_memory, with or without `_target_`. On a CPU only with pin_memory=false.",
    )
    autocast_dtype: Literal["bfloat16"] | None = Field(
        default=None,
        description="Run the forward under torch.autocast with this dtype. With output_dtype float32 in mp_policy, or "
        "float32 parameters, the residual stream stays float32.",
    )
    activation_checkpointing: ActivationCheckpointing = activation_field(
        "every second matrix product, attention and communication"
    )
    defer_fsdp_grad_sync: bool | Literal["reduce_scatter"] = Field(
        default=True,
        description="Reduce gradients on the last microbatch of a step only, at the price of holding whole gradients "
        "between microbatches. false: reduce on each, holding shards. reduce_scatter: on each over dp_shard, holding "
        "shards, and on the last only over dp_replicate.",
    )
    backend: str = Field(
        default="nccl",
        description="Backend of the process group for the mesh's device, which is checked. nccl means what the device "
        "uses: nccl on CUDA, gloo on a CPU.",
    )
    enable_async_tensor_parallel: Annotated[bool, CHANGES_ROUNDING] = Field(
        default=False,
        description="Overlap communication of tensor parallelism with its matrix products. CUDA only; sets "
        "sequence_parallel and enable_compile, with a warning where they are false.",
    )
    enable_compile: Annotated[bool, CHANGES_ROUNDING] = Field(
        default=False,
        description="Compile each block with torch.compile; with ep_size above 1 in parts, around its experts, and "
        "not with activation_checkpointing.",
    )
    enable_fsdp2_prefetch: bool = Field(
        default=False,
        description="Gather the next units explicitly ahead of their use, as many as the two depths say. false: one "
        "ahead in backward, and in forward as the GPU's queue goes.",
    )
    fsdp2_backward_prefetch_depth: int = Field(default=2, ge=1, description="Units to gather ahead in backward.")
    fsdp2_forward_prefetch_depth: int = Field(default=1, ge=1, description="Units to gather ahead in forward.")
    reshard_after_forward: bool | int | None = Field(
        default=None,
        description="Free a block's gathered parameters after its forward and gather them again for backward. "
        "null: all blocks but the last of each stack, whose backward comes first. false: gather (and cast to "
        "param_dtype) once a step, for all microbatches. A number: keep them on groups of so many ranks, from which "
        "backward gathers.",
        json_schema_extra={"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 2}, {"type": "null"}]},
    )

    @classmethod
    def variants(
        cls, *, degrees: Degrees, num_microbatches: int, is_dtype_free: bool, **_: Any
    ) -> list[dict[str, Any]]:
        """Return options worth planning on a mesh; see [Note: variants] in `meshwright_plan.search.candidates`."""
        options: dict[str, Any] = {"sequence_parallel": True} if degrees.tp > 1 else {}
        if is_dtype_free:
            options |= {"model.dtype": "float32"}
            options |= {"mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}}
        # Blocks that stay unsharded for a step; and gradient shards between microbatches.
        variants = [options, options | {"reshard_after_forward": False}]
        if degrees.dp_shard * degrees.cp == 1:
            return variants if is_dtype_free else [options]
        return variants if num_microbatches == 1 else [*variants, options | {"defer_fsdp_grad_sync": False}]

    @field_validator("reshard_after_forward", mode="before")
    @classmethod
    def _check_reshard(cls, value: Any) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if type(value) is not int or value < 2:
            raise ValueError(
                "must be true, false, null, or a number of ranks of at least 2 (for 1, use false: each rank keeps all)"
            )
        return value

    @field_validator("autocast_dtype", mode="before")
    @classmethod
    def _normalize_autocast_dtype(cls, value: Any) -> Any:
        name = value if value is None else normalize_dtype(value)
        if name == "float16":
            raise ValueError(f"cannot be float16: {FLOAT16_REFUSAL}. Use bfloat16")
        return name

    @field_validator("mp_policy")
    @classmethod
    def _check_mp_policy(cls, value: Any) -> Any:
        return _validate_policy(value, "MixedPrecisionPolicy")

    @field_validator("offload_policy")
    @classmethod
    def _check_offload_policy(cls, value: Any) -> Any:
        return _validate_policy(value, "CPUOffloadPolicy")

    @model_validator(mode="after")
    def _check_combinations(self) -> FSDP2Config:
        if not self.enable_fsdp2_prefetch:
            for depth in ("fsdp2_forward_prefetch_depth", "fsdp2_backward_prefetch_depth"):
                if getattr(self, depth) != type(self).model_fields[depth].default:
                    raise ValueError(
                        f"{depth}={getattr(self, depth)} acts only with enable_fsdp2_prefetch. "
                        f"Set enable_fsdp2_prefetch=true, or leave {depth} out"
                    )
        if self.enable_async_tensor_parallel:
            missing = [name for name in ("sequence_parallel", "enable_compile") if not getattr(self, name)]
            for name in missing:
                # The config is frozen for users.
                object.__setattr__(self, name, True)
            if missing:
                listed = " and ".join(f"{name}=true" for name in missing)
                warn(f"enable_async_tensor_parallel=true needs {listed}, and has set so.", stacklevel=2)
        dtype = get_policy_value(self.mp_policy, "reduce_dtype")
        if self.reduce_dtype and dtype is not None and normalize_dtype(dtype) != self.reduce_dtype:
            raise ValueError(
                f"reduce_dtype={self.reduce_dtype} and mp_policy.reduce_dtype={normalize_dtype(dtype)} differ. Give one"
            )
        return self


_NOT_POSITIONAL = (*StrategyConfig.model_fields, "cp_attention", "reshard_after_forward")
FSDP2Config.positional_fields = tuple(name for name in FSDP2Config.model_fields if name not in _NOT_POSITIONAL)


def normalize_dtype(value: Any) -> Any:
    """Return the name of a dtype, such as "bfloat16" for "torch.bfloat16"; return any other value unchanged."""
    is_dtype = type(value).__module__ == "torch" and type(value).__name__ == "dtype"
    return str(value).removeprefix("torch.") if is_dtype or isinstance(value, str) else value


def get_policy_value(policy: Any, key: str) -> Any:
    """Return an argument of a policy, which is an object or a mapping; None if it is missing."""
    return policy.get(key) if isinstance(policy, Mapping) else getattr(policy, key, None)


def _validate_policy(value: Any, name: str) -> Any:
    """Return a policy object unchanged, or a mapping with plain dtype names."""
    if value is None:
        return value
    # Recognize torch's class or a subclass without importing torch.
    if any(cls.__name__ == name and cls.__module__.startswith("torch.distributed.fsdp") for cls in type(value).__mro__):
        for key, kind in _POLICY_ARGUMENTS[name].items():
            if kind == "dtype" and normalize_dtype(getattr(value, key)) == "float16":
                raise ValueError(f"{key} cannot be float16: {FLOAT16_REFUSAL}")
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"must be a {name} of torch.distributed.fsdp, or a mapping of its arguments")
    if "_target_" in value:
        target = value["_target_"]
        try:
            check_import(target)
        except ConfigError as error:
            raise ValueError(f"_target_: {error}") from None
        if str(target).rpartition(".")[2] != name:
            # A user's own class is checked when it is imported, together with torch.
            return dict(value)
    known = _POLICY_ARGUMENTS[name]
    for key, each in value.items():
        if key == "_target_":
            continue
        if key not in known:
            raise ValueError(f"unknown key {key!r}.{suggest_match(str(key), known)} Allowed: {', '.join(known)}")
        if known[key] == "bool" and not isinstance(each, bool):
            raise ValueError(f"{key}={each!r} must be true or false")
        if known[key] == "dtype" and each is not None and normalize_dtype(each) not in TRAINING_DTYPES:
            raise ValueError(f"{key}={each!r} is not one of {', '.join(TRAINING_DTYPES)}; {FLOAT16_REFUSAL}")
    # Normalize to the arguments of an equal torch object.
    arguments = {**_POLICY_DEFAULTS[name], **{key: each for key, each in value.items() if each is not None}}
    ordered = {key: arguments[key] for key in ("_target_", *known) if key in arguments}
    return {key: normalize_dtype(each) if known.get(key) == "dtype" else each for key, each in ordered.items()}
