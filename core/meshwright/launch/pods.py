"""Ranks in pods of Kubernetes: of an indexed Job, alone or in a JobSet, and of Kubeflow's TrainJob and PyTorchJob.

[Note: pods] A container has one environment for all that runs in it, so the variables of a manifest or an operator make
its process a rank, or the pod a node. It is a node where torchrun's own arguments (PET_*) ask for several ranks; there
a process that torchrun has not started is no rank. The index of a pod is given (JOB_COMPLETION_INDEX), the number of
pods is not: the manifest has to state it.

Source: kubernetes.io/docs, "Indexed Job"; kubeflow/training-operator, pkg/controller.v1/pytorch/envvar.go;
kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go; torch.distributed.run (PET_*).
"""

from __future__ import annotations

from collections.abc import Mapping

from ..base.errors import MeshError
from .claim import DEFAULT_PORT, Claim, Launcher, number, require, said

_INDEX, _NODES, _NODE, _PER_NODE = "JOB_COMPLETION_INDEX", "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE"
_START = "Start torchrun in the pod, which reads them: `torchrun -m meshwright train run.yaml`, `torchrun script.py`"


def _ask(environment: Mapping[str, str]) -> Claim | None:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        # A container whose process is the only rank of its node.
        is_pod = _INDEX in environment or environment.get(_NODE) == environment["RANK"]
        return _claim(environment, "RANK", "WORLD_SIZE") if is_pod else None
    if _NODES in environment:
        return None if environment[_NODES] in ("1", "1:1") else _claim_of_node(environment)
    if _INDEX not in environment or environment.get("WORLD_SIZE") == "1":
        return None
    index = number(environment, _INDEX)
    if "WORLD_SIZE" not in environment:
        raise MeshError(
            f"this is pod {index} of an indexed Job ({_INDEX}), but nothing says of how many. If they train together, "
            f"set WORLD_SIZE (spec.completions) and MASTER_ADDR (the name of pod 0) in the manifest; where a pod has "
            f"several devices, {_NODES}, {_NODE}, {_PER_NODE} and PET_MASTER_ADDR instead, for torchrun. If each "
            f"trains by itself, set WORLD_SIZE=1."
        )
    size = number(environment, "WORLD_SIZE")
    if index >= size:
        raise MeshError(
            f"{_INDEX}={index}, but WORLD_SIZE={size}: pods are 0 to {size - 1}. Set WORLD_SIZE to spec.completions."
        )
    return _claim(environment, _INDEX, "WORLD_SIZE")


_MASTER = ("MASTER_ADDR", "MASTER_PORT")
PODS = Launcher(
    "Kubernetes",
    (_INDEX, _NODES, _NODE, _PER_NODE, "PET_MASTER_ADDR", "PET_MASTER_PORT", "RANK", "WORLD_SIZE", *_MASTER),
    _ask,
)


def refuse_index_of_node(environment: Mapping[str, str]) -> None:
    """Raise where RANK counts pods and WORLD_SIZE processes, or all pods have the same RANK.

    A PyTorchJob with `nprocPerNode` above 1 sets RANK to the index of the pod.
    """
    rank, size = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    per_node = environment.get(_PER_NODE, "1")
    is_node = per_node.isdecimal() and int(per_node) > 1 and environment.get(_NODE) == environment["RANK"]
    if is_node and "LOCAL_RANK" not in environment:
        raise MeshError(
            f"RANK={rank} is the index of this pod ({_NODE}), not of a rank: WORLD_SIZE={size} ranks are {per_node} in "
            f"each pod ({_PER_NODE}), which torchrun has to start. {_START}."
        )
    if size > 1 and number(environment, _INDEX, 0) > rank:
        raise MeshError(
            f"two say what rank this is: {said(environment, 'RANK', 'WORLD_SIZE')}, and {_INDEX}={environment[_INDEX]} "
            f"(an indexed Job), of which no pod has a rank below its index. Leave RANK out of the manifest."
        )


def _claim_of_node(environment: Mapping[str, str]) -> Claim:
    nodes = environment[_NODES]
    if environment.get(_PER_NODE, "1") != "1" or not nodes.isdecimal():
        raise MeshError(
            f"{said(environment, _NODES, _PER_NODE)} make this a node of several, on which torchrun is to start the "
            f"ranks, but torchrun has not started this process. {_START}."
        )
    require(environment, (_NODE,), f"one of {nodes} nodes ({_NODES})", _START + ", or set it.")
    return _claim(environment, _NODE, _NODES, "PET_")


def _claim(environment: Mapping[str, str], rank_name: str, size_name: str, prefix: str = "") -> Claim:
    """The claim of two variables; `prefix` is that of MASTER_ADDR and MASTER_PORT."""
    rank, size = number(environment, rank_name), number(environment, size_name)
    address, port = (f"{prefix}{name}" for name in _MASTER)

    def find_address() -> str:
        require(
            environment, (address,), f"pod {rank} of {size}", f"Set {address} to the name of pod 0 in the manifest."
        )
        return environment[address]

    return Claim(
        PODS.name,
        said(environment, rank_name, size_name),
        (rank_name, size_name),
        rank=rank,
        size=size,
        local_rank=0,
        local_size=1,
        address=find_address,
        port=lambda: number(environment, port, DEFAULT_PORT),
    )
