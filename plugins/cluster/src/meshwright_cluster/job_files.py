"""The files of a job for each target, and the command that submits them.

[Note: tasks are ranks] srun starts each rank as a task, and `meshwright train` reads Slurm's environment variables. A
torchrun task per node would kill ranks some time after a signal, and would return its own exit code. GPUs are requested
per node, not per task, so that ranks can copy between them.

[Note: requeueing] Slurm requeues a preempted job (--requeue) that still runs at the end of the grace period, but not
one that has ended by then or has reached its time limit. So the script requeues the job if the ranks exit with the code
of a stopped run. srun exits with the highest code of the ranks. When a rank fails, srun ends the others with SIGTERM; a
rank that dies of it would exit with 143, like a stopped run. So ranks ignore SIGTERM at first, until they handle it.
The script itself gets no signal (`--signal` goes to steps), except from scancel: a cancelled job is not requeued.
Source: man sbatch, man scontrol, slurm.conf (GraceTime, KillWait).

[Note: SkyPilot] `sky jobs launch` restarts a task on other machines after a preemption. Ranks get no signal before
it, so a run resumes from its last periodic checkpoint. Environment variables hold each machine's number and the
address of the first one. Source: SkyPilot's documentation, YAML specification and distributed jobs.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from meshwright.plugin import ConfigError, to_yaml, write_atomically

from . import Target, kubernetes, ray_train
from .job import RUN_FILE, ClusterJob

_INSTALL_HINTS = {
    "sbatch": "Submit from a login node of the cluster",
    "kubectl": "Install kubectl",
    "ray": "pip install 'ray[train]'",
    "sky": "pip install skypilot",
}


def render_job_files(job: ClusterJob, target: Target) -> dict[str, str]:
    """Return the text of each job file by name, the submitted file first."""
    run = {RUN_FILE: to_yaml(dict(job.values))}
    if target == "slurm":
        return {SLURM_SCRIPT: render_slurm_script(job), **run}
    if target == "kubernetes":
        # The manifest contains the run file.
        return {
            kubernetes.MANIFEST_FILE: "---\n".join(
                to_yaml(each, use_block_style=True) for each in kubernetes.build_manifests(job)
            )
        }
    if target == "ray":
        return {ray_train.DRIVER_FILE: ray_train.render_driver(job), **run}
    return {SKYPILOT_TASK: to_yaml(build_skypilot_task(job), use_block_style=True), **run}


def build_submit_command(job: ClusterJob, target: Target) -> list[str]:
    """Return the command that submits the job."""
    if target == "slurm":
        return ["sbatch", str(job.directory / SLURM_SCRIPT)]
    if target == "kubernetes":
        return ["kubectl", "apply", "-f", str(job.directory / kubernetes.MANIFEST_FILE)]
    if target == "ray":
        address = job.launch.ray.address
        at = [] if address is None else ["--address", address]
        run = ["--", job.launch.python, ray_train.DRIVER_FILE]
        return ["ray", "job", "submit", *at, "--no-wait", "--working-dir", str(job.directory), *run]
    return ["sky", "jobs", "launch", "--yes", "--detach-run", str(job.directory / SKYPILOT_TASK)]


def write_job_files(job: ClusterJob, files: dict[str, str]) -> None:
    """Write the files to the job's directory; raise ConfigError if that fails."""
    try:
        job.directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(job.directory / name, text, mode=0o600 if job.has_secrets else 0o666)
    except OSError as error:
        raise ConfigError(
            f"--out={str(job.directory)!r} cannot be written: {error.strerror}. Choose another."
        ) from None


def run_submit_command(command: list[str]) -> int:
    check_can_submit(command)
    return subprocess.run(command, check=False).returncode


def check_can_submit(command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{command[0]} is not installed here, so the job cannot be submitted. {_INSTALL_HINTS[command[0]]}; or "
            "leave --submit out, and submit the files on a machine that has it."
        )


SLURM_SCRIPT = "job.sbatch"


def render_slurm_script(job: ClusterJob) -> str:
    options = "\n".join(f"#SBATCH {option}" for option in _iter_slurm_options(job))
    exports = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items())
    command = [job.launch.python, "-m", "meshwright", "train", str(job.directory / RUN_FILE)]
    setup = "".join(f"{line}\n" for line in job.launch.setup)
    # In newer versions of Slurm, srun does not inherit --cpus-per-task from the job.
    cpus = [] if job.launch.cpus_per_rank is None else [f"--cpus-per-task={job.launch.cpus_per_rank}"]
    srun = shlex.join(["srun", "--kill-on-bad-exit=1", *cpus])
    stopped = job.config.checkpoint.stop_config.exit_code
    return f"""#!/bin/bash
{options}

{setup}{exports}

code=0
{srun} bash -c 'trap "" TERM; exec "$@"' bash {shlex.join(command)} || code=$?
if [ "$code" -eq {stopped} ]; then
    # Stopped by a signal: requeue, to resume later.
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _iter_slurm_options(job: ClusterJob) -> Iterator[str]:
    launch, slurm = job.launch, job.launch.slurm
    yield f"--job-name={shlex.quote(job.name)}"
    # Paths in the run file are relative to the current directory.
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
    # sbatch expands % patterns; %% is a literal %.
    yield f"--output={shlex.quote(str(job.directory).replace('%', '%%') + '/%x-%j.log')}"
    yield from slurm.options


SKYPILOT_TASK = "job.yaml"
_REMOTE_RUN_FILE = f"~/.meshwright/{RUN_FILE}"


def build_skypilot_task(job: ClusterJob) -> dict[str, Any]:
    launch, sky = job.launch, job.launch.skypilot
    resources: dict[str, Any] = {"use_spot": sky.use_spot}
    if sky.accelerators is not None:
        resources["accelerators"] = f"{sky.accelerators}:{job.gpus_per_node}"
    if launch.cpus_per_rank is not None:
        resources["cpus"] = f"{launch.cpus_per_rank * job.ranks_per_node}+"
    if launch.memory_per_node is not None:
        number, unit = int(launch.memory_per_node[:-1]), launch.memory_per_node[-1]
        resources["memory"] = f"{ {'M': -(-number // 1024), 'G': number, 'T': number * 1024}[unit] }+"
    if sky.infra is not None:
        resources["infra"] = sky.infra
    if sky.image is not None:
        resources["image_id"] = sky.image
    # By default a job is restarted only after a preemption, not after a failure of the run.
    resources["job_recovery"] = {"max_restarts_on_errors": launch.max_restarts}
    found: dict[str, Any] = {"name": job.name, "resources": resources, "num_nodes": launch.nodes}
    if sky.workdir is not None:
        found["workdir"] = sky.workdir
    buckets = {path: {"source": source, "mode": "MOUNT"} for path, source in sky.mounts.items()}
    found["file_mounts"] = {_REMOTE_RUN_FILE: str(job.directory / RUN_FILE), **buckets}
    found["envs"] = job.environment
    return {**found, "run": _render_skypilot_script(job)}


def _render_skypilot_script(job: ClusterJob) -> str:
    command = job.build_torchrun_command("RUN", node_rank="RANK", address="FIRST")
    # The machine's shell replaces these words, and nothing else.
    shell = {"RUN": f'"$HOME/{_REMOTE_RUN_FILE[2:]}"', "--node-rank=RANK": '--node-rank="$SKYPILOT_NODE_RANK"'}
    shell["--master-addr=FIRST"] = '--master-addr="$first"'
    words = " ".join(shell.get(word, shlex.quote(word)) for word in command)
    return "\n".join([*job.launch.setup, 'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', f"exec {words}", ""])
