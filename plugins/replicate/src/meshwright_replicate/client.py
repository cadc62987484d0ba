"""The keepers of all nodes as a rank reaches them, and the steps that they hold as places that are read from."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch.distributed as dist

from meshwright.plugin import (
    MANIFEST_FILE,
    SAFE_PYTHON,
    ConfigError,
    RankError,
    SeekableReader,
    StorageOptions,
    World,
    get_launcher_pid,
    get_process_identity,
    tensors_file_name,
)

from . import protocol
from .protocol import Connection, get_socket_path

_START_TIMEOUT_S = 30.0
_POLL_S = 0.02
_ALL_INTERFACES = "0.0.0.0"


class ReplicaNode(NamedTuple):
    """A node that has ranks: the id of its keeper, its ranks, and host and port of the keeper for other nodes."""

    server_id: str
    ranks: tuple[int, ...]
    address: tuple[str, int] | None = None


@dataclass(frozen=True)
class ReplicaClient:
    """The keepers of a world."""

    nodes: tuple[ReplicaNode, ...]  # in the order of their first ranks
    local_node: int  # number of this rank's node
    token: str

    @property
    def next_node(self) -> int | None:
        """The node that has the second copy of this node's state; None if there is only one node."""
        return (self.local_node + 1) % len(self.nodes) if len(self.nodes) > 1 else None

    @property
    def is_node_leader(self) -> bool:
        return dist.get_rank() == self.nodes[self.local_node].ranks[0]

    def connect(self, node: int) -> Connection:
        """Connect to a keeper. Raises OSError."""
        if node == self.local_node:
            return _connect_local()
        address = self.nodes[node].address
        if address is None:
            raise OSError("the keeper has no address")
        connection = socket.create_connection(address, timeout=protocol.IO_TIMEOUT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            protocol.authenticate_to_server(connection, self.token)
        except OSError:
            connection.close()
            raise
        return Connection(connection)

    def list_steps(self, world: World) -> list[Mapping[str, Any]]:
        """Return what each keeper has; nothing for one that does not answer. Collective."""
        mine: dict[str, Any] = {"run": "", "steps": {}}
        if self.is_node_leader:
            try:
                mine = _request_local("list")
            except OSError:
                mine = {"run": "", "steps": {}}  # it was killed, and its copies are gone
        found = _all_gather(mine, world)
        return [found[node.ranks[0]] for node in self.nodes]

    def discard_stale(self, run_id: str, step: int, world: World) -> None:
        """Have all keepers drop what a run that resumes from a step does not need. Collective. Raises RankError."""

        def work() -> None:
            try:
                if self.is_node_leader:
                    _request_local("discard_stale", run=run_id, step=step)
            except OSError as error:
                raise RankError(f"the process that holds copies of state does not answer: {error}.") from error

        world.run_on_all_ranks(work)


def open_replica_client(world: World) -> ReplicaClient:
    """Find the keeper of each node, or start one. Collective. Raises ConfigError or RankError."""
    keeper = world.run_on_all_ranks(_find_or_start_server)
    found = _all_gather(keeper, world)
    ranks = {each: tuple(rank for rank, other in enumerate(found) if other == each) for each in found}
    nodes = [ReplicaNode(*item) for item in ranks.items()]
    here = next(number for number, node in enumerate(nodes) if node.server_id == keeper)
    token = world.run_on_first_rank(lambda: secrets.token_hex(32))
    if len(nodes) > 1:
        host = _find_local_address(os.environ.get("MASTER_ADDR", ""))
        is_one_machine = all(map(_is_loopback, _all_gather(host, world)))
        is_first = world.rank == nodes[here].ranks[0]
        address = world.run_on_all_ranks(
            lambda: _expose_local_server(host, token, is_single_node=is_one_machine) if is_first else None
        )
        addresses = _all_gather(address, world)
        nodes = [node._replace(address=addresses[node.ranks[0]]) for node in nodes]
    return ReplicaClient(tuple(nodes), here, token)


def _all_gather(value: Any, world: World) -> list[Any]:
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value, group=world.group)
    return found


def _find_or_start_server() -> str:
    """Return the id of this node's keeper, which the node's first rank starts if there is none."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED") or not get_process_identity(os.getpid()):
        raise ConfigError("checkpoint.replicate needs Linux, with /proc. Leave it out.")
    try:
        _get_server_socket_path()
    except OSError as error:
        raise ConfigError(f"checkpoint.replicate has no place for its socket: {error}.") from error
    starts, until = os.environ.get("LOCAL_RANK", "0") == "0", time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            return str(_request_local("list")["id"])
        except OSError as error:
            if time.monotonic() > until:
                raise RankError(
                    f"the process that holds copies of state (checkpoint.replicate) did not answer within "
                    f"{_START_TIMEOUT_S:g} s: {error}."
                ) from error
        if starts:
            starts = False
            _start_server()
        time.sleep(_POLL_S)


def _start_server() -> None:
    pid = get_launcher_pid()
    command = [
        *SAFE_PYTHON,
        "-m",
        f"{__package__}.server",
        str(_get_server_socket_path()),
        str(pid),
        get_process_identity(pid),
    ]
    # See [Note: nothing is left] in `server`. It must not hold open what others wait to see closed.
    nothing = subprocess.DEVNULL
    started = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    started.returncode = 0  # nobody waits for it; without a return code Python would warn


def _get_server_socket_path() -> Path:
    """Return the path of the socket of the keeper: one for each process that starts ranks."""
    return get_socket_path(hashlib.sha256(get_process_identity(get_launcher_pid()).encode()).hexdigest()[:32])


def _connect_local() -> Connection:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(_get_server_socket_path()))
        protocol.check_user(connection)
    except OSError:
        connection.close()
        raise
    return Connection(connection)


def _request_local(command: str, **values: Any) -> dict[str, Any]:
    link = _connect_local()
    try:
        return link.request(command, **values)
    finally:
        link.close()


def _expose_local_server(host: str, token: str, *, is_single_node: bool) -> tuple[str, int]:
    """Return where other nodes reach this node's keeper, whose address in the ranks' network is `host`."""
    # A node may know only its loopback; others call it by the name at which they all meet.
    is_hidden = _is_loopback(host) and not is_single_node
    try:
        port = _request_local("listen", host=_ALL_INTERFACES if is_hidden else host, token=token)["port"]
    except OSError as error:
        raise RankError(
            f"the process that holds copies of state cannot be reached from other nodes: {error}."
        ) from error
    return (os.environ["MASTER_ADDR"] if is_hidden else host), int(port)


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host in ("::1", "")


def _find_local_address(host: str) -> str:
    """Return this node's address in the network of another host; "" if there is none."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return ""


@dataclass(frozen=True)
class ReplicaReader:
    """A step in the memory of nodes. All ranks read a file from the same keeper, so what one has verified all get."""

    client: ReplicaClient
    step: int  # after which it was copied
    manifest: bytes  # its text
    file_nodes: Mapping[str, int]  # maps each file to the number of the node whose keeper it is read from
    file_sizes: Mapping[str, int]  # size of each file
    options: StorageOptions
    name = "memory"

    def __str__(self) -> str:
        return self.name

    def list_file_sizes(self) -> dict[str, int] | None:
        return {MANIFEST_FILE: len(self.manifest), **self.file_sizes}

    def open(self, name: str) -> BinaryIO:
        if name == MANIFEST_FILE:
            return io.BytesIO(self.manifest)
        if name not in self.file_nodes:
            raise OSError(f"no {name} of step {self.step}")
        node = self.file_nodes[name]
        link = self.client.connect(node)
        if node != self.client.local_node:
            return io.BufferedReader(_RemoteReplicaFile(link, self.step, name, self.file_sizes[name]), 1 << 20)
        try:
            file = link.request_file("read", step=self.step, name=name)
        finally:
            link.close()
        try:
            # Opened again: descriptors of one file share their position with those of other readers.
            return open(f"/proc/self/fd/{file}", "rb")
        finally:
            os.close(file)

    def format_hint(self) -> str:
        return ""


class _RemoteReplicaFile(SeekableReader):
    """A file of a step in the memory of another node."""

    def __init__(self, connection: Connection, step: int, name: str, size: int) -> None:
        super().__init__(name)
        self._connection, self._step, self._nbytes = connection, step, size

    def _size(self) -> int:
        return self._nbytes

    def _read_at(self, position: int, buffer: memoryview) -> int:
        count = max(0, min(buffer.nbytes, self._nbytes - position))
        if count:
            self._connection.request_into(
                buffer[:count], "read", step=self._step, name=self.name, begin=position, size=count
            )
        return count

    def close(self) -> None:
        if not self.closed:
            self._connection.close()
        super().close()


def find_replicas(
    client: ReplicaClient, steps_by_node: Sequence[Mapping[str, Any]], run_id: str, options: StorageOptions
) -> list[ReplicaReader]:
    """Return the complete steps of a run in memory, newest first; twice if other keepers have files, too."""
    own = [each["steps"] if each["run"] == run_id else {} for each in steps_by_node]
    steps = sorted({int(step) for each in own for step in each}, reverse=True)
    kept = {step: [each.get(str(step), {}) for each in own] for step in steps}
    return [place for step in steps for place in _build_readers(client, kept[step], step, options)]


def _build_readers(
    client: ReplicaClient, steps_by_node: Sequence[Mapping[str, Any]], step: int, options: StorageOptions
) -> Iterator[ReplicaReader]:
    manifest = next((each["manifest"] for each in steps_by_node if each.get("manifest")), None)
    if manifest is None:
        return
    sizes = {name: int(stored["size"]) for name, stored in json.loads(manifest)["files"].items()}
    holding = {
        name: [number for number, each in enumerate(steps_by_node) if each.get("files", {}).get(name) == size]
        for name, size in sizes.items()
    }
    if not all(holding.values()):
        return
    # A rank's own part is on its node, if ranks are where they were.
    near = {tensors_file_name(rank): number for number, node in enumerate(client.nodes) for rank in node.ranks}
    first = {name: near[name] if near.get(name) in nodes else nodes[0] for name, nodes in holding.items()}
    other = {name: next((n for n in nodes if n != first[name]), first[name]) for name, nodes in holding.items()}
    for holders in (first, other) if other != first else (first,):
        yield ReplicaReader(client, step, manifest.encode(), holders, sizes, options)
