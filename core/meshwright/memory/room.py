"""Memory of the host that a rank shares with its node's keeper: it writes into one while the keeper has the other."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor


class Room:
    """Memory without a name, for one step's part of a rank.

    Attributes:
        file: by which it is handed to another process.
        view: its bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.file = os.memfd_create("meshwright-copy", os.MFD_CLOEXEC)
        os.ftruncate(self.file, size)
        # Nothing can be mapped that is empty.
        self._whole = mmap.mmap(self.file, max(size, 1)) if size else None
        self.view = memoryview(b"") if self._whole is None else memoryview(self._whole)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copy tensors into it, one behind the other, as a checkpoint has them."""
        if self._whole is None:
            return
        target, begin = torch.frombuffer(self._whole, dtype=torch.uint8), 0
        for each in tensors:
            # As bytes, since they may begin anywhere.
            source = each.detach().contiguous().view(-1).view(torch.uint8)
            target[begin : begin + source.numel()].copy_(source)
            begin += source.numel()

    def __del__(self) -> None:
        # The mapping goes with its last view.
        os.close(self.file)


class Rooms:
    """Two, in turn: by the time that one is written again, the keeper has let go of it."""

    def __init__(self) -> None:
        self._rooms: list[Room] = []

    def filled(self, tensors: Sequence[Tensor]) -> Room:
        """One with tensors in it."""
        size = nbytes_of(tensors)
        room = self._rooms.pop(0) if len(self._rooms) == 2 else None
        if room is None or room.size != size:
            room = Room(size)
        self._rooms.append(room)
        room.fill(tensors)
        return room


def memory_of_host() -> int:
    """Bytes of this node's own memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    """Of all together."""
    return sum(each.numel() * each.element_size() for each in tensors)
