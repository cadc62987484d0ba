"""Description of a process that a launcher has started, read from the launcher's environment variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..base.errors import MeshError

DEFAULT_PORT = 29_500
"""torchrun's default port, for launchers that set no variable from which to derive a port that is unique to a world."""

_MIN_PORT, _NUM_PORTS = 10_000, 20_000
"""A range below the ephemeral ports of operating systems."""


@dataclass(frozen=True)
class ClusterEnvironment:
    """Rank and world of this process according to one launcher.

    Attributes:
        launcher: name of the launcher.
        evidence: the variables that show it, such as "PMI_RANK=1 and PMI_SIZE=4".
        identifying_variables: the variables without which the launcher would not be detected; may be empty.
        local_rank, local_world_size: rank and number of ranks on this node; None: unknown.
        get_master_address, get_master_port: return the address and port of the rendezvous store that rank 0 hosts. They
            raise MeshError if the launcher does not know them.
        is_nested_in: whether the ranks may run inside the processes of another launcher. If so, different ranks are not
            a contradiction.
    """

    launcher: str
    evidence: str
    identifying_variables: tuple[str, ...]
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    get_master_address: Callable[[], str]
    get_master_port: Callable[[], int]
    is_nested_in: Callable[[ClusterEnvironment], bool] = lambda outer: False


@dataclass(frozen=True)
class Launcher:
    """One way to start ranks.

    Attributes:
        name: name in errors and in docs/reference/launchers.md.
        variables: the variables that `detect` reads.
        detect: returns the cluster environment of a process with these variables; None if the launcher has started no
            process, or a single one. Raises MeshError if it has started several, but variables are missing.
    """

    name: str
    variables: tuple[str, ...]
    detect: Callable[[Mapping[str, str]], ClusterEnvironment | None]


def format_variables(environment: Mapping[str, str], *names: str) -> str:
    """Return the variables that are set, as "A=1 and B=2"."""
    return " and ".join(f"{name}={environment[name]}" for name in names if name in environment)


def read_count(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as a non-negative integer, or `default` if it is not set; MeshError for another value."""
    if default is not None and name not in environment:
        return default
    value = environment[name].strip()
    if not (value.isascii() and value.isdecimal()):
        raise MeshError(f"{name}={environment[name]!r} is not a count: it must be a non-negative integer.")
    return int(value)


def require_variables(environment: Mapping[str, str], names: tuple[str, ...], subject: str, remedy: str) -> None:
    """Raise MeshError unless the launcher of several processes has set all of these variables."""
    missing = [name for name in names if name not in environment]
    if missing:
        is_or_are = "is" if len(missing) == 1 else "are"
        raise MeshError(
            f"this is {subject}, but {', '.join(missing)} {is_or_are} not set, so the processes cannot find each "
            f"other. {remedy}"
        )


def derive_port(seed: int) -> int:
    """Derive a port that other worlds on the node are unlikely to use from a number that is equal on all ranks."""
    return _MIN_PORT + seed % _NUM_PORTS
