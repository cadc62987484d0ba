"""Ranks that Slurm's srun started.

[Note: steps] srun starts a step of one or several tasks. Only several tasks form a world. The variables of the step
(SLURM_STEP_*) are used, since those of the job are also set if a batch script runs a single process.
Source: man srun, OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ..base.errors import MeshError
from .cluster_environment import (
    ClusterEnvironment,
    Launcher,
    derive_port,
    format_variables,
    read_count,
    require_variables,
)

_REQUIRED_VARIABLES = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
)


def _detect(environment: Mapping[str, str]) -> ClusterEnvironment | None:
    size = read_count(environment, "SLURM_STEP_NUM_TASKS", 1)
    if size == 1:
        return None
    if read_count(environment, "SLURM_HET_SIZE", 1) > 1:
        raise MeshError(
            "this is a heterogeneous Slurm job, whose components number their tasks separately. Start the ranks with "
            "torchrun."
        )
    require_variables(
        environment,
        _REQUIRED_VARIABLES,
        f"one of {environment['SLURM_STEP_NUM_TASKS']} tasks of a Slurm step",
        "Pass on Slurm's variables (srun --export=ALL), or start torchrun in a single task of each node.",
    )
    is_alone = environment.get("SLURM_STEP_NUM_NODES") == "1"
    job, step = (read_count(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return ClusterEnvironment(
        SLURM.name,
        format_variables(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_STEP_NUM_TASKS",),
        rank=read_count(environment, "SLURM_PROCID"),
        world_size=size,
        local_rank=read_count(environment, "SLURM_LOCALID"),
        local_world_size=_parse_tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[
            read_count(environment, "SLURM_NODEID")
        ],
        get_master_address=lambda: "127.0.0.1" if is_alone else parse_first_host(environment["SLURM_STEP_NODELIST"]),
        get_master_port=lambda: derive_port(job * 31 + step),
    )


SLURM = Launcher(
    "Slurm",
    (
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES",
        *_REQUIRED_VARIABLES,
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SLURM_HET_SIZE",
    ),
    _detect,
)


def count_step_devices() -> int:
    """Return the number of this node's accelerators in the Slurm step, of which a task may see fewer; 0: unknown."""
    return len([each for each in os.environ.get("SLURM_STEP_GPUS", "").split(",") if each])


def parse_first_host(nodes: str) -> str:
    """Return the first host of a node list: gpu001 for "gpu[001-003,7],login"."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _parse_tasks_per_node(per_node: str) -> list[int]:
    """Return the number of tasks of each node: [2, 2, 2, 1] for "2(x3),1"."""
    counts = []
    for part in per_node.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts
