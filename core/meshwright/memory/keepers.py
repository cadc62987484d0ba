"""The keepers of all nodes, as a rank reaches them: its own node's by a socket file, others by TCP."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ..base.errors import ConfigError, RankError
from ..launch.process_identity import identity_of, launcher_pid
from ..launch.safe_path import PYTHON
from ..mesh.world import World
from . import wire
from .socket_file import socket_path
from .wire import Link

_START_S = 30.0
_LOOK_S = 0.02
_ANYWHERE = "0.0.0.0"


class Node(NamedTuple):
    """A node that has ranks.

    Attributes:
        keeper: the id of its keeper.
        ranks: of the world.
        address: host and port of its keeper, for other nodes; None: the only node.
    """

    keeper: str
    ranks: tuple[int, ...]
    address: tuple[str, int] | None = None


@dataclass(frozen=True)
class Keepers:
    """Those of a world.

    Attributes:
        nodes: in the order of their first ranks.
        here: this rank's, among them.
    """

    nodes: tuple[Node, ...]
    here: int
    token: str

    @property
    def next_node(self) -> int | None:
        """The node that has the other copies of what is here; None: there is no other."""
        return (self.here + 1) % len(self.nodes) if len(self.nodes) > 1 else None

    @property
    def leads(self) -> bool:
        """Whether this rank is the first one of its node."""
        return dist.get_rank() == self.nodes[self.here].ranks[0]

    def node_of(self, rank: int) -> int:
        """Where a rank is; -1: there is no such rank."""
        return next((number for number, node in enumerate(self.nodes) if rank in node.ranks), -1)

    def link(self, node: int) -> Link:
        """A connection to a keeper. OSError: there is none."""
        if node == self.here:
            return _own_link()
        address = self.nodes[node].address
        if address is None:
            raise OSError("the keeper has no address")
        connection = socket.create_connection(address, timeout=wire.PATIENCE_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.introduce(connection, self.token)
        except OSError:
            connection.close()
            raise
        return Link(connection)

    def listed(self, world: World) -> list[Mapping[str, Any]]:
        """What each keeper has; nothing where it does not answer. Collective."""
        mine: dict[str, Any] = {"run": "", "steps": {}}
        if self.leads:
            try:
                mine = _asked_own("list")
            except OSError:
                # It has been killed: what it had is gone.
                mine = {"run": "", "steps": {}}
        found = _gathered(mine, world)
        return [found[node.ranks[0]] for node in self.nodes]

    def keep(self, run: str, step: int, world: World) -> None:
        """Have all be for a run that goes on after a step, so that they let go of all else. Collective.

        Raises:
            RankError: one does not answer; on all ranks.
        """

        def work() -> None:
            try:
                if self.leads:
                    _asked_own("keep", run=run, step=step)
            except OSError as error:
                raise RankError(f"the process that holds copies of state does not answer: {error}.") from error

        world.together(work)


def open_keepers(world: World) -> Keepers:
    """Find the keeper of each node, or start one. Collective.

    Raises:
        ConfigError: this system cannot have one; on all ranks.
        RankError: one cannot be started; on all ranks.
    """
    keeper = world.together(_found_or_started)
    told = _gathered(keeper, world)
    nodes = [
        Node(each, tuple(rank for rank, other in enumerate(told) if other == each)) for each in dict.fromkeys(told)
    ]
    here = next(number for number, node in enumerate(nodes) if node.keeper == keeper)
    token = world.from_first(lambda: secrets.token_hex(32))
    if len(nodes) > 1:
        host = _address_towards(os.environ.get("MASTER_ADDR", ""))
        is_one_machine = all(map(_is_loopback, _gathered(host, world)))
        is_first = world.rank == nodes[here].ranks[0]
        address = world.together(lambda: _address(host, token, is_one_machine=is_one_machine) if is_first else None)
        addresses = _gathered(address, world)
        nodes = [node._replace(address=addresses[node.ranks[0]]) for node in nodes]
    return Keepers(tuple(nodes), here, token)


def _gathered(value: Any, world: World) -> list[Any]:
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value, group=world.group)
    return found


def _found_or_started() -> str:
    """The id of this node's keeper, which the first of its ranks starts where there is none."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED") or not identity_of(os.getpid()):
        raise ConfigError("checkpoint.replicate needs Linux, with /proc. Leave it out.")
    try:
        _socket()
    except OSError as error:
        raise ConfigError(f"checkpoint.replicate has no place for its socket: {error}.") from error
    starts, until = os.environ.get("LOCAL_RANK", "0") == "0", time.monotonic() + _START_S
    while True:
        try:
            return str(_asked_own("list")["id"])
        except OSError as error:
            if time.monotonic() > until:
                raise RankError(
                    f"the process that holds copies of state (checkpoint.replicate) did not answer within "
                    f"{_START_S:g} s: {error}."
                ) from error
        if starts:
            starts = False
            _start()
        time.sleep(_LOOK_S)


def _start() -> None:
    pid = launcher_pid()
    command = [*PYTHON, "-m", f"{__package__}.keeper", str(_socket()), str(pid), identity_of(pid)]
    # See [Note: nothing is left] in `keeper`. It holds nothing open that others wait to see closed.
    nothing = subprocess.DEVNULL
    started = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    # Nobody waits for it, and Python need not warn of that.
    started.returncode = 0


def _socket() -> Path:
    """The keeper's: one for each process that starts ranks."""
    return socket_path(hashlib.sha256(identity_of(launcher_pid()).encode()).hexdigest()[:32])


def _own_link() -> Link:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(_socket()))
        wire.check_user(connection)
    except OSError:
        connection.close()
        raise
    return Link(connection)


def _asked_own(what: str, **values: Any) -> dict[str, Any]:
    link = _own_link()
    try:
        return link.ask(what, **values)
    finally:
        link.close()


def _address(host: str, token: str, *, is_one_machine: bool) -> tuple[str, int]:
    """Where other nodes reach this node's keeper: in the network in which the ranks meet.

    Args:
        host: this node's address there.
    """
    # A node may know itself by its loopback alone. Others call it by the name that they all meet at.
    is_hidden = _is_loopback(host) and not is_one_machine
    try:
        port = _asked_own("serve", host=_ANYWHERE if is_hidden else host, token=token)["port"]
    except OSError as error:
        raise RankError(
            f"the process that holds copies of state cannot be reached from other nodes: {error}."
        ) from error
    return (os.environ["MASTER_ADDR"] if is_hidden else host), int(port)


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "")


def _address_towards(host: str) -> str:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            # Nothing is sent.
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
