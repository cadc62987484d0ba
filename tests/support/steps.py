"""Steps and refusals of a strategy on the ranks of a pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from meshwright import MeshwrightError, count_tokens
from meshwright.testing import Case
from meshwright.tracing.collectives import CollectiveTrace, count_collectives, record_collectives
from meshwright_testing.case import rank_microbatches
from meshwright_testing.parity import build_manager, train_steps


def prepare_gradient_step(manager: Any, case: Case, index: int = 0) -> Callable[[], Tensor]:
    """Return a call of the forwards and backwards of one step, which communicates nothing else."""
    batches = rank_microbatches(case, index, manager.mesh.data_rank, manager.mesh.data_size)
    tokens = count_tokens(batches, manager.mesh)
    return lambda: manager.forward_backward(batches, num_tokens=tokens)


def build_and_train(
    strategy: str, config: Mapping[str, Any], sizes: Mapping[str, int], case: Case, *, steps: int = 1
) -> Any:
    """Build a manager and train some steps, after which torch has settled the order of its collectives."""
    manager = build_manager(strategy, config, sizes, case)
    train_steps(manager, case, range(steps))
    return manager


def measure_traffic(strategy: str, config: Mapping[str, Any], sizes: Mapping[str, int], case: Case) -> CollectiveTrace:
    """Return the collectives of the forwards and backwards of a second step."""
    return record_collectives(prepare_gradient_step(build_and_train(strategy, config, sizes, case), case, 1))


def catch_refusal(
    strategy: str, config: Mapping[str, Any], sizes: Mapping[str, int], case: Case, steps: int = 0
) -> str:
    """Return the error of building a manager and training some steps, or "accepted"."""
    try:
        build_and_train(strategy, config, sizes, case, steps=steps)
    except MeshwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def count_step_collectives(
    strategy: str, config: Mapping[str, Any], sizes: Mapping[str, int], case: Case
) -> Counter[str]:
    """Return how often each kind of collective is called in the forwards and backwards of a second step."""
    return count_collectives(prepare_gradient_step(build_and_train(strategy, config, sizes, case), case, 1))
