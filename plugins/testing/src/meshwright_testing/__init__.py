"""What strategy authors test with: worker ranks, tiny models and parity with `single`."""

from meshwright.plugin import count_collectives
from meshwright_testing.case import Case, Difference, Outcome
from meshwright_testing.cells import Cell, Result
from meshwright_testing.conformance import conformance
from meshwright_testing.parity import assert_parity, compare
from meshwright_testing.pool import WorkerPool, pool

__all__ = [
    "Case",
    "Cell",
    "Difference",
    "Outcome",
    "Result",
    "WorkerPool",
    "assert_parity",
    "compare",
    "conformance",
    "count_collectives",
    "pool",
]
