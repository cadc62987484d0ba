"""Private names of torch's profiler, of its allocator history, and of its flight recorder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from meshwright.plugin import get_event_category


def silence_kineto() -> None:
    """Stop Kineto from writing to stderr when it starts and stops. Only this environment variable does so."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "9")


def iter_events(profiler: torch.profiler.profile) -> Iterator[tuple[str, str, int, int, int]]:
    """Yield name, Kineto category, start and end [ns], and thread of event event. The public `events()` is slow."""
    inner = profiler.profiler
    results: Any = inner.kineto_results if inner is not None else None
    for event in results.events() if results is not None else ():
        yield event.name(), get_event_category(event), event.start_ns(), event.end_ns(), event.start_thread_id()


def record_memory_history(enabled: bool) -> None:
    """Start or stop recording CUDA allocations with their stacks. torch documents the private names."""
    torch.cuda.memory._record_memory_history("all" if enabled else None)


def dump_memory_snapshot(path: Path) -> None:
    torch.cuda.memory._dump_snapshot(str(path))


def dump_flight_records(*, with_stacks: bool = True) -> list[tuple[str, bytes, bytes]]:
    """Return torch's records of this process's last collectives: (backend, as JSON, as torch's own pickle).

    NCCL, if built, has its own recorder. Only the pickle has stacks, and resolving their symbols takes 1 to 3 s.
    """
    records = []
    for backend, as_json, as_pickle in (
        ("gloo", "_dump_fr_trace_json", "_dump_fr_trace"),
        ("nccl", "_dump_nccl_trace_json", "_dump_nccl_trace"),
    ):
        if hasattr(c10d, as_json):
            records.append(
                (backend, getattr(c10d, as_json)(), getattr(c10d, as_pickle)(includeStackTraces=with_stacks))
            )
    return records
