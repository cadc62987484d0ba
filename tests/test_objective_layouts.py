"""An objective is the same sum in every layout: losses, further sums, norms, and what is trained."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from objective_layouts import LAYOUTS, case_of, everything, trained

from meshwright.testing import Case, Outcome, pool
from meshwright.testing.case import TOLERANCE
from meshwright.testing.parity import difference


@functools.cache
def _expected(case: Case, objective: Any = everything) -> Outcome:
    return pool(1).run(trained, LAYOUTS["single"], case, objective)[0]


def _worst(name: str, case: Case, objective: Any = everything, **options: Any) -> float:
    layout = LAYOUTS[name]
    found = pool(layout.ranks).run(functools.partial(trained, **options), layout, case, objective)
    return difference(found, _expected(case, objective)).worst


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "single"])
def test_everything_at_once_is_as_on_one_rank(name: str) -> None:
    """Packed rows of unequal numbers, further rows without labels, two microbatches, tied to nothing."""
    assert _worst(name, case_of(LAYOUTS[name])) <= TOLERANCE
