"""Count and measure the collectives of a piece of code.

[Note: bytes of a collective] The bytes of a call are those of the full tensor, padding included: what an all-gather
returns, what a reduce-scatter takes, what an all-reduce or broadcast passes. How many of them a rank sends depends on
the backend; a ring sends (n - 1) / n for an all-gather or reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ..tensors.ops import list_tensors
from ._compat import bind_arguments, resolve_process_group
from .observers import OperationObserver

COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
"""Namespaces of torch's operators that communicate."""
NOT_COLLECTIVES = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan")
COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")


def count_collectives(work: Callable[[], object]) -> Counter[str]:
    """Run `work` and count this rank's collectives, in Python, C++ and autograd threads alike.

    Returns:
        Calls by kind: all_gather, reduce_scatter, all_reduce, broadcast, or torch's own name for others.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    names = [event.name for event in recorded.events() or []]
    return Counter(_classify_collective(name.removeprefix("c10d::")) for name in names if name.startswith("c10d::"))


@dataclass(frozen=True)
class Collective:
    """One call on this rank: of `KINDS`, or by torch's own name, in a named group or one such as "mesh_dp_shard"."""

    kind: str
    group: str
    num_ranks: int
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class CollectiveTrace:
    """Collectives in the order in which they were issued."""

    calls: tuple[Collective, ...]

    def filter(self, kind: str | None = None, group: str | None = None) -> CollectiveTrace:
        """Return the calls of one kind, of one group, or of both."""
        return CollectiveTrace(
            tuple(each for each in self.calls if kind in (None, each.kind) and group in (None, each.group))
        )

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.calls)

    def __str__(self) -> str:
        calls, sizes = Counter[str](), Counter[str]()
        for each in self.calls:
            row = f"{each.kind}, {each.group} ({each.num_ranks} ranks), {each.dtype}"
            calls[row] += 1
            sizes[row] += each.nbytes
        return "\n".join(f"{row}: {count} calls, {sizes[row]} bytes" for row, count in calls.items())


def record_collectives(
    work: Callable[[], object], groups: Mapping[str, dist.ProcessGroup] | None = None
) -> CollectiveTrace:
    """Run `work` and record each of this rank's collectives: torch.distributed's own, DTensor's, FSDP's and DDP's.

    Backward belongs to `work`: on a CPU it runs in the calling thread, and autograd's threads for other devices inherit
    its modes. Not seen: other threads that `work` starts, symmetric memory (async tensor parallelism), and what torch
    has compiled before; code that is first called here runs uncompiled. Names for process groups may be given, such as
    {"tp": mesh.group("tp")}; of several names for one group the first counts.
    """
    mode = CollectiveRecorder(groups or {})
    with mode:
        work()
    return CollectiveTrace(tuple(mode.calls))


class CollectiveRecorder(OperationObserver):
    """Record each collective in `calls`, but no messages between two ranks of some tags; see `record_collectives`."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], *, ignored_tags: Collection[int] = ()) -> None:
        super().__init__()
        self._ignored_tags = ignored_tags
        self.calls: list[Collective] = []
        self._names = {group.group_name: name for name, group in reversed(list(groups.items()))}

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        name = operation.overloadpacket.__name__
        if operation.namespace not in COLLECTIVE_NAMESPACES or name.strip("_") in NOT_COLLECTIVES:
            return
        arguments = bind_arguments(operation, args, kwargs)
        if arguments.get("tag") in self._ignored_tags:
            return
        group = resolve_process_group(arguments.get("process_group", arguments.get("group_name")))
        sides = [list(list_tensors(value)) for value in (*arguments.values(), result)]
        sizes = [sum(t.numel() * t.element_size() for t in side) for side in sides if side]
        dtypes = [t.dtype for side in sides for t in side]
        kind = _classify_collective(name)
        # Only the root of a gather or scatter holds the full tensor; all ranks hold a part.
        size = min(sizes) * group.size() if kind in ("gather", "scatter") else max(sizes, default=0)
        named = self._names.get(group.group_name, group.group_desc)
        self.calls.append(Collective(kind, named, group.size(), dtypes[0], size))


def _classify_collective(name: str) -> str:
    plain = name.strip("_").removeprefix("shard_dim_")
    for run_together in ("all_gather", "all_reduce", "all_to_all"):
        plain = plain.replace(run_together.replace("_", ""), run_together)
    return next((kind for kind in COLLECTIVE_KINDS if plain.startswith(kind)), plain)
