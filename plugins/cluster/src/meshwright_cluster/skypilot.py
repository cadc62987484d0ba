"""A task of SkyPilot, for `sky jobs launch`, which restarts it on other machines after a preemption.

No signal reaches the ranks before a preemption, so a run resumes from its last periodic checkpoint. SkyPilot's
variables tell each machine its number, and the first one's address.
Source: SkyPilot's documentation, YAML specification and distributed jobs.
"""

from __future__ import annotations

import shlex
from typing import Any

from .job import RUN_FILE, Job

TASK = "job.yaml"
_RUN_FILE = f"~/.meshwright/{RUN_FILE}"


def task(job: Job) -> dict[str, Any]:
    launch, sky = job.launch, job.launch.skypilot
    resources: dict[str, Any] = {"use_spot": sky.use_spot}
    if sky.accelerators is not None:
        resources["accelerators"] = f"{sky.accelerators}:{job.gpus_per_node}"
    if launch.cpus_per_rank is not None:
        resources["cpus"] = f"{launch.cpus_per_rank * job.ranks_per_node}+"
    if launch.memory_per_node is not None:
        resources["memory"] = f"{_gigabytes(launch.memory_per_node)}+"
    if sky.infra is not None:
        resources["infra"] = sky.infra
    if sky.image is not None:
        resources["image_id"] = sky.image
    # By default a job is restarted only after a preemption, not after a failure of the run.
    resources["job_recovery"] = {"max_restarts_on_errors": launch.max_restarts}
    found: dict[str, Any] = {"name": job.name, "resources": resources, "num_nodes": launch.nodes}
    if sky.workdir is not None:
        found["workdir"] = sky.workdir
    buckets = {place: {"source": source, "mode": "MOUNT"} for place, source in sky.mounts.items()}
    found["file_mounts"] = {_RUN_FILE: str(job.directory / RUN_FILE), **buckets}
    found["envs"] = job.environment
    return {**found, "run": _script(job)}


def _script(job: Job) -> str:
    command = job.torchrun("RUN", node_rank="RANK", address="FIRST")
    # The machine's shell replaces these words, and nothing else.
    shell = {"RUN": f'"$HOME/{_RUN_FILE[2:]}"', "--node-rank=RANK": '--node-rank="$SKYPILOT_NODE_RANK"'}
    shell["--master-addr=FIRST"] = '--master-addr="$first"'
    words = " ".join(shell.get(word, shlex.quote(word)) for word in command)
    return "\n".join([*job.launch.setup, 'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', f"exec {words}", ""])


def _gigabytes(memory: str) -> int:
    number, unit = int(memory[:-1]), memory[-1]
    return {"M": -(-number // 1024), "G": number, "T": number * 1024}[unit]
