"""What strategy authors test with: worker ranks, tiny models and parity with `single`."""

from ..tracing.collectives import count_collectives
from .case import Case, Difference, Outcome
from .cells import Cell, Result
from .conformance import conformance
from .parity import assert_parity, compare
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
