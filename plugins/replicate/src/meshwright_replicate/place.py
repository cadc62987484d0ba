"""A step that keepers hold, as a place that a checkpoint is read from."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from meshwright.plugin import MANIFEST, Access, SeekableReader, payload_name

from .keepers import Keepers
from .wire import Link


@dataclass(frozen=True)
class MemoryPlace:
    """A step in the memory of nodes. All ranks read a file from the same keeper, so what one has verified all get.

    Attributes:
        step: after which it was copied.
        manifest: its text.
        holders: maps each file to the number of the node whose keeper it is read from.
        bytes_of: size of each file.
    """

    keepers: Keepers
    step: int
    manifest: bytes
    holders: Mapping[str, int]
    bytes_of: Mapping[str, int]
    access: Access
    name = "memory"

    def __str__(self) -> str:
        return self.name

    def sizes(self) -> dict[str, int] | None:
        return {MANIFEST: len(self.manifest), **self.bytes_of}

    def open(self, name: str) -> BinaryIO:
        if name == MANIFEST:
            return io.BytesIO(self.manifest)
        if name not in self.holders:
            raise OSError(f"no {name} of step {self.step}")
        node = self.holders[name]
        link = self.keepers.link(node)
        if node != self.keepers.here:
            return io.BufferedReader(_Remote(link, self.step, name, self.bytes_of[name]), 1 << 20)
        try:
            file = link.ask_for_file("take", step=self.step, name=name)
        finally:
            link.close()
        try:
            # Opened again: descriptors of one file share their position with those of other readers.
            return open(f"/proc/self/fd/{file}", "rb")
        finally:
            os.close(file)

    def hint(self) -> str:
        return ""


class _Remote(SeekableReader):
    """A file of a step in the memory of another node."""

    def __init__(self, link: Link, step: int, name: str, size: int) -> None:
        super().__init__(name)
        self._link, self._step, self._nbytes = link, step, size

    def _size(self) -> int:
        return self._nbytes

    def _read_at(self, position: int, buffer: memoryview) -> int:
        count = max(0, min(buffer.nbytes, self._nbytes - position))
        if count:
            self._link.ask_into(buffer[:count], "take", step=self._step, name=self.name, begin=position, size=count)
        return count

    def close(self) -> None:
        if not self.closed:
            self._link.close()
        super().close()


def places_of(keepers: Keepers, listed: Sequence[Mapping[str, Any]], run: str, access: Access) -> list[MemoryPlace]:
    """Return the steps of a run that are complete in the memory of nodes, the newest first.

    A step comes twice if its files can be read from other keepers the second time.

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
    # A rank's own part is on its node, if ranks are where they were.
    near = {payload_name(rank): number for number, node in enumerate(keepers.nodes) for rank in node.ranks}
    first = {name: near[name] if near.get(name) in nodes else nodes[0] for name, nodes in holding.items()}
    other = {
        name: next((each for each in nodes if each != first[name]), first[name]) for name, nodes in holding.items()
    }
    for holders in (first, other) if other != first else (first,):
        yield MemoryPlace(keepers, step, manifest.encode(), holders, sizes, access)
