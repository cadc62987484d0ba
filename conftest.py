"""Which tests `make test` leaves out, and what a test cannot be named by."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
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
