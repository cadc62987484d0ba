"""Ranks in Kubernetes pods: of an indexed Job, alone or in a JobSet, and of Kubeflow's TrainJob and PyTorchJob.

[Note: pods] All processes of a container have the same environment. So the variables of a manifest or an operator
describe either the container's process as a rank, or the pod as a node. It is a node if torchrun's arguments (PET_*)
request several ranks; a process that torchrun has not started is then not a rank. Kubernetes sets the index of a pod
(JOB_COMPLETION_INDEX) but not the number of pods, which the manifest has to set.

Source: kubernetes.io/docs, "Indexed Job"; kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go;
kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go; torch.distributed.run (PET_*).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..base.errors import MeshError
from .cluster_environment import (
    DEFAULT_PORT,
    ClusterEnvironment,
    Launcher,
    format_variables,
    read_count,
    require_variables,
)

_INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
_NUM_NODES_VARIABLE = "PET_NNODES"
_NODE_RANK_VARIABLE = "PET_NODE_RANK"
_RANKS_PER_NODE_VARIABLE = "PET_NPROC_PER_NODE"
_START_TORCHRUN = (
    "Start torchrun in the pod, which reads them: `torchrun -m meshwright train run.yaml`, `torchrun script.py`"
)


def _detect(environment: Mapping[str, str]) -> ClusterEnvironment | None:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        # The container's process is the only rank of its node.
        is_pod = _INDEX_VARIABLE in environment or environment.get(_NODE_RANK_VARIABLE) == environment["RANK"]
        return _build_environment(environment, "RANK", "WORLD_SIZE") if is_pod else None
    if _NUM_NODES_VARIABLE in environment:
        return None if environment[_NUM_NODES_VARIABLE] in ("1", "1:1") else _build_node_environment(environment)
    if _INDEX_VARIABLE not in environment or environment.get("WORLD_SIZE") == "1":
        return None
    index = read_count(environment, _INDEX_VARIABLE)
    if "WORLD_SIZE" not in environment:
        raise MeshError(
            f"this is pod {index} of an indexed Job ({_INDEX_VARIABLE}), but the number of pods is not set. If they "
            "train together, set WORLD_SIZE (spec.completions) and MASTER_ADDR (the name of pod 0) in the manifest; if "
            f"a pod has several devices, set {_NUM_NODES_VARIABLE}, {_NODE_RANK_VARIABLE}, {_RANKS_PER_NODE_VARIABLE} "
            "and PET_MASTER_ADDR instead, for torchrun. If each trains on its own, set WORLD_SIZE=1."
        )
    size = read_count(environment, "WORLD_SIZE")
    if index >= size:
        raise MeshError(
            f"{_INDEX_VARIABLE}={index}, but WORLD_SIZE={size}: pods are 0 to {size - 1}. Set WORLD_SIZE to "
            "spec.completions."
        )
    return _build_environment(environment, _INDEX_VARIABLE, "WORLD_SIZE")


_MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
KUBERNETES = Launcher(
    "Kubernetes",
    (
        _INDEX_VARIABLE,
        _NUM_NODES_VARIABLE,
        _NODE_RANK_VARIABLE,
        _RANKS_PER_NODE_VARIABLE,
        "PET_MASTER_ADDR",
        "PET_MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        *_MASTER_VARIABLES,
    ),
    _detect,
)


def reject_node_rank(environment: Mapping[str, str]) -> None:
    """Raise MeshError if RANK counts pods but WORLD_SIZE counts processes, or if all pods have the same RANK.

    A PyTorchJob with `nprocPerNode` above 1 sets RANK to the index of the pod.
    """
    rank, size = read_count(environment, "RANK"), read_count(environment, "WORLD_SIZE")
    per_node = environment.get(_RANKS_PER_NODE_VARIABLE, "1")
    is_node = per_node.isdecimal() and int(per_node) > 1 and environment.get(_NODE_RANK_VARIABLE) == environment["RANK"]
    if is_node and "LOCAL_RANK" not in environment:
        raise MeshError(
            f"RANK={rank} is the index of this pod ({_NODE_RANK_VARIABLE}), not of a rank: of the WORLD_SIZE={size} "
            f"ranks, torchrun has to start {per_node} in each pod ({_RANKS_PER_NODE_VARIABLE}). {_START_TORCHRUN}."
        )
    if size > 1 and read_count(environment, _INDEX_VARIABLE, 0) > rank:
        raise MeshError(
            f"two sources give different ranks: {format_variables(environment, 'RANK', 'WORLD_SIZE')}, and "
            f"{_INDEX_VARIABLE}={environment[_INDEX_VARIABLE]} "
            f"(an indexed Job), in which no pod has a rank below its index. Leave RANK out of the manifest."
        )


def _build_node_environment(environment: Mapping[str, str]) -> ClusterEnvironment:
    nodes = environment[_NUM_NODES_VARIABLE]
    if environment.get(_RANKS_PER_NODE_VARIABLE, "1") != "1" or not nodes.isdecimal():
        raise MeshError(
            f"{format_variables(environment, _NUM_NODES_VARIABLE, _RANKS_PER_NODE_VARIABLE)} describe one of "
            "several nodes, on which torchrun has to start the "
            f"ranks, but torchrun has not started this process. {_START_TORCHRUN}."
        )
    require_variables(
        environment,
        (_NODE_RANK_VARIABLE,),
        f"one of {nodes} nodes ({_NUM_NODES_VARIABLE})",
        _START_TORCHRUN + ", or set it.",
    )
    return _build_environment(environment, _NODE_RANK_VARIABLE, _NUM_NODES_VARIABLE, "PET_")


def _build_environment(
    environment: Mapping[str, str], rank_name: str, size_name: str, prefix: str = ""
) -> ClusterEnvironment:
    """Return the environment that two variables describe; `prefix` is that of MASTER_ADDR and MASTER_PORT."""
    rank, size = read_count(environment, rank_name), read_count(environment, size_name)
    address, port = (f"{prefix}{name}" for name in _MASTER_VARIABLES)

    def find_address() -> str:
        require_variables(
            environment, (address,), f"pod {rank} of {size}", f"Set {address} to the name of pod 0 in the manifest."
        )
        return environment[address]

    return ClusterEnvironment(
        KUBERNETES.name,
        format_variables(environment, rank_name, size_name),
        (rank_name, size_name),
        rank=rank,
        world_size=size,
        local_rank=0,
        local_world_size=1,
        get_master_address=find_address,
        get_master_port=lambda: read_count(environment, port, DEFAULT_PORT),
    )
