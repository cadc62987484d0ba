"""Signs of life: which rank hangs, told by those that do not.

[Note: signs of life] A rank that hangs cannot say so, and each of its peers knows only that it waits itself. So each
rank of a run has a thread that keeps a sign in the rendezvous store: a count, and where the main thread is. The first
rank reads all signs, the others read the first one's. Two things can be seen:
- A count stands still: the process is stopped, or its machine is cut off. After nine tenths of the run's `timeout_s`,
  so before those that wait for it give up, the reader ends the run and names that rank.
- A collective gives up though all counts go on: a rank hangs that is not waiting, and the place in its code is known.

This module imports no torch; see `meshwright.launch.rank`, which uses it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store

SILENT_SHARE = 0.9
"""A rank may be silent for this share of the time that a collective may wait."""
LEAST_SILENCE_S = 5.0
"""What a busy machine may cost is not taken for silence."""
LONGEST_INTERVAL_S = 2.0
"""Between two signs of a rank; shorter where `timeout_s` is. `who_hangs` takes 2.5 of them, less than
`rank.ECHO_WAIT_S`."""
DONE = -1
"""The count of a rank whose main has ended well."""


@dataclass(frozen=True)
class Sign:
    """What a rank last wrote of itself.

    Attributes:
        count: of its signs.
        process: host and process id.
        waits: whether its main thread is in torch's communication.
        place: file, line and function of its main thread, outside of torch.
        interval_s: until the next sign.
    """

    count: int
    process: str
    waits: bool
    place: str
    interval_s: float


def write_sign(store: Store, rank: int, count: int, interval_s: float) -> None:
    """Tell that this rank is alive."""
    waits, place = _main_thread()
    sign = Sign(count, f"{socket.gethostname()}, process {os.getpid()}", waits, place, interval_s)
    store.set(str(rank), json.dumps(asdict(sign)))


def read_signs(store: Store, ranks: Sequence[int], known: Collection[int] = ()) -> dict[int, Sign]:
    """The last signs of those ranks that have given one.

    Args:
        known: ranks that have given one before, which saves asking.
    """
    keys = {rank: str(rank) for rank in ranks if rank in known or store.check([str(rank)])}
    values = store.multi_get(list(keys.values())) if keys else []
    return {rank: Sign(**json.loads(value)) for rank, value in zip(keys, values, strict=True)}


class Pulse(threading.Thread):
    """Gives this rank's signs of life and watches those of others; see [Note: signs of life]. A context manager.

    After an error in the context it goes on, so that this rank is not taken for one that hangs while it reports.

    Args:
        store: of the world, with a connection of its own.
        rank, size: of the world.
        timeout_s: how long a collective may wait for peers.
        on_silence: called in this thread with what there is to say of ranks that hang.
    """

    def __init__(
        self, store: Store, rank: int, size: int, *, timeout_s: float, on_silence: Callable[[str], object]
    ) -> None:
        super().__init__(name="meshwright-pulse", daemon=True)
        self._store, self._rank = store, rank
        self._watched = [each for each in (range(size) if rank == 0 else [0]) if each != rank]
        self._interval_s = min(LONGEST_INTERVAL_S, timeout_s / 20)
        self._limit_s = max(SILENT_SHARE * timeout_s, LEAST_SILENCE_S)
        self._on_silence = on_silence
        self._over = threading.Event()
        self._signs: dict[int, Sign] = {}
        self._silent_s = dict.fromkeys(self._watched, 0.0)

    def __enter__(self) -> Pulse:
        self.start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self._over.set()
            self.join()

    def run(self) -> None:
        count, last_s = 0, time.monotonic()
        try:
            while True:
                write_sign(self._store, self._rank, count, self._interval_s)
                silent = self.look(time.monotonic() - last_s)
                last_s = time.monotonic()
                if silent:
                    self._on_silence(self._told(silent))
                    return
                if self._over.wait(self._interval_s):
                    break
                count += 1
            write_sign(self._store, self._rank, DONE, self._interval_s)
        except RuntimeError:
            # The store has gone with the process that hosts it. Who waits for a peer still has its own limit.
            return

    def look(self, elapsed_s: float) -> list[int]:
        """Read the signs that are watched.

        Args:
            elapsed_s: since the last look. More than two intervals count as two: then this process itself was stopped.

        Returns:
            The ranks that have been silent for too long.
        """
        signs = read_signs(self._store, self._watched, self._signs)
        for rank in self._watched:
            is_new = rank in signs and signs[rank] != self._signs.get(rank)
            self._silent_s[rank] = 0.0 if is_new else self._silent_s[rank] + min(elapsed_s, 2 * self._interval_s)
        self._signs = signs
        is_done = {rank for rank, sign in signs.items() if sign.count == DONE}
        return [rank for rank in self._watched if self._silent_s[rank] > self._limit_s and rank not in is_done]

    def _told(self, silent: Sequence[int]) -> str:
        return tell_silent(silent, self._signs, f"{max(self._silent_s[rank] for rank in silent):.0f} s")


def tell_silent(ranks: Sequence[int], signs: dict[int, Sign], how_long: str) -> str:
    """What to say of ranks that give no sign of life."""
    rank, others = ranks[0], ", ".join(map(str, ranks[1:]))
    sign = signs.get(rank)
    who = f"rank {rank}" + (f" ({sign.process})" if sign else "")
    where = f" It was last at {sign.place}." if sign else ""
    more = f" So do the ranks {others}." if others else ""
    return (
        f"{who} hangs: no sign of life for {how_long}.{where}{more} Its process is stopped or starved, or its machine "
        f"is cut off. If such pauses are to be borne, raise timeout_s."
    )


def who_hangs(store: Store, me: int, size: int, gave_up: Callable[[], Collection[int]]) -> str | None:
    """Name the rank that others wait for in vain, once a collective of this rank has given up.

    Args:
        store: as of `Pulse`.
        me: this rank.
        gave_up: the ranks whose collectives have given up, too.

    Returns:
        What to say; None if no rank stands out.
    """
    others = [rank for rank in range(size) if rank != me]
    before = read_signs(store, others)
    if not before:
        return None
    time.sleep(2.5 * max(sign.interval_s for sign in before.values()))
    after = read_signs(store, others, before)
    silent = [rank for rank, sign in after.items() if sign == before.get(rank) and sign.count != DONE]
    if silent:
        return tell_silent(silent, after, f"{2.5 * after[silent[0]].interval_s:.0f} s and more")
    waiting = set(gave_up())
    busy = [rank for rank in after if rank not in waiting and not after[rank].waits and after[rank].count != DONE]
    if not busy:
        return None
    places = "; ".join(f"rank {rank} ({after[rank].process}) is at {after[rank].place}" for rank in busy)
    return (
        f"{'rank' if len(busy) == 1 else 'ranks'} {', '.join(map(str, busy))} did not come to where rank {me} waits: "
        f"{places}. If that may take so long, raise timeout_s."
    )


def _main_thread() -> tuple[bool, str]:
    """Whether the main thread is in torch's communication, and where it is outside of torch."""
    ident = threading.main_thread().ident
    innermost = sys._current_frames().get(ident) if ident is not None else None
    waits = False
    for frame in _outwards(innermost):
        parts = Path(frame.f_code.co_filename).parts
        if "torch" not in parts:
            return waits, f"{'/'.join(parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}"
        waits = waits or "distributed" in parts[parts.index("torch") :]
    return waits, "(not known)"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
