"""Tensor and sequence parallelism, for any strategy that claims the axis `tp`.

A strategy makes a `TensorParallel` of the model before it shards it further, calls `apply`, and `localize` for modules
whose parameters it gathers by themselves. `parallelize_tensors` does so for hand-written loops.
"""

from __future__ import annotations

from .parallel import TensorParallel, parallelize_tensors
from .plan import StyleName, get_hf_tp_shard_plan, translate_to_torch_parallel_style
from .styles import STYLES

__all__ = [
    "STYLES",
    "StyleName",
    "TensorParallel",
    "get_hf_tp_shard_plan",
    "parallelize_tensors",
    "translate_to_torch_parallel_style",
]
