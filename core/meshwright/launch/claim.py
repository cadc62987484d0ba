"""What a launcher says of a process that it has started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..base.errors import MeshError

DEFAULT_PORT = 29_500
"""torchrun's; for launchers that name nothing that is one for all ranks of a world, and another for the next."""

_FIRST_PORT, _PORTS = 10_000, 20_000
"""Below the ports that systems give out by themselves."""


@dataclass(frozen=True)
class Claim:
    """One launcher's word on this process.

    Attributes:
        launcher: its name.
        said: by what it says so, such as "PMI_RANK=1 and PMI_SIZE=4".
        unset: the variables without which it would say nothing; empty where it is no variables that say it.
        local_rank, local_size: of the ranks on this node; None where it does not say.
        address, port: of the rendezvous store that rank 0 hosts. They raise MeshError where the launcher does not know.
        is_within: whether the ranks are started inside of the other launcher's processes, which contradicts nothing.
    """

    launcher: str
    said: str
    unset: tuple[str, ...]
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: Callable[[], str]
    port: Callable[[], int]
    is_within: Callable[[Claim], bool] = lambda outer: False

    def is_same(self, other: Claim) -> bool:
        return (self.rank, self.size) == (other.rank, other.size)


@dataclass(frozen=True)
class Launcher:
    """One way to start ranks.

    Attributes:
        name: as errors and docs/launchers.md have it.
        reads: the variables that `ask` looks at.
        ask: what it says of a process with this environment; None where it has started none, or a single one. Raises
            MeshError where it has started several, but does not say enough.
    """

    name: str
    reads: tuple[str, ...]
    ask: Callable[[Mapping[str, str]], Claim | None]


def said(environment: Mapping[str, str], *names: str) -> str:
    """ "A=1 and B=2", of those that are set."""
    return " and ".join(f"{name}={environment[name]}" for name in names if name in environment)


def number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable that counts something, from 0; `default` where it is not set."""
    if default is not None and name not in environment:
        return default
    value = environment[name].strip()
    if not (value.isascii() and value.isdecimal()):
        raise MeshError(f"{name}={environment[name]!r} is no count: it must be an integer that is not negative.")
    return int(value)


def require(environment: Mapping[str, str], names: tuple[str, ...], what: str, remedy: str) -> None:
    """Refuse a world of several processes of which the launcher does not say everything."""
    missing = [name for name in names if name not in environment]
    if missing:
        is_or_are = "is" if len(missing) == 1 else "are"
        raise MeshError(
            f"this is {what}, but {', '.join(missing)} {is_or_are} not set, so the processes cannot find each other. "
            f"{remedy}"
        )


def spread(number: int) -> int:
    """A port that other worlds on the same node are unlikely to use, from what is one for all ranks of this one."""
    return _FIRST_PORT + number % _PORTS
