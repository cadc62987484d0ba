"""Context parallelism, for any strategy that claims the axis `cp`: each rank computes a part of every sequence.

A strategy makes a `ContextParallel` of the model and sets it as `context_parallel` of its manager; parameters are then
sharded, or their gradients summed, over `dp_shard_cp`.
"""

from __future__ import annotations

from .parallel import ContextParallel

__all__ = ["ContextParallel"]
