"""Join the processes that a launcher has started: set torchrun's variables from those of other launchers.

[Note: launcher precedence] Innermost first: an existing process group; torchrun's RANK and WORLD_SIZE; then
`list_launchers()` in order. The first one that gives this process a rank takes precedence. The other launchers must
give the same rank and size, or be nested outside, that is, have started the process that started the ranks:

- torchrun's agent (TORCHELASTIC_RUN_ID is set) may run in the tasks, processes or pods of any other launcher;
- so may Ray;
- RANK, WORLD_SIZE and LOCAL_WORLD_SIZE set by other means may describe ranks that each process of the outer launcher
  starts: WORLD_SIZE is LOCAL_WORLD_SIZE times the number of these processes;
- mpirun may run in a Slurm allocation: a Slurm step with a single task on each node is its daemons.

Everything else means two worlds in one process, and is rejected before any rank waits for another. A rank sees only its
own variables, so the error may be raised on only some ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ..base.errors import MeshError
from ..strategy.registry import get_registry
from .cluster_environment import ClusterEnvironment, Launcher, format_variables, read_count
from .kubernetes import KUBERNETES, reject_node_rank
from .mpi import MPICH, OPEN_MPI, PMIX
from .ray_train import RAY_TRAIN
from .slurm import SLURM

BUILT_IN_LAUNCHERS: tuple[Launcher, ...] = (RAY_TRAIN, OPEN_MPI, MPICH, PMIX, SLURM, KUBERNETES)
"""The built-in launchers, innermost first; see [Note: launcher precedence]."""

_MANUAL = "the environment"
"""Launcher name if RANK and WORLD_SIZE were not set by torchrun."""


def list_launchers() -> list[Launcher]:
    """Return the launchers of plugins (hook `register_launchers`), then the built-in ones."""
    return [
        *(each for launchers in get_registry().hook.register_launchers() for each in launchers),
        *BUILT_IN_LAUNCHERS,
    ]


def join_launcher(*, has_store: bool = False) -> None:
    """Set torchrun's variables that are missing, if a launcher has started this process as one of several.

    With Ray Train and no torch backend, this is collective over the workers.

    Args:
        has_store: the caller has a rendezvous store, so the address of rank 0 is not needed.

    Raises:
        MeshError: several processes were started but cannot find each other, or two launchers contradict each other.
            Without this error, each process would train separately, or wait for ranks that do not exist.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        os.environ.update(_variables_for_group(os.environ, dist.get_rank(), dist.get_world_size()))
    else:
        os.environ.update(resolve_torchrun_variables(os.environ, has_store=has_store))


def resolve_torchrun_variables(environment: Mapping[str, str], *, has_store: bool = False) -> dict[str, str]:
    """Return the variables that `join_launcher` sets; none in a single process. See [Note: launcher precedence]."""
    has_rank, has_size = "RANK" in environment, "WORLD_SIZE" in environment
    if has_rank and has_size and "TORCHELASTIC_RUN_ID" in environment:
        return {}
    own = [_detect_manual(environment)] if has_rank and has_size else []
    environments = [*own, *_detect_environments(environment, may_fail=bool(own))]
    if not environments:
        if has_rank or environment.get("WORLD_SIZE", "1") != "1":
            one, other = ("RANK", "WORLD_SIZE") if has_rank else ("WORLD_SIZE", "RANK")
            raise MeshError(
                f"{one}={environment[one]} is set, but {other} is not. Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR "
                f"and MASTER_PORT, or unset {one}, or start the ranks with torchrun, which sets all of them."
            )
        return {}
    inner = environments[0]
    same = [each for each in environments if (each.rank, each.world_size) == (inner.rank, inner.world_size)]
    for outer in environments[1:]:
        if outer not in same and not inner.is_nested_in(outer):
            raise _conflict_error(inner.evidence, inner.launcher, inner.identifying_variables, outer)
    for name, value in (("RANK", inner.rank), ("WORLD_SIZE", inner.world_size)):
        if name in environment and read_count(environment, name) != value:
            raise _conflict_error(f"{name}={environment[name]}", _MANUAL, (name,), inner)
    return _build_missing_variables(environment, same, has_store=has_store)


