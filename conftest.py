"""Which tests `make test` leaves out, what a test cannot be named by, and what it must leave as it found it."""

from __future__ import annotations

import logging
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `daily(n)` leaves out: all but n parameter sets of a test, drawn the same way each time."""
    tests = defaultdict(list)
    for item in items:
        for value in getattr(getattr(item, "callspec", None), "params", {}).values():
            if _has_set(value) and str(value) in item.nodeid:
                raise pytest.UsageError(f"{item.nodeid} is named by a set, which has another order in each process.")
        if item.get_closest_marker("daily") is not None and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, sets in tests.items():
        (count,) = sets[0].get_closest_marker("daily").args
        left_out = random.Random(name).sample(sets, max(0, len(sets) - count))
        for item in left_out:
            item.add_marker(pytest.mark.slow)


def _has_set(value: Any) -> bool:
    """Whether a value is a set of several things, or holds one."""
    if isinstance(value, set | frozenset):
        return len(value) > 1
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_has_set, parts))


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """What one test switches for the whole process, another, which happens to follow, would fail or pass by."""
    before = _switches()
    yield
    for name, value in _switches().items():
        assert before.get(name, value) == value, f"this test leaves {name} behind: {value!r}, before {before[name]!r}"


def _switches() -> dict[str, Any]:
    """What libraries keep once for a whole process, of those that are imported already."""
    found: dict[str, Any] = {"the working directory": os.getcwd(), "logging.disable": logging.root.manager.disable}
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_default_dtype"):
        found["torch.get_default_dtype()"] = torch.get_default_dtype()
        found["torch.is_grad_enabled()"] = torch.is_grad_enabled()
        found["torch.are_deterministic_algorithms_enabled()"] = torch.are_deterministic_algorithms_enabled()
        found["torch.get_num_threads()"] = torch.get_num_threads()
        found["torch.distributed.is_initialized()"] = torch.distributed.is_initialized()
    if "transformers" in sys.modules:
        found["the verbosity of transformers"] = logging.getLogger("transformers").level
    return found
