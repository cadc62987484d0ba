"""Count and measure the collectives of a piece of code, for tests of how much a strategy communicates.

[Note: bytes of a collective] The bytes of a call are always those of the whole tensor: what an all-gather yields, what
a reduce-scatter takes, what an all-reduce or broadcast passes, padding included. It does not matter which of torch's
operations carries it. What a rank then sends depends on the backend's algorithm; a ring sends (n - 1) / n of it for an
all-gather or reduce-scatter, and twice that for an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ..tensors.ops import tensors_in
from ._compat import bound_arguments, process_group
from .observe import Observer

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
NOT_COLLECTIVES = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan")


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


@dataclass(frozen=True)
class Collective:
    """One call on this rank.

    Attributes:
        kind: all_gather, reduce_scatter, all_reduce, broadcast, all_to_all, or torch's own name for others.
        group: the name that was given for its process group, or torch's description of it, such as "mesh_dp_shard".
        ranks: size of the group.
        dtype: of what is passed.
        bytes: see [Note: bytes of a collective].
    """

    kind: str
    group: str
    ranks: int
    dtype: torch.dtype
    bytes: int


@dataclass(frozen=True)
class Traffic:
    """Collectives in the order in which they were issued."""

    calls: tuple[Collective, ...]

    def of(self, kind: str | None = None, group: str | None = None) -> Traffic:
        """The calls of one kind, of one group, or of both."""
        return Traffic(tuple(each for each in self.calls if kind in (None, each.kind) and group in (None, each.group)))

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.calls)

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], list[int]] = {}
        for each in self.calls:
            row = rows.setdefault((each.kind, f"{each.group} ({each.ranks} ranks)", str(each.dtype)), [0, 0])
            row[0] += 1
            row[1] += each.bytes
        return "\n".join(f"{', '.join(key)}: {calls} calls, {size} bytes" for key, (calls, size) in rows.items())


def measure_collectives(work: Callable[[], object], groups: Mapping[str, dist.ProcessGroup] | None = None) -> Traffic:
    """Run `work` and note each of this rank's collectives: torch.distributed's own, DTensor's, FSDP's and DDP's.

    Backward belongs to `work`: on a CPU it runs in the calling thread, and autograd's threads for other devices take
    over its modes. Not seen: other threads that `work` starts, symmetric memory (async tensor parallelism), and what
    torch compiles before it is here; code that is first called here runs uncompiled.

    Args:
        groups: names for process groups, such as {"tp": mesh.group("tp")}; where several are one group, the first
            name holds.
    """
    mode = Recorder(groups or {})
    with mode:
        work()
    return Traffic(tuple(mode.calls))


class Recorder(Observer):
    """Notes each collective; see `measure_collectives`.

    Args:
        groups: names for process groups.
        tags: of messages between two ranks that are left out.

    Attributes:
        calls: in their order.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], *, tags: Collection[int] = ()) -> None:
        super().__init__()
        self._left_out = tags
        self.calls: list[Collective] = []
        self._names = {group.group_name: name for name, group in reversed(list(groups.items()))}

    def observe(self, operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if operation.namespace in NAMESPACES:
            name = operation.overloadpacket.__name__
            if name.strip("_") not in NOT_COLLECTIVES:
                self._note(name, bound_arguments(operation, args, kwargs), result)

    def _note(self, name: str, arguments: Mapping[str, Any], result: Any) -> None:
        if arguments.get("tag") in self._left_out:
            return
        group = process_group(arguments.get("process_group", arguments.get("group_name")))
        sides = [list(tensors_in(value)) for value in (*arguments.values(), result)]
        sizes = [sum(t.numel() * t.element_size() for t in side) for side in sides if side]
        dtypes = [t.dtype for side in sides for t in side]
        kind = _kind(name)
        size = max(sizes, default=0)
        if kind in ("gather", "scatter"):
            # Only the root holds the whole; all ranks hold a part.
            size = min(sizes) * group.size()
        named = self._names.get(group.group_name, group.group_desc)
        self.calls.append(Collective(kind, named, group.size(), dtypes[0], size))


def _kind(name: str) -> str:
    plain = name.strip("_").removeprefix("shard_dim_")
    for run_together in ("all_gather", "all_reduce", "all_to_all"):
        plain = plain.replace(run_together.replace("_", ""), run_together)
    known = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
    return next((kind for kind in known if plain.startswith(kind)), plain)
