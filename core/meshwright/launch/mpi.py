"""Ranks that the mpirun of Open MPI or of MPICH and its derivatives started, and PMIx processes of unknown number.

[Note: where mpirun runs] mpirun passes its processes the node where it runs, but not the node of rank 0. These are the
same unless the hosts were chosen differently. So ranks connect to the store on that node. If rank 0 is on another node,
it raises an error that says what to set, and mpirun ends its peers.

Observed with mpirun of Open MPI 4.1.4 and 5.0.11, and mpiexec of MPICH 5.0.2 and Intel MPI 2021.18.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping

from ..base.errors import MeshError
from .cluster_environment import (
    DEFAULT_PORT,
    ClusterEnvironment,
    Launcher,
    derive_port,
    format_variables,
    read_count,
    require_variables,
)

_OPEN_MPI_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MPICH_VARIABLES = ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_WORLD_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""If one of these is set, the processes of that launcher only communicate by PMIx."""

_REMEDY = (
    "Start the ranks with torchrun, srun or `meshwright train`, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
    "MASTER_PORT."
)


def _detect_open_mpi(environment: Mapping[str, str]) -> ClusterEnvironment | None:
    return _build_environment(
        OPEN_MPI.name, environment, _OPEN_MPI_VARIABLES, "PMIX_NAMESPACE", lambda: _find_mpirun_node(environment)
    )


def _detect_mpich(environment: Mapping[str, str]) -> ClusterEnvironment | None:
    def address() -> str:
        raise _unknown_address_error("mpiexec does not say where rank 0 is", "mpiexec -genv MASTER_ADDR HOST")

    return _build_environment(MPICH.name, environment, _MPICH_VARIABLES, "I_MPI_HYDRA_UUID", address)


def _reject_pmix(environment: Mapping[str, str]) -> None:
    """Raise MeshError for one of several processes whose launcher passes rank and size only to the PMIx library."""
    size = environment.get("PMIX_SIZE", "")
    if (
        size == "1"
        or any(name in environment for name in _WORLD_SIZE_VARIABLES)
        or not (size or "PMIX_RANK" in environment)
    ):
        return
    raise MeshError(
        f"this is one of {size or 'several'} processes ({format_variables(environment, 'PMIX_SIZE', 'PMIX_RANK')}), "
        f"but RANK and WORLD_SIZE are not set, so each would train on its own. {_REMEDY}"
    )


OPEN_MPI = Launcher(
    "Open MPI", (*_OPEN_MPI_VARIABLES, "OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE", "PMIX_SERVER_URI2"), _detect_open_mpi
)
MPICH = Launcher("MPICH or Intel MPI", (*_MPICH_VARIABLES, "I_MPI_HYDRA_UUID"), _detect_mpich)
PMIX = Launcher("PMIx", ("PMIX_SIZE", "PMIX_RANK", *_WORLD_SIZE_VARIABLES), _reject_pmix)


def _build_environment(
    launcher: str, environment: Mapping[str, str], names: tuple[str, ...], job_variable: str, address: Callable[[], str]
) -> ClusterEnvironment | None:
    """Return the environment that the variables `names` describe: size, rank, local rank and local size.

    `job_variable`: the variable with the job's id.
    """
    if environment.get(names[0], "") in ("", "1"):
        return None
    require_variables(environment, names, f"one of {environment[names[0]]} processes ({names[0]})", _REMEDY)
    size, rank, local_rank, local_size = (read_count(environment, name) for name in names)
    world = environment.get(job_variable, "")
    return ClusterEnvironment(
        launcher,
        format_variables(environment, names[1], names[0]),
        (names[0],),
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        get_master_address=address if local_size < size else lambda: "127.0.0.1",
        get_master_port=lambda: derive_port(zlib.crc32(world.encode())) if world else DEFAULT_PORT,
        # In a Slurm allocation, mpirun starts its daemons by srun, one on each other node.
        is_nested_in=lambda outer: outer.local_world_size == 1 and outer.world_size <= size,
    )


def _find_mpirun_node(environment: Mapping[str, str]) -> str:
    """Return the node where mpirun runs; see [Note: where mpirun runs]."""
    # Open MPI 4: "1237647360.0;tcp://10.0.0.1,10.1.0.1:34999;tcp6://..."; 5: "prterun-node1-9562@1".
    contact = re.search(r"tcp://([^,:;]+)", environment.get("OMPI_MCA_orte_hnp_uri", ""))
    namespace = re.fullmatch(r"prterun-(.+)-\d+@\d+", environment.get("PMIX_NAMESPACE", ""))
    match = contact or namespace
    remedy = "mpirun -x MASTER_ADDR=HOST"
    if match is None:
        raise _unknown_address_error("mpirun does not say where it runs", remedy)
    # "1237647360.1;tcp4://..." and "prterun-node1-9562@0.1;tcp4://...": index of this node's daemon, 0 next to mpirun.
    daemon = re.match(r"[^;]*\.(\d+);", environment.get("PMIX_SERVER_URI2", ""))
    if read_count(environment, "OMPI_COMM_WORLD_RANK") == 0 and daemon is not None and daemon[1] != "0":
        raise _unknown_address_error(
            f"rank 0 is not on {match[1]}, where mpirun runs and the other ranks would connect", remedy
        )
    return match[1]


def _unknown_address_error(why: str, remedy: str) -> MeshError:
    return MeshError(
        f"the ranks are on several nodes, and {why}. Give all of them a name or an address of the node of rank 0 as "
        f"HOST: {remedy}"
    )
