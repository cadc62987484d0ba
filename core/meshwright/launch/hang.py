"""Who hangs, judged by the signs of all ranks, and what is said of it.

[Note: who hangs] The ranks that are at the earliest position of all (see [Note: positions] in `progress`) hold up the
others. If they all have stood still for too long, somebody hangs. Of these ranks, the ones that do not wait for others
are named; where that leaves several, those that have begun fewer collectives of a group than others of it, by torch's
flight recorder: with NCCL the host waits for the device, and not in torch.distributed. Then those with fewer
microbatches done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .signs import DONE, Sign, read_signs

if TYPE_CHECKING:
    from torch.distributed import Store

Counts = Mapping[str, tuple[int, int, int]]
"""By process group: how many collectives a rank has enqueued, has seen begin, and has seen end."""


@dataclass(frozen=True)
class Hang:
    """What has been found.

    Attributes:
        ranks: that hang; who else is at their place, too.
        is_silent: whether they give no sign of life; else they stand still.
        since: when they were last seen to live, or to move [s since 1970].
        signs: the last ones of all ranks.
        text: what to say.
        is_alone: whether the store gives no answer, by which ranks agree on who says it.
    """

    ranks: tuple[int, ...]
    is_silent: bool
    since: float
    signs: Mapping[int, Sign]
    text: str
    is_alone: bool = False


class Witness(Protocol):
    """Writes down on each rank what there is to know of a hang."""

    where: str
    """Where it writes, for people."""

    def leave(self, sign: Sign) -> Counts:
        """Write down this process's stacks and its last collectives, and return how far these have come."""

    def tell(self, hang: Hang) -> None:
        """On one rank that lives: write down what has been found."""


@dataclass(frozen=True)
class Report:
    """What a rank has to say once somebody hangs."""

    sign: Sign
    counts: Counts = field(default_factory=dict)


def standing(signs: Mapping[int, Sign], limit_s: float) -> list[int]:
    """The ranks at the earliest position, if they have all stood still for longer; see [Note: who hangs]."""
    last = _last(signs)
    too_long = all(sign.still_s > limit_s and sign.at.settled and not sign.at.patient for sign in last.values())
    return list(last) if last and too_long else []


def culprits(reports: Mapping[int, Report]) -> list[int]:
    """The ranks to be named; see [Note: who hangs]."""
    found = list(_last({rank: report.sign for rank, report in reports.items()}))
    found = [rank for rank in found if not reports[rank].sign.waits] or found
    found = [rank for rank in found if _is_behind(rank, reports)] or found
    fewest = min((reports[rank].sign.at.moves for rank in found), default=0)
    return [rank for rank in found if reports[rank].sign.at.moves == fewest]


def _last(signs: Mapping[int, Sign]) -> dict[int, Sign]:
    going = {rank: sign for rank, sign in signs.items() if sign.count != DONE}
    earliest = min(((sign.at.step, sign.at.part) for sign in going.values()), default=None)
    return {rank: sign for rank, sign in going.items() if (sign.at.step, sign.at.part) == earliest}


def _is_behind(rank: int, reports: Mapping[int, Report]) -> bool:
    mine = reports[rank].counts
    others = (report.counts for other, report in reports.items() if other != rank)
    return any(group in mine and mine[group] < counts for each in others for group, counts in each.items())


def tell_standing(ranks: Sequence[int], signs: Mapping[int, Sign]) -> str:
    """What to say of ranks that live and do not move."""
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"one of the ranks {', '.join(map(str, ranks))}"
    each = "; ".join(f"rank {rank} ({signs[rank].process}) is at {signs[rank].place}" for rank in ranks)
    sign = signs[ranks[0]]
    return (
        f"{which} hangs: no progress for {sign.still_s:.1f} s in step {sign.at.step}, phase {sign.at.phase}: {each}. "
        f"If a phase may take so long, raise watchdog_s."
    )


def tell_silent(ranks: Sequence[int], signs: Mapping[int, Sign], how_long: str, option: str = "timeout_s") -> str:
    """What to say of ranks that give no sign of life.

    Args:
        option: of the run file, that says how long they may be silent.
    """
    rank, others = ranks[0], ", ".join(map(str, ranks[1:]))
    sign = signs.get(rank)
    who = f"rank {rank}" + (f" ({sign.process})" if sign else "")
    where = f" It was last at {sign.place}{_position(sign)}." if sign else ""
    more = f" So do the ranks {others}." if others else ""
    return (
        f"{who} hangs: no sign of life for {how_long}.{where}{more} Its process is stopped or starved, or its machine "
        f"is cut off. If such pauses are to be borne, raise {option}."
    )


def tell_cut_off(rank: int, sign: Sign, how_long: str, option: str) -> str:
    """What a rank says that gets no answer from a launcher's store; arguments as of `tell_silent`."""
    return (
        f"rank {rank} ({sign.process}) gets no answer from the rendezvous store for {how_long}: its machine is cut "
        f"off from that of the launcher that hosts it, or that one is stopped. It ends, since others will go on "
        f"without it. If such pauses are to be borne, raise {option}."
    )


def _position(sign: Sign) -> str:
    return f", in step {sign.at.step}, phase {sign.at.phase}" if sign.at.step else ""


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
    silent = [rank for rank, sign in after.items() if rank in before and sign.count == before[rank].count != DONE]
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
