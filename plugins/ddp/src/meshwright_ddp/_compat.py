"""The only place in this package that touches private or version-dependent names of torch.

plugins/ddp/tests/test_ddp_compat.py holds a canary for each.
"""

from __future__ import annotations

import torch.distributed as dist

# torch 2.13 has new names for them, and warns of the old ones.
# Tried with torch 2.11 (by reading) and 2.13.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
