"""What strategy authors test with: worker ranks, tiny models and parity with `single`."""

from .cells import Cell, Result
from .collectives import count_collectives
from .conformance import conformance
from .parity import Case, Difference, Outcome, assert_parity, compare
from .pool import WorkerPool, pool

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
