"""Ranks that Slurm's srun started.

[Note: steps] srun starts a step of one task or several; only several are a world. Its own variables count
(SLURM_STEP_*), since those of the job are also set where a batch script runs a single process.
Source: man srun, OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ..base.errors import MeshError
from .claim import Claim, Launcher, number, require, said, spread

_NAMES = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")


def claim_of_step(environment: Mapping[str, str]) -> Claim | None:
    """The task of a step of several that this is; see [Note: steps]."""
    if number(environment, "SLURM_STEP_NUM_TASKS", 1) == 1:
        return None
    if number(environment, "SLURM_HET_SIZE", 1) > 1:
        raise MeshError(
            "a heterogeneous Slurm job: its components count their tasks apart. Start the ranks with torchrun."
        )
    require(
        environment,
        _NAMES,
        f"one of {environment['SLURM_STEP_NUM_TASKS']} tasks of a Slurm step",
        "Pass on Slurm's variables (srun --export=ALL), or start torchrun in a single task of each node.",
    )
    per_node = _counts(environment["SLURM_STEP_TASKS_PER_NODE"])
    is_alone = environment.get("SLURM_STEP_NUM_NODES") == "1"
    job, step = (number(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Claim(
        SLURM.name,
        said(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_STEP_NUM_TASKS",),
        rank=number(environment, "SLURM_PROCID"),
        size=number(environment, "SLURM_STEP_NUM_TASKS"),
        local_rank=number(environment, "SLURM_LOCALID"),
        local_size=per_node[number(environment, "SLURM_NODEID")],
        address=lambda: "127.0.0.1" if is_alone else _first_host(environment["SLURM_STEP_NODELIST"]),
        port=lambda: spread(job * 31 + step),
    )


SLURM = Launcher(
    "Slurm",
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", *_NAMES, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_HET_SIZE"),
    claim_of_step,
)


def devices_of_step() -> int:
    """Accelerators of this node that Slurm gave to the step, of which a task may see its own alone; 0: it says none."""
    return len([each for each in os.environ.get("SLURM_STEP_GPUS", "").split(",") if each])


def _first_host(nodes: str) -> str:
    """The first of "gpu[001-003,7],login": gpu001."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)


def _counts(per_node: str) -> list[int]:
    """Tasks of each node: "2(x3),1" is 2, 2, 2, 1."""
    counts = []
    for part in per_node.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts
