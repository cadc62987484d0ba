"""The layout of a run, and the run file of one that is only planned. No torch in this module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.plugin import Degrees, Stack, resolve

from .data.order import check_batch_size
from .run_file import RunConfig, read_values

NO_END = 2**31 - 1
"""Steps of a run that does not say how many."""


def read_job(run_file: Path, assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of a run file, which need not say how long the run is.

    Raises:
        ConfigError: the file or an assignment cannot be read.
    """
    values = read_values(run_file, assignments)
    if values.get("steps") is None and values.get("epochs") is None:
        values["steps"] = NO_END
    return values


def layout_of(config: RunConfig, world_size: int) -> tuple[Stack, Degrees, int]:
    """Return a run's strategies, its mesh on so many ranks, and the sequences of a microbatch.

    Raises:
        MeshwrightError: as training does.
    """
    stack, degrees = resolve(
        config.strategy, config, world_size, config=config.strategy_config, wrapper_config=config.wrapper_config
    )
    rows = config.micro_batch_size or max(1, config.batch_size // degrees.dp)
    check_batch_size(config.batch_size, data_size=degrees.dp, micro_batch_size=rows)
    return stack, degrees, rows
