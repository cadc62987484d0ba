"""Gradients that travel in bfloat16 and are summed in float32.

A reduce-scatter in bfloat16 would round each partial sum. Here each rank rounds what it sends, once, and sends to every
rank its part; who receives adds up in float32, in the order of the ranks. Half the bytes, and an error of each addend
of at most 2^-9 of it, that of rounding to the nearest, which favours no direction.
Source: `ReduceScatter` of torch.distributed.fsdp, which FSDPModule.set_custom_reduce_scatter takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class HalfMessages:
    """A reduce-scatter for one unit."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum over the ranks of a group.

        Args:
            output_tensor: this rank's part, 1-D.
            input_tensor: the parts of all ranks, one behind the other.
            op: SUM; see [Note: sums] in `sharding`.
            async_op: False, as FSDP calls it: on a stream of its own.
        """
        sent = input_tensor.to(torch.bfloat16)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        torch.sum(received.view(group.size(), -1), 0, dtype=output_tensor.dtype, out=output_tensor)
