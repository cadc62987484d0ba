"""Ranks that Slurm's srun started: the variables of torchrun, made from those of Slurm.

[Note: steps] srun starts a step of one task or several; only several are a world. Its own variables count
(SLURM_STEP_*), since those of the job are also set where a batch script runs a single process. A process for which
RANK and WORLD_SIZE are set was started by torchrun, be it within a step of one task for each node, and is left alone.
Source: man srun, OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ..base.errors import MeshError

_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below the ports that systems give out by themselves."""

_OTHER_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")
"""What other starters of processes call the size of the world."""


def join_step() -> None:
    """In a task of a Slurm step of several: set the variables that torchrun would, where they are not set.

    Raises:
        MeshError: several processes were started, but not how they find each other; without this each would train by
            itself.
    """
    os.environ.update(torchrun_variables(os.environ))


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What `join_step` sets; nothing outside of a step of several tasks. See [Note: steps]."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return {}
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        _refuse_others(environment)
        return {}
    if int(environment.get("SLURM_HET_SIZE", "1")) > 1:
        raise MeshError(
            "a heterogeneous Slurm job: its components count their tasks apart. Start the ranks with torchrun."
        )
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    missing = [name for name in names if name not in environment]
    if missing:
        raise MeshError(
            f"this is one of {environment['SLURM_STEP_NUM_TASKS']} tasks of a Slurm step, but {', '.join(missing)} is "
            f"not set, so the tasks cannot find each other. Pass on Slurm's variables (srun --export=ALL), or start "
            f"torchrun in a single task of each node."
        )
    rank, local_rank, node, per_node, nodes = (environment[name] for name in names)
    found = {
        "RANK": rank,
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(_counts(per_node)[int(node)]),
        "MASTER_ADDR": _first_host(nodes) if environment.get("SLURM_STEP_NUM_NODES") != "1" else "127.0.0.1",
        "MASTER_PORT": str(_port(environment)),
    }
    return {name: environment.get(name, value) for name, value in found.items()}


def devices_of_step() -> int:
    """Accelerators of this node that Slurm gave to the step, of which a task may see its own alone; 0: it says none."""
    return len([each for each in os.environ.get("SLURM_STEP_GPUS", "").split(",") if each])


def _refuse_others(environment: Mapping[str, str]) -> None:
    for name in _OTHER_SIZES:
        if environment.get(name, "1") not in ("", "1"):
            raise MeshError(
                f"this is one of {environment[name]} processes ({name}), but RANK and WORLD_SIZE are not set, so each "
                f"would train by itself. Start the ranks with torchrun, srun or `meshwright train`, or set RANK, "
                f"WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT."
            )


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


def _port(environment: Mapping[str, str]) -> int:
    """One for each step, so that those that run side by side do not meet."""
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 31 + step) % _PORTS
