"""Statistics of tokens that the last stage has computed, on the ranks of all stages.

Shapes: B sequences of a microbatch, S positions of each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.step.tokens import Recorder


def regrouped(
    recorder: Recorder, sizes: Sequence[torch.Size], group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """What a recorder has found, for each microbatch of the step; equal on all ranks of the group. Collective.

    Args:
        recorder: on the last stage's rank, of the pieces of microbatches, in order; on others of none.
        sizes: (B, S) of each microbatch.
        group: the ranks of all stages.
        dtype: of statistics.
    """
    names, counts = recorder.names, [size.numel() for size in sizes]
    values = torch.zeros(len(names), sum(counts), device=device, dtype=dtype)
    if recorder.found:
        for index, name in enumerate(names):
            values[index] = torch.cat([piece[name].flatten() for piece in recorder.found])
    # All but one rank have zeros, so that nothing is rounded.
    dist.all_reduce(values, group=group)
    return [
        {
            name: (found.bool() if name == "is_top1" else found).unflatten(0, size)
            for name, found in zip(names, of_batch, strict=True)
        }
        for of_batch, size in zip(values.split(counts, 1), sizes, strict=True)
    ]
