"""Ranks that Slurm's srun started.

[Note: steps] srun starts a step of one task or several; only several are a world. The step's own variables count
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


def _ask(environment: Mapping[str, str]) -> Claim | None:
    size = number(environment, "SLURM_STEP_NUM_TASKS", 1)
    if size == 1:
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
    is_alone = environment.get("SLURM_STEP_NUM_NODES") == "1"
    job, step = (number(environment, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return Claim(
        SLURM.name,
        said(environment, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_STEP_NUM_TASKS",),
        rank=number(environment, "SLURM_PROCID"),
        size=size,
        local_rank=number(environment, "SLURM_LOCALID"),
        local_size=_counts(environment["SLURM_STEP_TASKS_PER_NODE"])[number(environment, "SLURM_NODEID")],
        address=lambda: "127.0.0.1" if is_alone else _first_host(environment["SLURM_STEP_NODELIST"]),
        port=lambda: spread(job * 31 + step),
    )


SLURM = Launcher(
    "Slurm",
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", *_NAMES, "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_HET_SIZE"),
    _ask,
)


def devices_of_step() -> int:
    """Return how many accelerators of this node Slurm gave to the step, of which a task may see fewer; 0: unknown."""
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
