"""The rendezvous store of a world: the address on which it listens, and the prefix of each world's keys.

[Note: access to the store] torch's store does not authenticate clients, and torch unpickles some of its values. So any
process that connects can run code in the ranks. torch opens the store on all interfaces; this module opens it on one
address. If all ranks are on one node, that is loopback, and gloo and NCCL use loopback too. Otherwise it is the
interface of MASTER_ADDR, and the network between nodes must be trusted.

[Note: worlds in one process] A process may open several worlds, one at a time, over one store. Each world has its own
prefix; otherwise a rank would read the addresses of the previous world. The store counts how often each rank has opened
a world, so the ranks agree on the prefix without a message. A world is open only after all ranks have connected: if a
rank closed its connections earlier, a peer that is still connecting would fail.

[Note: worlds in one store] torchrun keeps its store when it restarts ranks, with all entries of the previous ranks: old
addresses, alarms, reports. The environment does not distinguish the two worlds, since each agent counts its own
restarts. So the ranks of a world agree on a prefix: each rank sends a request with a random token, and rank 0 answers
that token with a random prefix. Rank 0 waits until all ranks have confirmed; a rank that is restarted meanwhile sends a
new request.

Source: torch.distributed.TCPStore (`master_listen_fd`); torch.distributed.elastic.rendezvous, whose
`dynamic_rendezvous` shares one TCPStore between rounds.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..base.errors import RankError, format_exception_only
from .environment import get_rank_variable, get_world_size, is_launched_by_torchrun, is_single_node

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LOOPBACK = "127.0.0.1"
"""Address that only this node can reach."""
SINGLE_NODE_BACKEND = "meshwright-one-machine"
"""Name of the rendezvous backend of `register_single_node_backend`."""
_AGENT_TIMEOUT_S, _BACKLOG = 600.0, 4096
_HOSTED_STORES: dict[tuple[str, str], object] = {}
"""Stores that this process has opened, by address and port; None if torch has to open the store."""
_HOSTED_STORES_LOCK = threading.Lock()
_POLL_S = 0.01
_PREFIX_ROOT = "meshwright/same-world"
_PREFIX: list[str] = []
"""Prefix of this world's keys in a store of several worlds, once the ranks have agreed on it."""
_PREFIX_LOCK = threading.Lock()
CONNECT_TIMEOUT_S = 300.0
"""Maximum time between the starts of two ranks."""


