"""The random numbers of a step."""

from __future__ import annotations

import numpy as np


def step_seed(seed: int, step: int, data_rank: int) -> int:
    """The seed of a step's random numbers: its own for each data rank, equal where ranks share a batch."""
    state = np.random.SeedSequence(seed, spawn_key=(step, data_rank)).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))