def get_local_rank(num_devices: int) -> int:
    """Return this rank's index on its node, which selects one of `num_devices`.

    Raises:
        MeshError: LOCAL_RANK is not a count, or not set although there are several ranks and several devices.
    """
    if "LOCAL_RANK" not in os.environ and num_devices > 1 and read_count(os.environ, "WORLD_SIZE", 1) > 1:
        raise MeshError(
            f"LOCAL_RANK is not set, so it is unknown which of the {num_devices} devices on this node the rank uses. "
            "Set it to the index of the rank on its node, from 0, or give the device with an index."
        )
    return read_count(os.environ, "LOCAL_RANK", 0)


def _variables_for_group(environment: Mapping[str, str], rank: int, size: int) -> dict[str, str]:
    """Return the missing variables from launchers that agree with the process group."""
    claims = [
        each
        for each in _detect_environments(environment, may_fail=True)
        if (each.rank, each.world_size) == (rank, size)
    ]
    return _build_missing_variables(environment, claims, has_store=True) if claims else {}


def _detect_environments(environment: Mapping[str, str], *, may_fail: bool) -> list[ClusterEnvironment]:
    """Return the environments that all launchers detect. An incomplete one is an error only if there is no other."""
    detected, errors = [], []
    for launcher in list_launchers():
        try:
            claim = launcher.detect(environment)
        except MeshError as error:
            errors.append(error)
        else:
            detected += [claim] if claim is not None else []
    if errors and not detected and not may_fail:
        raise errors[0]
    return detected


def _detect_manual(environment: Mapping[str, str]) -> ClusterEnvironment:
    """Return the environment that RANK and WORLD_SIZE describe, if they were not set by torchrun's agent."""
    rank, size = read_count(environment, "RANK"), read_count(environment, "WORLD_SIZE")
    if rank >= size:
        raise MeshError(f"RANK={rank}, but WORLD_SIZE={size}: ranks are 0 to {size - 1}.")
    reject_node_rank(environment)
    each = read_count(environment, "LOCAL_WORLD_SIZE", 1)

    def address() -> str:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        raise MeshError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but not {' and '.join(missing)}, so the ranks cannot find "
            f"each other. Set MASTER_ADDR to an address of the node of rank 0 and MASTER_PORT to a free port there, or "
            f"start the ranks with torchrun, which sets all of them."
        )

    return ClusterEnvironment(
        _MANUAL,
        format_variables(environment, "RANK", "WORLD_SIZE"),
        ("RANK", "WORLD_SIZE"),
        rank=rank,
        world_size=size,
        local_rank=None,
        local_world_size=None,
        get_master_address=address,
        get_master_port=lambda: int(address()),
        is_nested_in=lambda outer: each > 1 and size == each * outer.world_size,
    )


def _build_missing_variables(
    environment: Mapping[str, str], claims: list[ClusterEnvironment], *, has_store: bool
) -> dict[str, str]:
    """Return torchrun's variables that are not set, from environments with the same rank; see `join_launcher`."""
    values = {"RANK": claims[0].rank, "WORLD_SIZE": claims[0].world_size}
    for claim in claims:
        local = {"LOCAL_RANK": claim.local_rank, "LOCAL_WORLD_SIZE": claim.local_world_size}
        values = {**{name: value for name, value in local.items() if value is not None}, **values}
    variables = {name: str(value) for name, value in values.items() if name not in environment}
    if not has_store:
        # RANK and WORLD_SIZE give no address. The innermost launcher may, and it is the same on all ranks.
        source = next((each for each in claims if each.launcher != _MANUAL), claims[0])
        if "MASTER_ADDR" not in environment:
            variables["MASTER_ADDR"] = source.get_master_address()
        if "MASTER_PORT" not in environment:
            variables["MASTER_PORT"] = str(source.get_master_port())
    return variables


def _conflict_error(
    evidence: str, launcher_name: str, identifying_variables: tuple[str, ...], other: ClusterEnvironment
) -> MeshError:
    """Return the error about two launchers that contradict each other.

    `evidence` and `identifying_variables` are those of the launcher `launcher_name`, as in `ClusterEnvironment`.
    """
    pairs = ((identifying_variables, other.launcher), (other.identifying_variables, launcher_name))
    remedies = [f"{' and '.join(names)} if the ranks are those of {launcher}" for names, launcher in pairs if names]
    return MeshError(
        f"two sources give different ranks or world sizes: {evidence} ({launcher_name}), and {other.evidence} "
        f"({other.launcher}). A process is one rank of one world. Unset {', or '.join(remedies)}. If each of the "
        f"{other.world_size} processes should start several ranks, let it start torchrun."
    )
