"""The section `launch` of a run file. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from meshwright.plugin import FrozenModel, Size
from meshwright_run.secrets import FromEnvironment, is_secret, redact_assignments

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SingleLineText = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]*$")]
Memory = Annotated[str, Field(pattern=r"^[1-9]\d*[MGT]$")]


class SlurmSection(FrozenModel):
    """Options of Slurm jobs."""

    partition: SingleLineText | None = Field(
        default=None, description="Partition of the job; null: the cluster's default."
    )
    account: SingleLineText | None = Field(default=None, description="Account to charge.")
    qos: SingleLineText | None = Field(default=None, description="Quality of service.")
    constraint: SingleLineText | None = Field(default=None, description="Features that the nodes must have.")
    options: list[Annotated[str, Field(pattern=r"^--[a-z][^\x00-\x1f\x7f]*$")]] = Field(
        default=[], description="Further options of sbatch, such as --exclusive."
    )


class KubernetesSection(FrozenModel):
    """Options of Kubernetes jobs."""

    kind: Literal["JobSet", "TrainJob", "PyTorchJob"] = Field(
        default="JobSet", description="Kind of the job; TrainJob and PyTorchJob are Kubeflow's v2 and v1."
    )
    namespace: SingleLineText | None = Field(default=None, description="Namespace; null: that of kubectl's context.")
    image: SingleLineText | None = Field(
        default=None, description="Container image with meshwright and the packages of the strategy."
    )
    volume_claim: SingleLineText | None = Field(
        default=None, description="A persistent volume claim that all pods can write to; it must hold output_dir."
    )
    mount_path: Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]*$")] = Field(
        default="/data", description="Mount path of the volume claim."
    )
    queue: SingleLineText | None = Field(default=None, description="Local queue of Kueue.")
    runtime: SingleLineText = Field(default="torch-distributed", description="Training runtime of a TrainJob.")
    gpu_resource: SingleLineText = Field(default="nvidia.com/gpu", description="Resource name of a GPU.")
    node_selector: dict[str, str] = Field(default={}, description="Labels that the nodes must have.")
    service_account: SingleLineText | None = Field(
        default=None, description="Service account of the pods; null: the namespace's default."
    )


class SkyPilotSection(FrozenModel):
    """Options of SkyPilot tasks."""

    accelerators: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")] | None = Field(
        default=None, description="Type of accelerator, without a number, such as H100; null: CPUs."
    )
    infra: SingleLineText | None = Field(
        default=None, description="Infrastructure, such as aws/us-east-1 or kubernetes; null: the cheapest."
    )
    image: SingleLineText | None = Field(default=None, description="Machine image, or docker:NAME.")
    use_spot: bool = Field(default=True, description="Use spot instances; a preempted job is restarted elsewhere.")
    mounts: dict[str, str] = Field(
        default={}, description="Buckets by mount path, such as {/data: s3://bucket}; output_dir must be below one."
    )
    workdir: SingleLineText | None = Field(default=None, description="Directory to copy to all machines.")


class RaySection(FrozenModel):
    """Options of Ray jobs."""

    address: SingleLineText | None = Field(
        default=None, description="Address of the dashboard, such as http://head:8265; null: found by ray."
    )


class LaunchConfig(FrozenModel):
    """Options of a cluster job; see `meshwright launch`."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")] | None = Field(
        default=None,
        description="Job name: lower-case letters, digits and -, a letter first; null: derived from output_dir.",
    )
    nodes: Size = Field(default=1, description="Number of nodes.")
    ranks_per_node: Size | None = Field(
        default=None, description="Ranks of each node; null: gpus_per_node, or nproc if that is a number."
    )
    gpus_per_node: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="GPUs of each node; null: one per rank, or none if device is cpu."
    )
    cpus_per_rank: Size | None = Field(default=None, description="CPUs per rank; null: the cluster's default.")
    memory_per_node: Memory | None = Field(
        default=None, description="Memory of each node, such as 64G; null: the cluster's default."
    )
    time_limit: Annotated[str, Field(pattern=r"^[1-9]\d*[smhd]$")] | None = Field(
        default=None,
        description="Time limit of one allocation, such as 90m, 12h or 2d; null: the cluster's default. A TrainJob or "
        "PyTorchJob is not restarted after it.",
    )
    grace_s: Annotated[int, Field(ge=10, le=3600)] = Field(
        default=120,
        description="Seconds between signal and end; must cover two steps with evaluations, and two checkpoints.",
    )
    max_restarts: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=10,
        description="Maximum number of restarts after a failure; restarts after a preemption do not count. Slurm "
        "restarts no failed jobs, only preempted ones and those that reach their time limit.",
    )
    python: SingleLineText = Field(
        default="python", description="Python interpreter on the nodes, with meshwright installed."
    )
    setup: list[SingleLineText] = Field(
        default=[], description="Shell commands to run before the ranks start, such as module load cuda."
    )
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str | FromEnvironment] = Field(
        default={},
        description="Environment variables of all ranks: a string, or {from_env: NAME} to copy from your environment.",
    )
    slurm: SlurmSection = SlurmSection()
    kubernetes: KubernetesSection = KubernetesSection()
    skypilot: SkyPilotSection = SkyPilotSection()
    ray: RaySection = RaySection()

    @property
    def time_limit_s(self) -> int | None:
        return None if self.time_limit is None else int(self.time_limit[:-1]) * _SECONDS[self.time_limit[-1]]


def redact_launch(redacted: dict[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section without secrets: variables become `{from_env: NAME}`, and secrets in `setup` are redacted."""
    env = {
        name: {"from_env": name} if isinstance(value, str) and is_secret(name, value) else redacted["env"][name]
        for name, value in (original.get("env") or {}).items()
    }
    setup = [redact_assignments(each) if isinstance(each, str) else each for each in redacted.get("setup") or []]
    return {
        **redacted,
        **({"env": env} if "env" in redacted else {}),
        **({"setup": setup} if "setup" in redacted else {}),
    }
