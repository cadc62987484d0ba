"""Join the processes that a launcher has started: set torchrun's variables from those of other launchers.

[Note: who counts] From the inside out: a process group that exists; torchrun's RANK and WORLD_SIZE; then `launchers()`
in their order. The first that states a rank for this process counts. The others must state the same rank and size, or
must have started what in turn started the ranks:

- torchrun's own agent (TORCHELASTIC_RUN_ID is set) may run in the tasks, processes or pods of any other launcher;
- so may Ray;
- RANK, WORLD_SIZE and LOCAL_WORLD_SIZE set by other means may be of ranks that each of the other's processes starts:
  WORLD_SIZE is LOCAL_WORLD_SIZE times their number;
- Slurm may have reported mpirun where to run: a Slurm step of a single task on each node is its daemons.

Everything else is two worlds in one process, and refused before any rank waits for another. A rank sees only its own
variables, so an error may be raised on some ranks alone.
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
"""The built-in ones, from the inside out; see [Note: who counts]."""

_MANUAL = "the environment"
"""Name of whoever has set RANK and WORLD_SIZE, if it is not torchrun."""


def list_launchers() -> list[Launcher]:
    """Return those of plugins, by the hook `register_launchers`, then the built-in ones."""
    return [*(each for found in get_registry().hook.register_launchers() for each in found), *BUILT_IN_LAUNCHERS]


def join_launcher(*, has_store: bool = False) -> None:
    """In one of several processes that a launcher has started, set torchrun's variables that are not set.

    With Ray Train and no torch backend it is collective over the workers.

    Args:
        has_store: the caller brings a rendezvous store, so the address of rank 0 is not needed.

    Raises:
        MeshError: several processes were started, but cannot find each other, or two launchers contradict each other.
            Without this error each would train by itself, or wait for ranks that do not exist.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        os.environ.update(_variables_for_group(os.environ, dist.get_rank(), dist.get_world_size()))
    else:
        os.environ.update(resolve_torchrun_variables(os.environ, has_store=has_store))


def resolve_torchrun_variables(environment: Mapping[str, str], *, has_store: bool = False) -> dict[str, str]:
    """Return what `join` sets; nothing in a process that is the only one. See [Note: who counts]."""
    has_rank, has_size = "RANK" in environment, "WORLD_SIZE" in environment
    if has_rank and has_size and "TORCHELASTIC_RUN_ID" in environment:
        return {}
    own = [_detect_manual(environment)] if has_rank and has_size else []
    claims = [*own, *_detect_environments(environment, may_fail=bool(own))]
    if not claims:
        if has_rank or environment.get("WORLD_SIZE", "1") != "1":
            one, other = ("RANK", "WORLD_SIZE") if has_rank else ("WORLD_SIZE", "RANK")
            raise MeshError(
                f"{one}={environment[one]} is set, but {other} is not. Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR "
                f"and MASTER_PORT, or unset {one}, or start the ranks with torchrun, which sets all of them."
            )
        return {}
    inner = claims[0]
    same = [each for each in claims if (each.rank, each.world_size) == (inner.rank, inner.world_size)]
    for outer in claims[1:]:
        if outer not in same and not inner.is_nested_in(outer):
            raise _conflict_error(inner.evidence, inner.launcher, inner.identifying_variables, outer)
    for name, value in (("RANK", inner.rank), ("WORLD_SIZE", inner.world_size)):
        if name in environment and read_count(environment, name) != value:
            raise _conflict_error(f"{name}={environment[name]}", _MANUAL, (name,), inner)
    return _build_missing_variables(environment, same, has_store=has_store)


def get_local_rank(num_devices: int) -> int:
    """Return the number of this rank on its node, by which one of `num_devices` is chosen.

    Raises:
        MeshError: it is one of several, there are several devices, and LOCAL_RANK is not set; or it is no count.
    """
    if "LOCAL_RANK" not in os.environ and num_devices > 1 and read_count(os.environ, "WORLD_SIZE", 1) > 1:
        raise MeshError(
            f"LOCAL_RANK is not set, so this rank cannot tell which of the {num_devices} devices here is its own. Set "
            "it "
            f"to the number of the rank on its node, from 0, or give the device with its index."
        )
    return read_count(os.environ, "LOCAL_RANK", 0)


def _variables_for_group(environment: Mapping[str, str], rank: int, size: int) -> dict[str, str]:
    """The variables of launchers that agree with the process group; others have not made it."""
    claims = [
        each
        for each in _detect_environments(environment, may_fail=True)
        if (each.rank, each.world_size) == (rank, size)
    ]
    return _build_missing_variables(environment, claims, has_store=True) if claims else {}


def _detect_environments(environment: Mapping[str, str], *, may_fail: bool) -> list[ClusterEnvironment]:
    """The claims of all launchers. An incomplete one is an error only if there is no other."""
    found, errors = [], []
    for launcher in list_launchers():
        try:
            claim = launcher.detect(environment)
        except MeshError as error:
            errors.append(error)
        else:
            found += [claim] if claim is not None else []
    if errors and not found and not may_fail:
        raise errors[0]
    return found


def _detect_manual(environment: Mapping[str, str]) -> ClusterEnvironment:
    """The claim of RANK and WORLD_SIZE, which something other than torchrun's agent has set."""
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
    """torchrun's variables that are not set, from claims to the same rank; see `join`."""
    found = {"RANK": claims[0].rank, "WORLD_SIZE": claims[0].world_size}
    for claim in claims:
        local = {"LOCAL_RANK": claim.local_rank, "LOCAL_WORLD_SIZE": claim.local_world_size}
        found = {**{name: value for name, value in local.items() if value is not None}, **found}
    texts = {name: str(value) for name, value in found.items() if name not in environment}
    if not has_store:
        # RANK and WORLD_SIZE name no address; the nearest launcher may, and is the same on all ranks.
        knows = next((each for each in claims if each.launcher != _MANUAL), claims[0])
        if "MASTER_ADDR" not in environment:
            texts["MASTER_ADDR"] = knows.get_master_address()
        if "MASTER_PORT" not in environment:
            texts["MASTER_PORT"] = str(knows.get_master_port())
    return texts


def _conflict_error(
    evidence: str, launcher_name: str, identifying_variables: tuple[str, ...], other: ClusterEnvironment
) -> MeshError:
    """The error of two contradicting statements: `launcher_name` states `evidence`, and would not without the variables
    `identifying_variables`."""
    pairs = ((identifying_variables, other.launcher), (other.identifying_variables, launcher_name))
    remedies = [f"{' and '.join(names)} if the ranks are those of {launcher}" for names, launcher in pairs if names]
    return MeshError(
        f"two say what rank this is: {evidence} ({launcher_name}), and {other.evidence} ({other.launcher}). A process "
        "is one rank of one "
        f"world. Unset {', or '.join(remedies)}. If each of the {other.world_size} is to start several ranks, let it "
        "start "
        f"torchrun."
    )
