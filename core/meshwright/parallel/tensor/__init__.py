"""Tensor and sequence parallelism, for any strategy that uses the axis `tp`.

A strategy calls `TensorParallel.apply` before it shards the model further. `apply_tensor_parallel` is for hand-written
training loops.
"""

from __future__ import annotations

from ...strategy.hooks import StyleSpec
from .placements import ParameterSharding, get_packed_dim
from .plan_sources import get_hf_tp_shard_plan
from .styles import STYLES, translate_to_torch_parallel_style
from .tensor_parallel import TensorParallel, apply_tensor_parallel

__all__ = ["STYLES", "ParameterSharding", "StyleSpec", "TensorParallel", "get_hf_tp_shard_plan", "get_packed_dim"]
__all__ += ["apply_tensor_parallel", "translate_to_torch_parallel_style"]
