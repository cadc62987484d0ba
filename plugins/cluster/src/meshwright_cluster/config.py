"""The section `launch` of a run file. No torch in this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from meshwright.plugin import FrozenModel, Size
from meshwright_run.secrets import FromEnvironment, is_secret, redact_assignments

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
SingleLineText = Annotated[str, Field(min_length=1, pattern=r"^[^\x00-\x1f\x7f]*$")]  # Text on one line
Memory = Annotated[str, Field(pattern=r"^[1-9]\d*[MGT]$")]


class SlurmSection(FrozenModel):
    """What Slurm takes."""

    partition: SingleLineText | None = Field(default=None, description="Where to queue; null: the cluster's default.")
    account: SingleLineText | None = Field(default=None, description="Who pays.")
    qos: SingleLineText | None = Field(default=None, description="Quality of service.")
    constraint: SingleLineText | None = Field(default=None, description="Features that nodes must have.")
    options: list[Annotated[str, Field(pattern=r"^--[a-z][^\x00-\x1f\x7f]*$")]] = Field(
        default=[], description="Further options of sbatch, such as --exclusive."
    )


class KubernetesSection(FrozenModel):
    """What Kubernetes takes."""

    kind: Literal["JobSet", "TrainJob", "PyTorchJob"] = Field(
        default="JobSet", description="Of the job; Kubeflow's v2 and v1."
    )
    namespace: SingleLineText | None = Field(default=None, description="null: that of kubectl's context.")
    image: SingleLineText | None = Field(default=None, description="With meshwright and what the strategy needs.")
    volume_claim: SingleLineText | None = Field(
        default=None, description="A volume claim that all pods can write, on which output_dir is."
    )
    mount_path: Annotated[str, Field(pattern=r"^/[^\x00-\x1f\x7f]*$")] = Field(
        default="/data", description="Where the claim is seen."
    )
    queue: SingleLineText | None = Field(default=None, description="A local queue of Kueue.")
    runtime: SingleLineText = Field(
        default="torch-distributed", description="Of a TrainJob: the cluster's training runtime."
    )
    gpu_resource: SingleLineText = Field(default="nvidia.com/gpu", description="What a GPU is called.")
    node_selector: dict[str, str] = Field(default={}, description="Labels that nodes must have.")
    service_account: SingleLineText | None = None


class SkyPilotSection(FrozenModel):
    """What SkyPilot takes."""

    accelerators: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")] | None = Field(
        default=None, description="The type alone, such as H100; how many follows from the ranks. null: CPUs."
    )
    infra: SingleLineText | None = Field(
        default=None, description="Such as aws/us-east-1 or kubernetes; null: the cheapest."
    )
    image: SingleLineText | None = Field(default=None, description="A machine image, or docker:NAME.")
    use_spot: bool = Field(default=True, description="Machines that may be taken away; the job is restarted elsewhere.")
    mounts: dict[str, str] = Field(
        default={}, description="Where buckets are seen, such as {/data: s3://bucket}; output_dir is below one of them."
    )
    workdir: SingleLineText | None = Field(default=None, description="A directory that is copied to all machines.")


class RaySection(FrozenModel):
    """What Ray takes."""

    address: SingleLineText | None = Field(
        default=None, description="Of the dashboard, such as http://head:8265; null: as ray finds it."
    )


class LaunchConfig(FrozenModel):
    """What a cluster must know of a job; see `meshwright launch`."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")] | None = Field(
        default=None,
        description="Of the job: small letters, digits and -, a letter first; null: made from that of output_dir.",
    )
    nodes: Size = Field(default=1, description="Machines.")
    ranks_per_node: Size | None = Field(default=None, description="null: gpus_per_node, or nproc where it is a number.")
    gpus_per_node: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=None, description="null: one for each rank, or none where device is cpu."
    )
    cpus_per_rank: Size | None = Field(default=None, description="null: as the cluster has it.")
    memory_per_node: Memory | None = Field(default=None, description="Such as 64G; null: as the cluster has it.")
    time_limit: Annotated[str, Field(pattern=r"^[1-9]\d*[smhd]$")] | None = Field(
        default=None,
        description="Of one allocation: 90m, 12h or 2d; null: as the cluster has it. A TrainJob or PyTorchJob ends for "
        "good with it.",
    )
    grace_s: Annotated[int, Field(ge=10, le=3600)] = Field(
        default=120,
        description="Seconds between the signal and the end: two steps, evaluations that are due, and two checkpoints.",
    )
    max_restarts: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=10,
        description="How often a job that has failed is restarted, besides those that were pre-empted. Slurm's "
        "are not: only pre-empted ones, and those whose time was up.",
    )
    python: SingleLineText = Field(default="python", description="The interpreter on the nodes that has meshwright.")
    setup: list[SingleLineText] = Field(
        default=[], description="Lines of shell before the ranks start, such as module load cuda."
    )
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str | FromEnvironment] = Field(
        default={},
        description="Variables of all ranks: a text, or {from_env: NAME} for the value where the job is made.",
    )
    slurm: SlurmSection = SlurmSection()
    kubernetes: KubernetesSection = KubernetesSection()
    skypilot: SkyPilotSection = SkyPilotSection()
    ray: RaySection = RaySection()

    @property
    def time_limit_s(self) -> int | None:
        return None if self.time_limit is None else int(self.time_limit[:-1]) * _SECONDS[self.time_limit[-1]]


def redact_launch(redacted: dict[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section to be written: secret variables as `{from_env: NAME}`, and secrets in `setup` hidden."""
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
