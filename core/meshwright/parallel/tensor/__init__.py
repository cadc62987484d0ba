"""Tensor and sequence parallelism, for any strategy that claims the axis `tp`.

A strategy makes a `TensorParallel` of the model before it shards it further, and calls its `apply`. For hand-written
loops, `parallelize_tensors` does so.
"""

from __future__ import annotations

from ...strategy.hooks import StyleName
from .division import Division, packed_dim
from .hf_plan import get_hf_tp_shard_plan
from .parallel import TensorParallel, parallelize_tensors
from .plan import translate_to_torch_parallel_style
from .styles import STYLES

__all__ = [
    "STYLES",
    "Division",
    "StyleName",
    "TensorParallel",
    "get_hf_tp_shard_plan",
    "packed_dim",
    "parallelize_tensors",
    "translate_to_torch_parallel_style",
]
