"""Private names of torch's profiler, of its allocator's history, and of its flight recorder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.profiler import record_function

from .torch_versions import category_of

_LOG_LEVEL = "KINETO_LOG_LEVEL"


def quieten_kineto() -> None:
    """Keep Kineto from writing a line to stderr each time that it starts and stops.

    It has no other switch than this variable, which it reads when it starts first; one that is set is left.
    """
    os.environ.setdefault(_LOG_LEVEL, "9")


def is_profiled() -> bool:
    """Whether a profiler of torch runs in this process. Private, since torch's own check is for its operators."""
    return bool(torch.autograd._profiler_enabled())


def marked(name: str) -> AbstractContextManager[object]:
    """A stretch of a run by its name, in the trace of whatever profiler of torch runs; nothing where none does."""
    return record_function(name) if is_profiled() else nullcontext()


def seen_by(profiler: torch.profiler.profile) -> Iterator[tuple[str, str, int, int, int]]:
    """Name, kind (Kineto's category), start and end [ns] and thread of each event of a profiler that has stopped.

    `events()` is public, and makes a tree of objects with averages of them, which takes as long as a short step.
    """
    inner = profiler.profiler
    found: Any = inner.kineto_results if inner is not None else None
    for each in found.events() if found is not None else ():
        yield each.name(), category_of(each), each.start_ns(), each.end_ns(), each.start_thread_id()


def record_memory_history(on: bool) -> None:
    """Have CUDA's allocator write down what it gives, with the stack of who takes it. torch documents the names."""
    torch.cuda.memory._record_memory_history("all" if on else None)


def dump_memory_snapshot(path: Path) -> None:
    """Write down the history, for https://docs.pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(str(path))


def flight_records(*, with_stacks: bool = True) -> list[tuple[str, bytes, bytes]]:
    """What torch has written down of this process's last collectives: (backend, as JSON, as torch's own pickle).

    Args:
        with_stacks: whether the pickle says where each was called, for which torch reads symbols first: 1 to 3 s.

    There are two recorders: that of NCCL, which builds without CUDA lack, and one for all other backends.
    """
    found = []
    for backend, as_json, as_pickle in (
        ("gloo", "_dump_fr_trace_json", "_dump_fr_trace"),
        ("nccl", "_dump_nccl_trace_json", "_dump_nccl_trace"),
    ):
        if hasattr(c10d, as_json):
            found.append((backend, getattr(c10d, as_json)(), getattr(c10d, as_pickle)(includeStackTraces=with_stacks)))
    return found
