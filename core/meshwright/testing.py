"""What strategy authors test with: worker ranks, tiny models and parity with `single`.

The names are those of the plugin meshwright-testing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright_testing import Case as Case
    from meshwright_testing import Cell as Cell
    from meshwright_testing import Difference as Difference
    from meshwright_testing import Outcome as Outcome
    from meshwright_testing import Result as Result
    from meshwright_testing import WorkerPool as WorkerPool
    from meshwright_testing import assert_parity as assert_parity
    from meshwright_testing import compare as compare
    from meshwright_testing import conformance as conformance
    from meshwright_testing import count_collectives as count_collectives
    from meshwright_testing import pool as pool


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .strategy.registry import import_plugin

    return getattr(import_plugin("testing"), name)
