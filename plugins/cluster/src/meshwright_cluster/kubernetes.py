"""Kubernetes manifests: a JobSet, a TrainJob of Kubeflow Trainer, or a PyTorchJob of its training operator.

[Note: one pod per node] Each pod runs torchrun, which starts the ranks of its node. Pods find the first pod by its DNS
name in a headless service, or by torchrun's environment variables, which Kubeflow's operators set.

[Note: restarts] If a pod fails or is evicted, all ranks end, and all are restarted together. A JobSet does not count
evictions (condition DisruptionTarget). A TrainJob restarts as its training runtime defines. Pods of a PyTorchJob
restart separately, and torchrun waits for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.plugin import to_yaml

from .job import MASTER_PORT, RUN_FILE, ClusterJob

MANIFEST_FILE = "job.yaml"
_RUN_FILE_DIRECTORY = "/etc/meshwright"  # Mount path of the run file
_RANKS_JOB, _STORAGE_VOLUME, _RUN_FILE_VOLUME, _SHM_VOLUME = "ranks", "storage", "run", "shm"


def build_manifests(job: ClusterJob) -> list[dict[str, Any]]:
    """Return the ConfigMap of the run file, and the job."""
    kind = job.launch.kubernetes.kind
    spec = {"JobSet": _build_job_set, "TrainJob": _build_train_job, "PyTorchJob": _build_pytorch_job}[kind](job)
    version = {
        "JobSet": "jobset.x-k8s.io/v1alpha2",
        "TrainJob": "trainer.kubeflow.org/v1alpha1",
        "PyTorchJob": "kubeflow.org/v1",
    }[kind]
    queue = job.launch.kubernetes.queue
    labels = {} if queue is None else {"labels": {"kueue.x-k8s.io/queue-name": queue}}
    data = {RUN_FILE: to_yaml(dict(job.values))}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": _build_metadata(job, _get_config_map_name(job)),
            "data": data,
        },
        {"apiVersion": version, "kind": kind, "metadata": {**_build_metadata(job, job.name), **labels}, "spec": spec},
    ]


def _get_config_map_name(job: ClusterJob) -> str:
    return f"{job.name}-run"


def _build_metadata(job: ClusterJob, name: str) -> dict[str, Any]:
    namespace = job.launch.kubernetes.namespace
    return {"name": name, **({} if namespace is None else {"namespace": namespace})}


# -- kinds


def _build_job_set(job: ClusterJob) -> dict[str, Any]:
    launch = job.launch
    node_rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container = _build_container(
        job,
        "ranks",
        # DNS name of the first pod in the headless service of the JobSet.
        _build_torchrun_command(job, node_rank="$(NODE_RANK)", address=f"{job.name}-{_RANKS_JOB}-0-0.{job.name}"),
        [{"name": "NODE_RANK", "valueFrom": node_rank}],
    )
    spec: dict[str, Any] = {
        "parallelism": launch.nodes,
        "completions": launch.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
        },
        "template": {"spec": {**_build_pod(job), "restartPolicy": "Never", "containers": [container]}},
    }
    if launch.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = launch.time_limit_s
    return {
        "failurePolicy": {
            "maxRestarts": launch.max_restarts,
            "rules": [
                {
                    "name": "preempted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "replicatedJobs": [{"name": _RANKS_JOB, "replicas": 1, "template": {"spec": spec}}],
    }


def _build_train_job(job: ClusterJob) -> dict[str, Any]:
    launch, kubernetes = job.launch, job.launch.kubernetes
    # The trainer spec has no volume mounts, so patch the container of the runtime.
    pod = {**_build_pod(job), "containers": [{"name": "node", "volumeMounts": _build_volume_mounts(job)}]}
    patch = {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}
    spec: dict[str, Any] = {
        "runtimeRef": {"name": kubernetes.runtime},
        "trainer": {
            "image": kubernetes.image,
            "command": _build_command(job, _build_torchrun_command(job)),
            "env": _build_env(job),
            "numNodes": launch.nodes,
            "numProcPerNode": job.ranks_per_node,
            "resourcesPerNode": _build_resources(job),
        },
        "runtimePatches": [{"manager": "meshwright.io/launch", "trainingRuntimeSpec": {"template": patch}}],
    }
    if launch.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = launch.time_limit_s
    return spec


def _build_pytorch_job(job: ClusterJob) -> dict[str, Any]:
    launch = job.launch
    # The operator sets RANK to the number of the pod; torchrun overwrites it for each rank.
    command = _build_torchrun_command(job, node_rank="$(RANK)", address="$(MASTER_ADDR)")
    container = {
        **_build_container(job, "pytorch", command),
        "ports": [{"name": "pytorchjob-port", "containerPort": MASTER_PORT}],
    }
    pod = {"spec": {**_build_pod(job), "containers": [container]}}

    def replica(count: int) -> dict[str, Any]:
        return {"replicas": count, "restartPolicy": "OnFailure", "template": pod}

    policy: dict[str, Any] = {"backoffLimit": launch.max_restarts, "cleanPodPolicy": "Running"}
    if launch.time_limit_s is not None:
        policy["activeDeadlineSeconds"] = launch.time_limit_s
    replicas = {"Master": replica(1)}
    if launch.nodes > 1:
        replicas["Worker"] = replica(launch.nodes - 1)
    return {"runPolicy": policy, "pytorchReplicaSpecs": replicas}


# -- pods


def _build_pod(job: ClusterJob) -> dict[str, Any]:
    kubernetes = job.launch.kubernetes
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": job.termination_grace_s,
        "volumes": [
            {"name": _STORAGE_VOLUME, "persistentVolumeClaim": {"claimName": kubernetes.volume_claim}},
            {"name": _RUN_FILE_VOLUME, "configMap": {"name": _get_config_map_name(job)}},
            # Shared memory for NCCL and data workers; the default is 64 MB.
            {"name": _SHM_VOLUME, "emptyDir": {"medium": "Memory"}},
        ],
    }
    if kubernetes.node_selector:
        pod["nodeSelector"] = dict(kubernetes.node_selector)
    if kubernetes.service_account is not None:
        pod["serviceAccountName"] = kubernetes.service_account
    return pod


def _build_container(
    job: ClusterJob, name: str, command: list[str], variables: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {
        "name": name,
        "image": job.launch.kubernetes.image,
        "command": _build_command(job, command),
        "env": [*_build_env(job), *variables],
        "resources": _build_resources(job),
        "volumeMounts": _build_volume_mounts(job),
    }


def _build_command(job: ClusterJob, command: list[str]) -> list[str]:
    """Prepend the lines of `launch.setup`. The command replaces the shell, so that signals reach it."""
    if not job.launch.setup:
        return command
    return ["bash", "-c", _escape_dollars("\n".join([*job.launch.setup, 'exec "$@"'])), "bash", *command]


def _build_torchrun_command(job: ClusterJob, **variables: str) -> list[str]:
    """Return the torchrun command, in which Kubernetes expands only the given variables."""
    words = job.build_torchrun_command(f"{_RUN_FILE_DIRECTORY}/{RUN_FILE}", **variables)
    return [_escape_dollars(words[0]), *words[1:]]


def _escape_dollars(text: str) -> str:
    """Escape text for commands and environment variables, in which Kubernetes expands $(NAME), and $$ to $."""
    return text.replace("$", "$$")


def _build_volume_mounts(job: ClusterJob) -> list[dict[str, Any]]:
    return [
        {"name": _STORAGE_VOLUME, "mountPath": job.launch.kubernetes.mount_path},
        {"name": _RUN_FILE_VOLUME, "mountPath": _RUN_FILE_DIRECTORY, "readOnly": True},
        {"name": _SHM_VOLUME, "mountPath": "/dev/shm"},
    ]


def _build_env(job: ClusterJob) -> list[dict[str, Any]]:
    return [{"name": name, "value": _escape_dollars(value)} for name, value in job.environment.items()]


def _build_resources(job: ClusterJob) -> dict[str, Any]:
    launch = job.launch
    requests: dict[str, Any] = {}
    if launch.cpus_per_rank is not None:
        requests["cpu"] = str(launch.cpus_per_rank * job.ranks_per_node)
    if launch.memory_per_node is not None:
        requests["memory"] = f"{launch.memory_per_node}i"
    if job.gpus_per_node:
        requests[launch.kubernetes.gpu_resource] = str(job.gpus_per_node)
    # The limits of GPUs and memory must equal the requests.
    return {"requests": requests, "limits": {name: value for name, value in requests.items() if name != "cpu"}}
