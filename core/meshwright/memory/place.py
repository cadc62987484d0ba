"""A step that keepers hold, as a place that a checkpoint is read from."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..checkpoint.index import payload_name
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.places import Access
from .keepers import Keepers


@dataclass(frozen=True)
class MemoryPlace:
    """A step in the memory of nodes. All ranks read a file from the same keeper, so that what one of them has verified
    is what the others get.

    Attributes:
        step: after which it was copied.
        manifest: its text.
        holders: for each file, the number of the node whose keeper it is read from.
        bytes_of: the size of each file.
    """

    keepers: Keepers
    step: int
    manifest: bytes
    holders: Mapping[str, int]
    bytes_of: Mapping[str, int]
    access: Access

    def __str__(self) -> str:
        return "memory"

    @property
    def name(self) -> str:
        return "memory"

    def sizes(self) -> dict[str, int] | None:
        return {MANIFEST: len(self.manifest), **self.bytes_of}

    def open(self, name: str) -> BinaryIO:
        if name == MANIFEST:
            return io.BytesIO(self.manifest)
        if name not in self.holders:
            raise OSError(f"no {name} of step {self.step}")
        node, size = self.holders[name], self.bytes_of[name]
        link = self.keepers.link(node)
        if node != self.keepers.here:
            return io.BufferedReader(_Remote(link, self.step, name, size), 1 << 20)
        try:
            return io.BufferedReader(_Local(link.ask_for_file("take", step=self.step, name=name), name, size))
        finally:
            link.close()

    def hint(self) -> str:
        return ""


class _Copied(io.RawIOBase):
    """A file of a step. Others may have it open, too, each at a position of its own."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self._size, self._position = name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        room = room[: max(0, min(room.nbytes, self._size - self._position))]
        count = self._read_into(room) if room.nbytes else 0
        self._position += count
        return count

    def _read_into(self, room: memoryview) -> int:
        raise NotImplementedError


class _Local(_Copied):
    def __init__(self, file: int, name: str, size: int) -> None:
        super().__init__(name, size)
        self._file = file

    def _read_into(self, room: memoryview) -> int:
        return os.preadv(self._file, [room], self._position)

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


class _Remote(_Copied):
    def __init__(self, link: Any, step: int, name: str, size: int) -> None:
        super().__init__(name, size)
        self._link, self._step = link, step

    def _read_into(self, room: memoryview) -> int:
        self._link.ask_into(room, "take", step=self._step, name=self.name, begin=self._position, size=room.nbytes)
        return room.nbytes

    def close(self) -> None:
        if not self.closed:
            self._link.close()
        super().close()


def places_of(keepers: Keepers, listed: Sequence[Mapping[str, Any]], run: str, access: Access) -> list[MemoryPlace]:
    """The steps of a run that are whole in the memory of nodes, the newest first; each twice where all files of it that
    can be are read from other keepers the second time.

    Args:
        listed: see `Keepers.listed`.
    """
    own = [each["steps"] if each["run"] == run else {} for each in listed]
    return [
        place
        for step in sorted({int(step) for steps in own for step in steps}, reverse=True)
        for place in _places(keepers, [steps.get(str(step), {}) for steps in own], step, access)
    ]


def _places(keepers: Keepers, kept: Sequence[Mapping[str, Any]], step: int, access: Access) -> Iterator[MemoryPlace]:
    manifest = next((each["manifest"] for each in kept if each.get("manifest")), None)
    if manifest is None:
        return
    sizes = {name: int(stored["size"]) for name, stored in json.loads(manifest)["files"].items()}
    holding = {
        name: [number for number, each in enumerate(kept) if each.get("files", {}).get(name) == size]
        for name, size in sizes.items()
    }
    if not all(holding.values()):
        return
    # Each rank's own part is near it, as long as ranks are where they were.
    near = {payload_name(rank): number for number, node in enumerate(keepers.nodes) for rank in node.ranks}
    first = {name: near[name] if near.get(name) in nodes else nodes[0] for name, nodes in holding.items()}
    other = {
        name: next((each for each in nodes if each != first[name]), first[name]) for name, nodes in holding.items()
    }
    for holders in (first, other) if other != first else (first,):
        yield MemoryPlace(keepers, step, manifest.encode(), holders, sizes, access)
