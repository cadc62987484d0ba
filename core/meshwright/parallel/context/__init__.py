"""Context parallelism: each rank of the axis `cp` computes a slice of every sequence.

A strategy sets its manager's `context_parallel` to a `ContextParallel` of the model. It shards parameters over
`dp_shard_cp`, or all-reduces their gradients over it.
"""

from __future__ import annotations

from .context_parallel import ContextParallel

__all__ = ["ContextParallel"]
