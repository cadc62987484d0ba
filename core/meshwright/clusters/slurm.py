"""A batch script of Slurm.

[Note: tasks are ranks] srun starts each rank as a task, and `meshwright train` joins by Slurm's variables. torchrun in
one task for each machine would stand between: it kills ranks some time after a signal, and leaves with a code of its
own. GPUs are asked for by machine, not by task, so that ranks can copy to each other's.

[Note: queueing again] Slurm queues a job again that it has pre-empted (--requeue) if it ends at the signal's grace
period, but not one that has ended by then, nor one whose time is up. So the script does it, when the ranks have left
with the code of a run that was stopped. srun leaves with the highest of the codes of the ranks, and when one has failed
it ends the others by SIGTERM: one that dies of that leaves with 143, as one that was stopped. So ranks begin with
SIGTERM ignored, until they save on it. The script itself gets no signal (`--signal` goes to steps); it does get one
from scancel, and a job that was cancelled is not queued again.
Source: man sbatch, man scontrol, slurm.conf (GraceTime, KillWait).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from .job import RUN_FILE, Job

SCRIPT = "job.sbatch"


def batch_script(job: Job) -> str:
    """The text of the script."""
    options = "\n".join(f"#SBATCH {option}" for option in _options(job))
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items())
    command = [job.launch.python, "-m", "meshwright", "train", str(job.directory / RUN_FILE)]
    setup = "".join(f"{line}\n" for line in job.launch.setup)
    # Of what the job has, newer versions give a step no CPUs unless it asks itself.
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
    # What the run file says of relative paths, it says of where it was made a job.
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
    # sbatch replaces what is behind a %, unless there are two.
    yield f"--output={shlex.quote(str(job.directory).replace('%', '%%') + '/%x-%j.log')}"
    yield from slurm.options
