"""The names of `meshwright.testing`; each is imported from the plugin meshwright-testing on first use."""

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
