"""The only place in this package that touches private or version-dependent names of torch.

plugins/ddp/tests/test_ddp_compat.py holds a canary for each.
"""

from __future__ import annotations

import inspect

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# torch 2.13 has new names for them, and warns of the old ones.
# Tried with torch 2.11 (by reading) and 2.13.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def syncing_buffers(wanted: bool) -> dict[str, bool]:
    """The argument of DistributedDataParallel for giving all ranks the first one's buffers before each forward.

    torch 2.13 has a new name for it, and warns of the old one. Tried with torch 2.11 (by reading) and 2.13.
    """
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": wanted}
