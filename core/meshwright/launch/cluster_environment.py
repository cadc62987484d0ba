"""What a launcher's variables say of a process that it has started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..base.errors import MeshError

DEFAULT_PORT = 29_500
"""torchrun's; for launchers that name nothing that all ranks of a world share and other worlds do not have."""

_MIN_PORT, _NUM_PORTS = 10_000, 20_000
"""Below the ephemeral ports of operating systems."""


@dataclass(frozen=True)
class ClusterEnvironment:
    """One launcher's statement about this process.

    Attributes:
        launcher: its name.
        evidence: the variables that state it, such as "PMI_RANK=1 and PMI_SIZE=4".
        identifying_variables: the variables without which it would state nothing; empty if it uses no variables.
        local_rank, local_world_size: among the ranks of this node; None: not stated.
        address, port: of the rendezvous store that rank 0 hosts. They raise MeshError if the launcher does not know.
        is_nested_in: whether the ranks are started inside the processes of another launcher, which is no contradiction.
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
        name: in errors and docs/reference/launchers.md.
        variables: the variables that `ask` looks at.
        detect: returns what it states of a process with this environment; None if it has started none, or a single one.
            Raises MeshError if it has started several, but does not state enough.
    """

    name: str
    variables: tuple[str, ...]
    detect: Callable[[Mapping[str, str]], ClusterEnvironment | None]


def format_variables(environment: Mapping[str, str], *names: str) -> str:
    """Return "A=1 and B=2" of the variables that are set."""
    return " and ".join(f"{name}={environment[name]}" for name in names if name in environment)


def read_count(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable that is a count, or `default` if it is not set; raise MeshError if it is no count."""
    if default is not None and name not in environment:
        return default
    value = environment[name].strip()
    if not (value.isascii() and value.isdecimal()):
        raise MeshError(f"{name}={environment[name]!r} is no count: it must be an integer that is not negative.")
    return int(value)


def require_variables(environment: Mapping[str, str], names: tuple[str, ...], subject: str, remedy: str) -> None:
    """Raise MeshError if the launcher of several processes has not set all of these variables."""
    missing = [name for name in names if name not in environment]
    if missing:
        is_or_are = "is" if len(missing) == 1 else "are"
        raise MeshError(
            f"this is {subject}, but {', '.join(missing)} {is_or_are} not set, so the processes cannot find each "
            "other. "
            f"{remedy}"
        )


def derive_port(seed: int) -> int:
    """Return a port that other worlds on the node are unlikely to use, from a number that is the same on all ranks."""
    return _MIN_PORT + seed % _NUM_PORTS
