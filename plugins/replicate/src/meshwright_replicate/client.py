"""Client of the replica servers of all nodes, and readers of the steps that they hold."""

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
    """A node: the id of its replica server, its ranks, and the host and port of the server for other nodes."""

    server_id: str
    ranks: tuple[int, ...]
    address: tuple[str, int] | None = None


@dataclass(frozen=True)
class ReplicaClient:
    """Client of the replica servers of a world."""

    nodes: tuple[ReplicaNode, ...]  # in the order of their first ranks
    local_node: int  # number of this rank's node
    token: str

    @property
    def next_node(self) -> int | None:
        """Number of the node that holds the second copy of this node's state; None if there is only one node."""
        return (self.local_node + 1) % len(self.nodes) if len(self.nodes) > 1 else None

    @property
    def is_node_leader(self) -> bool:
        return dist.get_rank() == self.nodes[self.local_node].ranks[0]

    def connect(self, node: int) -> Connection:
        """Connect to the replica server of a node. Raises OSError."""
        if node == self.local_node:
            return _connect_local()
        address = self.nodes[node].address
        if address is None:
            raise OSError("the replica server has no address")
        connection = socket.create_connection(address, timeout=protocol.IO_TIMEOUT_S)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            protocol.authenticate_to_server(connection, self.token)
        except OSError:
            connection.close()
            raise
        return Connection(connection)

    def list_steps(self, world: World) -> list[Mapping[str, Any]]:
        """Return the steps on each node; none for a node whose server does not respond. Collective."""
        mine: dict[str, Any] = {"run": "", "steps": {}}
        if self.is_node_leader:
            try:
                mine = _request_local("list")
            except OSError:
                mine = {"run": "", "steps": {}}  # the server was killed
        gathered = _all_gather(mine, world)
        return [gathered[node.ranks[0]] for node in self.nodes]

    def discard_stale(self, run_id: str, step: int, world: World) -> None:
        """Make all servers discard steps of other runs, and steps after `step`. Collective. Raises RankError."""

        def work() -> None:
            try:
                if self.is_node_leader:
                    _request_local("discard_stale", run=run_id, step=step)
            except OSError as error:
                raise RankError(f"the replica server does not respond: {error}.") from error

        world.run_on_all_ranks(work)


def open_replica_client(world: World) -> ReplicaClient:
    """Find or start the replica server of each node. Collective. Raises ConfigError or RankError."""
    server_id = world.run_on_all_ranks(_find_or_start_server)
    server_ids = _all_gather(server_id, world)
    ranks = {each: tuple(rank for rank, other in enumerate(server_ids) if other == each) for each in server_ids}
    nodes = [ReplicaNode(*item) for item in ranks.items()]
    here = next(number for number, node in enumerate(nodes) if node.server_id == server_id)
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
    """Return the id of this node's replica server, which the node's first rank starts if there is none."""
    if not hasattr(os, "memfd_create") or not hasattr(socket, "SO_PEERCRED") or not get_process_identity(os.getpid()):
        raise ConfigError("checkpoint.replicate needs Linux, with /proc. Leave it out.")
    try:
        _get_server_socket_path()
    except OSError as error:
        raise ConfigError(f"checkpoint.replicate cannot create its socket: {error}.") from error
    starts, deadline = os.environ.get("LOCAL_RANK", "0") == "0", time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            return str(_request_local("list")["id"])
        except OSError as error:
            if time.monotonic() > deadline:
                raise RankError(
                    f"the replica server (checkpoint.replicate) did not respond within {_START_TIMEOUT_S:g} s: {error}."
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
    # See [Note: nothing is left] in `server`. It must not hold pipes open that others wait to see closed.
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    process.returncode = 0  # it is never waited for; without a return code, Python would warn


def _get_server_socket_path() -> Path:
    """Return the path of the server's socket, one for each process that starts ranks."""
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
    connection = _connect_local()
    try:
        return connection.request(command, **values)
    finally:
        connection.close()


def _expose_local_server(host: str, token: str, *, is_single_node: bool) -> tuple[str, int]:
    """Make this node's server listen for other nodes; return its host and port. `host`: in the ranks' network."""
    # A node may know only its loopback address; others reach it by MASTER_ADDR.
    is_hidden = _is_loopback(host) and not is_single_node
    try:
        port = _request_local("listen", host=_ALL_INTERFACES if is_hidden else host, token=token)["port"]
    except OSError as error:
        raise RankError(f"the replica server cannot accept connections of other nodes: {error}.") from error
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
    """Storage of a step in memory. All ranks read a file from the same server, so one rank verifies it for all."""

    client: ReplicaClient
    step: int  # number of completed steps
    manifest: bytes  # content of the manifest file
    file_nodes: Mapping[str, int]  # number of the node from whose server each file is read
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
            raise OSError(f"step {self.step} has no file {name}")
        node = self.file_nodes[name]
        connection = self.client.connect(node)
        if node != self.client.local_node:
            return io.BufferedReader(_RemoteReplicaFile(connection, self.step, name, self.file_sizes[name]), 1 << 20)
        try:
            file = connection.request_file("read", step=self.step, name=name)
        finally:
            connection.close()
        try:
            # Open it again: duplicated descriptors share a file position with other readers.
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
    """Return readers of the complete steps of a run, newest first; two for a step if other servers have files, too."""
    own = [each["steps"] if each["run"] == run_id else {} for each in steps_by_node]
    steps = sorted({int(step) for each in own for step in each}, reverse=True)
    kept = {step: [each.get(str(step), {}) for each in own] for step in steps}
    return [reader for step in steps for reader in _build_readers(client, kept[step], step, options)]


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
    # Prefer a rank's own node, which has its part unless ranks have moved.
    near = {tensors_file_name(rank): number for number, node in enumerate(client.nodes) for rank in node.ranks}
    first = {name: near[name] if near.get(name) in nodes else nodes[0] for name, nodes in holding.items()}
    other = {name: next((n for n in nodes if n != first[name]), first[name]) for name, nodes in holding.items()}
    for holders in (first, other) if other != first else (first,):
        yield ReplicaReader(client, step, manifest.encode(), holders, sizes, options)
