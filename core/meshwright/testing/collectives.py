"""Count the collectives of a piece of code, for tests of how much a strategy communicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def count_collectives(work: Callable[[], object]) -> Counter[str]:
    """Run `work` and count this rank's collectives, in Python, C++ and autograd threads alike.

    Returns:
        Calls by kind: all_gather, reduce_scatter, all_reduce, broadcast, or torch's own name for others.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    counts: Counter[str] = Counter()
    for event in recorded.events() or []:
        if event.name.startswith("c10d::"):
            counts[_kind(event.name.removeprefix("c10d::"))] += 1
    return counts


def _kind(name: str) -> str:
    plain = name.strip("_").replace("allgather", "all_gather").replace("allreduce", "all_reduce")
    known = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
    return next((kind for kind in known if plain.startswith(kind)), plain)
