"""Parameters of tests of which a few run in `make test`, and the rest in the full tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def mark_mostly_slow(cases: Iterable[Any], *fast: Any) -> list[ParameterSet]:
    """Mark all cases slow except those whose values, first value or id are in `fast`; by default except the first.

    Args:
        cases: as for `pytest.mark.parametrize`; of a mapping, its keys.
    """
    found = [each if isinstance(each, ParameterSet) else _build_param(each) for each in cases]
    fast = fast or (found[0].values,)
    return [
        each
        if each.values in fast or each.values[0] in fast or each.id in fast
        else each._replace(marks=(*each.marks, pytest.mark.slow))
        for each in found
    ]


def _build_param(case: Any) -> ParameterSet:
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
