"""What strategy authors test with: worker ranks, tiny models and parity with `single`."""

from .collectives import count_collectives
from .parity import Case, Difference, Outcome, assert_parity, compare
from .pool import WorkerPool, pool

__all__ = ["Case", "Difference", "Outcome", "WorkerPool", "assert_parity", "compare", "count_collectives", "pool"]
