"""Test tools for authors of strategies: worker ranks, tiny models and parity with `single`.

Names are imported at first access, so that listing the command `check` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.plugin import count_collectives as count_collectives

    from .case import Case, Difference, Outcome
    from .cells import Cell, Result
    from .parity import assert_parity, compare
    from .suite import conformance
    from .workers import WorkerPool, pool

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
_NAMES = {
    "meshwright.plugin": "count_collectives",
    "meshwright_testing.case": "Case Difference Outcome",
    "meshwright_testing.cells": "Cell Result",
    "meshwright_testing.parity": "assert_parity compare",
    "meshwright_testing.suite": "conformance",
    "meshwright_testing.workers": "WorkerPool pool",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
