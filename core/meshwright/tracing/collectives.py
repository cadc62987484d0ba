"""Count and measure the collectives of a piece of code.

[Note: bytes of a collective] The bytes of a call are those of the full tensor, including padding: the output of an
all-gather, the input of a reduce-scatter, the tensor of an all-reduce or broadcast. The share of them that a rank sends
depends on the backend; a ring sends (n - 1) / n for an all-gather or reduce-scatter, and twice that for an all-reduce.
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
"""Namespaces of torch's communication operators."""
NOT_COLLECTIVES = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan")
COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")


def count_collectives(work: Callable[[], object]) -> Counter[str]:
    """Run `work` and count this rank's collectives, including those of C++ code and autograd threads.

    Returns:
        Number of calls by kind: one of `COLLECTIVE_KINDS`, or torch's name for other collectives.
    """
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    names = [event.name for event in recorded.events() or []]
    return Counter(_classify_collective(name.removeprefix("c10d::")) for name in names if name.startswith("c10d::"))


@dataclass(frozen=True)
class Collective:
    """One call on this rank.

    `kind` is one of `COLLECTIVE_KINDS`, or torch's name for other collectives. `group` is the caller's name for the
    group, or torch's description of it, such as "mesh_dp_shard".
    """

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
    """Run `work` and record this rank's collectives: those of torch.distributed, DTensor, FSDP and DDP.

    Collectives in backward are recorded: on a CPU, backward runs in the calling thread, and autograd's threads for
    other devices inherit its dispatch modes. Not recorded: other threads that `work` starts, symmetric memory (async
    tensor parallelism), and code that is already compiled. Code that is first called here runs uncompiled.

    Args:
        work: the function to run.
        groups: names of process groups, such as {"tp": mesh.group("tp")}. If a group has several, the first is used.
    """
    mode = CollectiveRecorder(groups or {})
    with mode:
        work()
    return CollectiveTrace(tuple(mode.calls))


class CollectiveRecorder(OperationObserver):
    """Record each collective in `calls`; see `record_collectives`.

    `ignored_tags`: tags of point-to-point messages that are not recorded.
    """

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
        # Only the root of a gather or scatter has the full tensor; all ranks have a part.
        size = min(sizes) * group.size() if kind in ("gather", "scatter") else max(sizes, default=0)
        group_name = self._names.get(group.group_name, group.group_desc)
        self.calls.append(Collective(kind, group_name, group.size(), dtypes[0], size))


def _classify_collective(name: str) -> str:
    plain = name.strip("_").removeprefix("shard_dim_")
    for compound in ("all_gather", "all_reduce", "all_to_all"):
        plain = plain.replace(compound.replace("_", ""), compound)
    return next((kind for kind in COLLECTIVE_KINDS if plain.startswith(kind)), plain)
