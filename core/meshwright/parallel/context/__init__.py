"""Context parallelism: each rank of the axis `cp` computes a part of every sequence.

A strategy sets a `ContextParallel` of the model as `context_parallel` of its manager, and shards parameters, or sums
their gradients, over `dp_shard_cp`.
"""

from __future__ import annotations

from .context_parallel import ContextParallel

__all__ = ["ContextParallel"]
