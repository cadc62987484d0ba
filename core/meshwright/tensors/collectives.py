"""Collectives on one tensor per rank that strategies may call, under one name in every supported version of torch.

    all_gather_single(output, input, group=None, async_op=False)
    reduce_scatter_single(output, input, op=ReduceOp.SUM, group=None, async_op=False)

Source: torch.distributed, whose names these are since torch 2.13 (before: `all_gather_into_tensor` and
`reduce_scatter_tensor`).
"""

from .._compat.torch_versions import all_gather_single as all_gather_single
from .._compat.torch_versions import reduce_scatter_single as reduce_scatter_single
