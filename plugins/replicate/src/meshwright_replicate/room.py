"""Host memory that a rank shares with its node's keeper: it writes into one while the keeper holds the other."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor


class Room:
    """Anonymous memory for a rank's part of one step.

    Attributes:
        file: descriptor by which another process maps it.
        view: its bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.file = os.memfd_create("meshwright-copy", os.MFD_CLOEXEC)
        os.ftruncate(self.file, size)
        # An empty file cannot be mapped.
        self._whole = mmap.mmap(self.file, size) if size else None
        self.view = memoryview(b"") if self._whole is None else memoryview(self._whole)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors into it in sequence, as in a checkpoint."""
        if self._whole is None:
            return
        target, begin = torch.frombuffer(self._whole, dtype=torch.uint8), 0
        for each in tensors:
            # As bytes, since a tensor may begin anywhere.
            source = each.detach().contiguous().view(-1).view(torch.uint8)
            target[begin : begin + source.numel()].copy_(source)
            begin += source.numel()

    def __del__(self) -> None:
        # The mapping is freed with its last view.
        os.close(self.file)


class Rooms:
    """Two rooms, used in turn: before one is filled again, the keeper has released it."""

    def __init__(self) -> None:
        self._rooms: list[Room] = []

    def filled(self, tensors: Sequence[Tensor]) -> Room:
        size = nbytes_of(tensors)
        room = self._rooms.pop(0) if len(self._rooms) == 2 else None
        if room is None or room.size != size:
            room = Room(size)
        self._rooms.append(room)
        room.fill(tensors)
        return room


def memory_of_host() -> int:
    """Return the bytes of this node's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)
