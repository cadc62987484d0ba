"""A number of 64 bits that any flipped bit of a tensor changes.

[Note: fingerprints] The elements, as whole numbers, each times an odd one that follows from its place, are summed
modulo 2**64. A flipped bit changes the sum by a power of two times an odd number, which is never 0; the sum does not
depend on the order in which a device adds, so that it is the same each time and everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def fingerprint(tensor: Tensor) -> Tensor:
    """Of the bits of a tensor, in the order of its elements; int64, a scalar on its device."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view(_WORDS[flat.element_size()]) if flat.element_size() in _WORDS else flat.view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = 2 * torch.arange(min(words.numel(), _CHUNK), dtype=torch.int64, device=tensor.device) + 1
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        total += (part * (odd[: part.numel()] + 2 * start)).sum()
    return total
