"""Manifests of Kubernetes: a JobSet, a TrainJob of Kubeflow's Trainer, or a PyTorchJob of its training operator.

[Note: one pod for each machine] A pod runs torchrun, which starts the ranks of its machine. Pods find the first one by
its name in a headless service, or by torchrun's variables, which Kubeflow's operators set.

[Note: restarts] If one pod fails or is evicted, all ranks end, and all are restarted together. A JobSet does not count
evictions (condition DisruptionTarget). A TrainJob restarts as its runtime says; pods of a PyTorchJob restart by
themselves, and torchrun waits for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.plugin import as_yaml

from .job import PORT, RUN_FILE, Job

MANIFEST = "job.yaml"
_SETTINGS = "/etc/meshwright"  # Where a pod sees the run file
_RANKS, _STORAGE, _RUN, _SHARED = "ranks", "storage", "run", "shm"


def manifests(job: Job) -> list[dict[str, Any]]:
    """Return the run file as a ConfigMap, and the job."""
    kind = job.launch.kubernetes.kind
    spec = {"JobSet": _job_set, "TrainJob": _train_job, "PyTorchJob": _pytorch_job}[kind](job)
    version = {
        "JobSet": "jobset.x-k8s.io/v1alpha2",
        "TrainJob": "trainer.kubeflow.org/v1alpha1",
        "PyTorchJob": "kubeflow.org/v1",
    }[kind]
    queue = job.launch.kubernetes.queue
    labels = {} if queue is None else {"labels": {"kueue.x-k8s.io/queue-name": queue}}
    data = {RUN_FILE: as_yaml(dict(job.values))}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job, _settings(job)), "data": data},
        {"apiVersion": version, "kind": kind, "metadata": {**_metadata(job, job.name), **labels}, "spec": spec},
    ]


def _settings(job: Job) -> str:
    return f"{job.name}-run"


def _metadata(job: Job, name: str) -> dict[str, Any]:
    namespace = job.launch.kubernetes.namespace
    return {"name": name, **({} if namespace is None else {"namespace": namespace})}


# -- kinds


def _job_set(job: Job) -> dict[str, Any]:
    launch = job.launch
    node_rank = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container = _container(
        job,
        "ranks",
        # The name of the first pod in the set's headless service.
        _torchrun(job, node_rank="$(NODE_RANK)", address=f"{job.name}-{_RANKS}-0-0.{job.name}"),
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
        "template": {"spec": {**_pod(job), "restartPolicy": "Never", "containers": [container]}},
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
        "replicatedJobs": [{"name": _RANKS, "replicas": 1, "template": {"spec": spec}}],
    }


def _train_job(job: Job) -> dict[str, Any]:
    launch, kubernetes = job.launch, job.launch.kubernetes
    # Mounts cannot be set in the trainer, so the runtime's own container is patched.
    pod = {**_pod(job), "containers": [{"name": "node", "volumeMounts": _mounts(job)}]}
    patch = {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}
    spec: dict[str, Any] = {
        "runtimeRef": {"name": kubernetes.runtime},
        "trainer": {
            "image": kubernetes.image,
            "command": _command(job, _torchrun(job)),
            "env": _environment(job),
            "numNodes": launch.nodes,
            "numProcPerNode": job.ranks_per_node,
            "resourcesPerNode": _resources(job),
        },
        "runtimePatches": [{"manager": "meshwright.io/launch", "trainingRuntimeSpec": {"template": patch}}],
    }
    if launch.time_limit_s is not None:
        spec["activeDeadlineSeconds"] = launch.time_limit_s
    return spec


def _pytorch_job(job: Job) -> dict[str, Any]:
    launch = job.launch
    # The operator's RANK is the pod's number, until torchrun sets it for each rank.
    command = _torchrun(job, node_rank="$(RANK)", address="$(MASTER_ADDR)")
    container = {**_container(job, "pytorch", command), "ports": [{"name": "pytorchjob-port", "containerPort": PORT}]}
    pod = {"spec": {**_pod(job), "containers": [container]}}

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


def _pod(job: Job) -> dict[str, Any]:
    kubernetes = job.launch.kubernetes
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": job.kill_after_s,
        "volumes": [
            {"name": _STORAGE, "persistentVolumeClaim": {"claimName": kubernetes.claim}},
            {"name": _RUN, "configMap": {"name": _settings(job)}},
            # For NCCL and data workers; a pod's default is 64 MB.
            {"name": _SHARED, "emptyDir": {"medium": "Memory"}},
        ],
    }
    if kubernetes.node_selector:
        pod["nodeSelector"] = dict(kubernetes.node_selector)
    if kubernetes.service_account is not None:
        pod["serviceAccountName"] = kubernetes.service_account
    return pod


def _container(job: Job, name: str, command: list[str], variables: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    return {
        "name": name,
        "image": job.launch.kubernetes.image,
        "command": _command(job, command),
        "env": [*_environment(job), *variables],
        "resources": _resources(job),
        "volumeMounts": _mounts(job),
    }


def _command(job: Job, command: list[str]) -> list[str]:
    """The command after the lines of `launch.setup`; it replaces the shell, so that signals reach it."""
    if not job.launch.setup:
        return command
    return ["bash", "-c", _plain("\n".join([*job.launch.setup, 'exec "$@"'])), "bash", *command]


def _torchrun(job: Job, **variables: str) -> list[str]:
    """The command, in which Kubernetes replaces these variables and nothing else."""
    words = job.torchrun(f"{_SETTINGS}/{RUN_FILE}", **variables)
    return [_plain(words[0]), *words[1:]]


def _plain(text: str) -> str:
    """Escape text for commands and variables, in which Kubernetes replaces $(NAME), and $$ by one $."""
    return text.replace("$", "$$")


def _mounts(job: Job) -> list[dict[str, Any]]:
    return [
        {"name": _STORAGE, "mountPath": job.launch.kubernetes.mount},
        {"name": _RUN, "mountPath": _SETTINGS, "readOnly": True},
        {"name": _SHARED, "mountPath": "/dev/shm"},
    ]


def _environment(job: Job) -> list[dict[str, Any]]:
    return [{"name": name, "value": _plain(value)} for name, value in job.environment.items()]


def _resources(job: Job) -> dict[str, Any]:
    launch = job.launch
    asked: dict[str, Any] = {}
    if launch.cpus_per_rank is not None:
        asked["cpu"] = str(launch.cpus_per_rank * job.ranks_per_node)
    if launch.memory_per_node is not None:
        asked["memory"] = f"{launch.memory_per_node}i"
    if job.gpus_per_node:
        asked[launch.kubernetes.gpu_resource] = str(job.gpus_per_node)
    # The limits of GPUs and memory must equal the requests.
    return {"requests": asked, "limits": {name: value for name, value in asked.items() if name != "cpu"}}
