"""Tensor and sequence parallelism, for any strategy that claims the axis `tp`.

A strategy calls `TensorParallel.apply` before it shards the model further; `parallelize_tensors` is for hand-written
loops.
"""

from __future__ import annotations

from ...strategy.hooks import StyleName
from .parallel import TensorParallel, parallelize_tensors
from .placements import Division, packed_dim
from .plan import get_hf_tp_shard_plan
from .styles import STYLES, translate_to_torch_parallel_style

__all__ = ["STYLES", "Division", "StyleName", "TensorParallel", "get_hf_tp_shard_plan", "packed_dim"]
__all__ += ["parallelize_tensors", "translate_to_torch_parallel_style"]
