"""What ranks write of themselves into the rendezvous store, and where their main threads are. No torch here."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from .position import At

if TYPE_CHECKING:
    from torch.distributed import Store

DONE = -1
"""The count of a rank whose main has ended well."""
MOST_FRAMES = 40
"""Of the main thread's stack, in a sign."""
_WAITING = frozenset({"wait", "_pass"})
"""Functions of this project in which a rank waits for what others send."""


@dataclass(frozen=True)
class Sign:
    """What a rank last wrote of itself.

    Attributes:
        count: of its signs.
        process: host and process id.
        waits: whether its main thread is in torch's communication.
        place: file, line and function of its main thread, outside of torch.
        interval_s: until the next sign.
        at: where its main thread is in the run.
        still_s: for how long it has not moved from there.
        stack: its main thread's, the innermost frame first.
        own_s, step_s: medians over its last steps: what it takes by itself, and the whole; 0: not known.
        steps: over so many.
    """

    count: int
    process: str
    waits: bool
    place: str
    interval_s: float
    at: At = field(default_factory=At)
    still_s: float = 0.0
    stack: tuple[str, ...] = ()
    own_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0

    @classmethod
    def read(cls, text: bytes | str) -> Sign:
        values = json.loads(text)
        return cls(**{**values, "at": At(*values["at"]), "stack": tuple(values["stack"])})

    def written(self) -> str:
        return json.dumps(vars(self))


def read_signs(store: Store, ranks: Sequence[int], known: Collection[int] = ()) -> dict[int, Sign]:
    """The last signs of those ranks that have given one.

    Args:
        known: ranks that have given one before, which saves asking.
    """
    keys = {rank: str(rank) for rank in ranks if rank in known or store.check([str(rank)])}
    values = store.multi_get(list(keys.values())) if keys else []
    return {rank: Sign.read(value) for rank, value in zip(keys, values, strict=True)}


def main_thread() -> tuple[bool, str, tuple[str, ...]]:
    """Whether the main thread waits for other ranks, where it is outside of torch, and its stack."""
    ident = threading.main_thread().ident
    innermost = sys._current_frames().get(ident) if ident is not None else None
    frames = list(_outwards(innermost))
    waits, place = False, "(not known)"
    for frame in frames:
        parts = frame.f_code.co_filename.split(os.sep)
        is_torch = "torch" in parts
        waits = waits or (is_torch and "distributed" in parts[parts.index("torch") :])
        is_waiting = frame.f_code.co_name in _WAITING and any(part.startswith("meshwright") for part in parts[:-1])
        waits = waits or is_waiting
        if not is_torch and frame.f_code.co_filename != threading.__file__:
            place = _told(frame)
            break
    return waits, place, tuple(map(_told, frames[:MOST_FRAMES]))


def _told(frame: FrameType) -> str:
    where = "/".join(frame.f_code.co_filename.split(os.sep)[-3:])
    return f"{where}:{frame.f_lineno} in {frame.f_code.co_name}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
