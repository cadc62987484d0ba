"""The policies of a config, as torch's objects, and those that follow for parts of a model.

Checking a config's mappings needs no torch and is in `config`.

The dtype of the output is the whole model's: on each block it would cast the residual stream back and forth, and hand
the head inputs that do not fit its weights. Under autocast it is that of the residual stream, too; see [Note: wide
stream] in `residual_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from meshwright.base.errors import StrategyError
from meshwright.files.class_paths import instantiate

from .config import FSDP2Config


def mixed_precision(config: FSDP2Config) -> MixedPrecisionPolicy:
    """The policy of the root: the config's `mp_policy`, with its `reduce_dtype`.

    Raises:
        ConfigError: `_target_` is not on the allow-list or no policy, or an argument is wrong.
    """
    policy = _made(config.mp_policy, MixedPrecisionPolicy) or MixedPrecisionPolicy()
    sums = sums_dtype(config)
    return policy if sums is None else replace(policy, reduce_dtype=getattr(torch, sums))


def sums_dtype(config: FSDP2Config) -> str | None:
    """The dtype in which gradients are summed: `reduce_dtype`, but for bfloat16, in which they only travel."""
    return "float32" if config.reduce_dtype == "bfloat16" else config.reduce_dtype


def stream_dtype(config: FSDP2Config) -> torch.dtype | None:
    """The dtype of the residual stream, where it is to be wider than what autocast computes in; None: as it comes.

    Raises:
        ConfigError: as `mixed_precision`.
    """
    output = mixed_precision(config).output_dtype
    if config.autocast_dtype is None or output is None:
        return None
    return output if output.itemsize > getattr(torch, config.autocast_dtype).itemsize else None


def of_blocks(policy: MixedPrecisionPolicy, stream: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """The policy of units below the root, of that of the root: outputs keep their dtype.

    Args:
        policy: of the root.
        stream: of `stream_dtype`; inputs then keep their dtype, too, and autocast casts what products take.
    """
    if stream is not None:
        return replace(policy, output_dtype=None, cast_forward_inputs=False)
    return replace(policy, output_dtype=None)


def of_experts(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """The policy of experts, of that of the root: their inputs keep the dtypes that the block around them gives."""
    return replace(policy, output_dtype=None, cast_forward_inputs=False)


def of_dtype(policy: MixedPrecisionPolicy, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """The policy of parameters that a model keeps in another dtype than the rest: they stay as they are.

    Args:
        policy: of the root, whose `reduce_dtype` stays where it is no coarser than `dtype`.
        dtype: of the parameters.
    """
    reduce_dtype = policy.reduce_dtype
    if reduce_dtype is not None and torch.promote_types(reduce_dtype, dtype) != reduce_dtype:
        reduce_dtype = None
    return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)


def offload(config: FSDP2Config, device: torch.device) -> OffloadPolicy:
    """The offload policy of all units.

    Args:
        config: with `offload_policy`, or None in it: shards lie on the device.
        device: of the mesh.

    Raises:
        ConfigError: as `mixed_precision`.
        StrategyError: it pins memory, where there is no accelerator to pin it for.
    """
    policy = _made(config.offload_policy, CPUOffloadPolicy)
    if policy is not None and policy.pin_memory and device.type == "cpu":
        raise StrategyError(
            "offload_policy has pin_memory=True, but the mesh is on the CPU, where there is no accelerator to pin "
            "memory for. Use offload_policy={pin_memory: false}, or leave it out: parameters are in CPU memory anyway."
        )
    return policy or OffloadPolicy()


def _made(value: Any, expected: type) -> Any:
    return instantiate(value, expected=expected) if isinstance(value, Mapping) else value
