"""Which tests `make test` leaves out."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `daily(n)` leaves out: all but n parameter sets of a test, drawn the same way each time."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("daily") is not None and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, sets in tests.items():
        (count,) = sets[0].get_closest_marker("daily").args
        left_out = random.Random(name).sample(sets, max(0, len(sets) - count))
        for item in left_out:
            item.add_marker(pytest.mark.slow)
