"""A batch script of Slurm.

[Note: tasks are ranks] srun starts each rank as a task, and `meshwright train` joins by Slurm's variables. torchrun in
one task of each machine would kill ranks some time after a signal, and exit with a code of its own. GPUs are requested
per machine, not per task, so that ranks can copy between them.

[Note: requeueing] Slurm requeues a preempted job (--requeue) that still runs at the end of the grace period, but not
one that has ended by then, nor one whose time is up. So the script requeues it when the ranks exit with the code of a
stopped run. srun exits with the highest code of the ranks, and when one has failed it ends the others by SIGTERM; a
rank that dies of it would exit with 143, as a stopped one. So ranks begin with SIGTERM ignored, until they save on it.
The script itself gets no signal (`--signal` goes to steps), except from scancel: a cancelled job is not requeued.
Source: man sbatch, man scontrol, slurm.conf (GraceTime, KillWait).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from .job import RUN_FILE, Job

SCRIPT = "job.sbatch"


def batch_script(job: Job) -> str:
    """Return the text of the script."""
    options = "\n".join(f"#SBATCH {option}" for option in _options(job))
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items())
    command = [job.launch.python, "-m", "meshwright", "train", str(job.directory / RUN_FILE)]
    setup = "".join(f"{line}\n" for line in job.launch.setup)
    # Newer versions give a step none of the job's CPUs unless it asks itself.
    cpus = [] if job.launch.cpus_per_rank is None else [f"--cpus-per-task={job.launch.cpus_per_rank}"]
    srun = shlex.join(["srun", "--kill-on-bad-exit=1", *cpus])
    stopped = job.config.checkpoint.stops_on.exit_code
    return f"""#!/bin/bash
{options}

{setup}{exports}

code=0
{srun} bash -c 'trap "" TERM; exec "$@"' bash {shlex.join(command)} || code=$?
if [ "$code" -eq {stopped} ]; then
    # Saved, and stopped by a signal: go on when there is room.
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _options(job: Job) -> Iterator[str]:
    launch, slurm = job.launch, job.launch.slurm
    yield f"--job-name={shlex.quote(job.name)}"
    # Relative paths of the run file are relative to the current directory.
    yield f"--chdir={shlex.quote(os.getcwd())}"
    yield f"--nodes={launch.nodes}"
    yield f"--ntasks-per-node={job.ranks_per_node}"
    if job.gpus_per_node:
        yield f"--gpus-per-node={job.gpus_per_node}"
    if launch.cpus_per_rank is not None:
        yield f"--cpus-per-task={launch.cpus_per_rank}"
    if launch.memory_per_node is not None:
        yield f"--mem={launch.memory_per_node}"
    if launch.time_limit_s is not None:
        yield f"--time={max(1, launch.time_limit_s // 60)}"
    for name in ("partition", "account", "qos", "constraint"):
        value = getattr(slurm, name)
        if value is not None:
            yield f"--{name}={shlex.quote(value)}"
    yield f"--signal=TERM@{launch.grace_s}"
    yield "--requeue"
    yield "--open-mode=append"
    # sbatch replaces patterns with a %; %% is one.
    yield f"--output={shlex.quote(str(job.directory).replace('%', '%%') + '/%x-%j.log')}"
    yield from slurm.options