def host_store(address: str, port: int, *, timeout_s: float, spans_machines: bool = False) -> TCPStore | None:
    """Open a store on one address of this node, and connect to it.

    Args:
        address: host name or IP address.
        port: port number; 0: a free one, see the store's `port`.
        timeout_s: timeout of each later wait on the store [s].
        spans_machines: whether ranks on other nodes connect to it.

    Returns:
        The store, or None if it must listen on all interfaces. Reasons for that: the address does not belong to this
        node, as behind a forwarded port; or a host name resolves to loopback although there are other nodes.

    Raises:
        OSError: the name does not resolve, or the port is in use.
    """
    from torch.distributed import TCPStore

    family, _, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if spans_machines and ipaddress.ip_address(str(socket_address[0]).partition("%")[0]).is_loopback:
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(socket_address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return None
        listener.listen(_BACKLOG)
        bound_port = listener.getsockname()[1]
        return TCPStore(
            address,
            bound_port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    finally:
        listener.close()


def host_world_store(timeout_s: float) -> None:
    """Open the store of this process's world if this rank hosts it and has not opened it. torch finds it by its port.

    Raises:
        OSError, ValueError: the store cannot be opened.
    """
    names = ("MASTER_ADDR", "MASTER_PORT")
    if (
        get_rank_variable() != "0"
        or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        or not all(map(os.environ.get, names))
    ):
        return
    address, port = (os.environ[name] for name in names)
    with _HOSTED_STORES_LOCK:
        if (address, port) not in _HOSTED_STORES:
            spans = not is_single_node()
            _HOSTED_STORES[address, port] = host_store(address, int(port), timeout_s=timeout_s, spans_machines=spans)


def create_world_store(store: Store, rank: int, size: int) -> Store:
    """Return a view of the store with the keys of one world; see [Note: worlds in one process]."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"world/{store.add(f'worlds/{size}/{rank}', 1)}/{size}", store)


def wait_until_connected(store: Store, size: int) -> None:
    """Wait until all ranks have connected to each other; see [Note: worlds in one process]."""
    if store.add("connected", 1) == size:
        store.set("all_connected", "")
    store.wait(["all_connected"])


def register_single_node_backend() -> None:
    """Register the rendezvous backend `SINGLE_NODE_BACKEND`, for which torch's agent hosts the store on loopback."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(SINGLE_NODE_BACKEND, _create_single_node_rendezvous)


def _create_single_node_rendezvous(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OneMachine(StaticTCPRendezvous):
        _store: Any

        def get_backend(self) -> str:
            return SINGLE_NODE_BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                self._store = host_store(LOOPBACK, 0, timeout_s=_AGENT_TIMEOUT_S)
            return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    return OneMachine(LOOPBACK, 0, rank=0, world_size=1, run_id=str(parameters.run_id), timeout=int(_AGENT_TIMEOUT_S))


def restrict_to_loopback() -> None:
    """Make gloo and NCCL use loopback if all ranks are on one node and the environment sets no interface."""
    if not is_single_node():
        return
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
        os.environ.setdefault(variable, str(loopback))


def agree_on_prefix(store: Store, rank: int, size: int, *, timeout_s: float) -> str:
    """Agree on a prefix for keys that no other world has used; see [Note: worlds in one store]. Collective.

    Raises:
        RankError: a rank sends no request within the timeout, or rank 0 does not answer.
    """
    try:
        return _assign_prefix(store, size, timeout_s) if rank == 0 else _request_prefix(store, rank, timeout_s)
    except RuntimeError as error:
        raise RankError(
            f"the rendezvous store is gone, or rank 0 did not answer within {timeout_s:g} s: {type(error).__name__}."
        ) from error


def _assign_prefix(store: Store, size: int, timeout_s: float) -> str:
    prefix, missing = uuid.uuid4().hex, list(range(1, size))
    answered: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    while True:
        for each in missing:
            if store.check([f"{_PREFIX_ROOT}/asked/{each}"]):
                token = store.get(f"{_PREFIX_ROOT}/asked/{each}").decode()
                if answered.get(each) != token:
                    store.set(f"{_PREFIX_ROOT}/answered/{each}/{token}", prefix)
                    answered[each] = token
        missing = [each for each in missing if not store.check([f"{_PREFIX_ROOT}/confirmed/{prefix}/{each}"])]
        if not missing:
            return prefix
        if time.monotonic() > deadline:
            some = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if missing[10:] else "")
            raise RankError(f"ranks {some} of {size} did not connect within {timeout_s:g} s.")
        time.sleep(_POLL_S)


def _request_prefix(store: Store, rank: int, timeout_s: float) -> str:
    token = uuid.uuid4().hex
    store.set(f"{_PREFIX_ROOT}/asked/{rank}", token)
    key = f"{_PREFIX_ROOT}/answered/{rank}/{token}"
    store.wait([key], timedelta(seconds=timeout_s))
    prefix = store.get(key).decode()
    store.set(f"{_PREFIX_ROOT}/confirmed/{prefix}/{rank}", "")
    return prefix


def connect_store(timeout_s: float = CONNECT_TIMEOUT_S) -> Store:
    """Connect to the rendezvous store of the world that the environment describes.

    The launcher hosts the store if it can, otherwise rank 0 does. Use a separate prefix for each purpose, as in
    `init_process_group(store=PrefixStore("world", store), rank=..., world_size=...)`. Under torchrun, which may restart
    ranks, the first call of a process is collective; see [Note: worlds in one store].

    Args:
        timeout_s: timeout for connecting, and for each later wait on the store [s].

    Raises:
        RankError: the environment describes no world, or its store does not respond.
    """
    from torch.distributed import PrefixStore, rendezvous

    try:
        host_world_store(timeout_s)
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except (ValueError, RuntimeError, OSError) as error:  # a variable is missing or malformed, or no store responds
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in names)
        raise RankError(
            f"no rendezvous store was reached within {timeout_s:g} s: {format_exception_only(error)}. The environment "
            f"has {values}. Start the ranks with `meshwright train` or torchrun, which set these, or set them to an "
            "address that every rank can reach."
        ) from error
    if not is_launched_by_torchrun():
        return store
    with _PREFIX_LOCK:
        if not _PREFIX:
            _PREFIX.append(agree_on_prefix(store, int(get_rank_variable()), get_world_size(), timeout_s=timeout_s))
    return PrefixStore(_PREFIX[0], store)
