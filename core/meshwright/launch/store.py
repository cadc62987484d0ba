"""The rendezvous store of a world: where it listens, and which keys in it belong to which world.

[Note: who reaches a store] torch's store authenticates nobody, and torch unpickles some of what it holds, so whoever
connects can run code in the ranks. torch's own functions open it on all interfaces. Here it is opened on one address:
loopback if all ranks are on one machine, else the interface that MASTER_ADDR names; sockets of gloo and NCCL stay on
loopback then, too. Between machines the network must be trusted.

[Note: worlds in one process] A process may open several worlds, one after the other, over one store. Each has a prefix
of its own there, or a rank would read the addresses of the previous world. The store counts how often each rank has
opened a world, so the ranks agree on the number without a message. A world is open only once all ranks have connected:
if a rank closed its connections earlier, a peer that still connects would fail.

[Note: worlds in one store] torchrun keeps its store when it restarts ranks, with all that the ranks before have left
there: old addresses, alarms, reports. Nothing in the environment tells two worlds apart, since each agent counts its
own restarts. So the ranks of a world agree on a prefix: each rank asks with a random word, and the first rank answers
that word with the prefix that it has drawn. It waits until all have confirmed: one that was restarted again asks again.

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
"""Address that only this machine reaches."""
SINGLE_NODE_BACKEND = "meshwright-one-machine"
"""Name of the rendezvous backend of `register_single_node_backend`."""
_AGENT_TIMEOUT_S, _BACKLOG = 600.0, 4096
_HOSTED_STORES: dict[tuple[str, str], object] = {}
"""Stores that this process has opened, by address and port; None where torch has to open it."""
_HOSTED_STORES_LOCK = threading.Lock()
_POLL_S = 0.01
_PREFIX_ROOT = "meshwright/same-world"
_PREFIX: list[str] = []
"""Of this world's keys in a store of several worlds, once it is agreed."""
_PREFIX_LOCK = threading.Lock()
CONNECT_TIMEOUT_S = 300.0
"""Ranks may start this far apart."""


def host_store(address: str, port: int, *, timeout_s: float, spans_machines: bool = False) -> TCPStore | None:
    """Open a store at one address of this machine, and connect to it.

    Args:
        address: a host's name or number.
        port: 0: a free one, which the store's `port` tells.
        timeout_s: for each later wait on the store.
        spans_machines: whether ranks of other machines connect to it.

    Returns:
        None where only a store on all interfaces can be reached: the address is not this machine's, as behind a
        forwarded port, or it is loopback, as a machine may call itself, but there are other machines.

    Raises:
        OSError: the name does not resolve, or the port is taken.
    """
    from torch.distributed import TCPStore

    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if spans_machines and ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
        return None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return None
        listener.listen(_BACKLOG)
        found = listener.getsockname()[1]
        return TCPStore(
            address,
            found,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    finally:
        listener.close()


def host_world_store(timeout_s: float) -> None:
    """Open the store of the environment's world, if this rank has to and has not yet; torch finds it by its port.

    Raises:
        OSError, ValueError: it cannot be opened.
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
    """Return a view of the store with keys of one world alone; see [Note: worlds in one process]."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"world/{store.add(f'worlds/{size}/{rank}', 1)}/{size}", store)


def wait_until_connected(store: Store, size: int) -> None:
    """Wait until all ranks have connected to each other; see [Note: worlds in one process]."""
    if store.add("connected", 1) == size:
        store.set("all_connected", "")
    store.wait(["all_connected"])


def register_single_node_backend() -> None:
    """Register the rendezvous backend `SINGLE_NODE_BACKEND`: torch's agent hosts the store for its ranks on
    loopback."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(SINGLE_NODE_BACKEND, _create_single_node_rendezvous)


def _create_single_node_rendezvous(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class OneMachine(StaticTCPRendezvous):
        """One agent, which hosts the store for its ranks."""

        _store: Any

        def get_backend(self) -> str:
            return SINGLE_NODE_BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                self._store = host_store(LOOPBACK, 0, timeout_s=_AGENT_TIMEOUT_S)
            return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    return OneMachine(LOOPBACK, 0, rank=0, world_size=1, run_id=str(parameters.run_id), timeout=int(_AGENT_TIMEOUT_S))


def restrict_to_loopback() -> None:
    """Make gloo and NCCL use loopback if all ranks are on one machine and the environment names no interface."""
    if not is_single_node():
        return
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
        os.environ.setdefault(variable, str(loopback))


def agree_on_prefix(store: Store, rank: int, size: int, *, timeout_s: float) -> str:
    """Agree on a prefix for keys that no other world has used; see [Note: worlds in one store]. Collective.

    Raises:
        RankError: a rank does not ask within the timeout, or the first one does not answer.
    """
    try:
        return _assign_prefix(store, size, timeout_s) if rank == 0 else _request_prefix(store, rank, timeout_s)
    except RuntimeError as error:
        raise RankError(
            f"the rendezvous store is gone, or rank 0 has not come within {timeout_s:g} s: {type(error).__name__}."
        ) from error


def _assign_prefix(store: Store, size: int, timeout_s: float) -> str:
    prefix, missing = uuid.uuid4().hex, list(range(1, size))
    answered: dict[int, str] = {}
    until = time.monotonic() + timeout_s
    while True:
        for each in missing:
            if store.check([f"{_PREFIX_ROOT}/asked/{each}"]):
                word = store.get(f"{_PREFIX_ROOT}/asked/{each}").decode()
                if answered.get(each) != word:
                    store.set(f"{_PREFIX_ROOT}/answered/{each}/{word}", prefix)
                    answered[each] = word
        missing = [each for each in missing if not store.check([f"{_PREFIX_ROOT}/confirmed/{prefix}/{each}"])]
        if not missing:
            return prefix
        if time.monotonic() > until:
            some = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if missing[10:] else "")
            raise RankError(f"ranks {some} of {size} have not come within {timeout_s:g} s.")
        time.sleep(_POLL_S)


def _request_prefix(store: Store, rank: int, timeout_s: float) -> str:
    word = uuid.uuid4().hex
    store.set(f"{_PREFIX_ROOT}/asked/{rank}", word)
    key = f"{_PREFIX_ROOT}/answered/{rank}/{word}"
    store.wait([key], timedelta(seconds=timeout_s))
    prefix = store.get(key).decode()
    store.set(f"{_PREFIX_ROOT}/confirmed/{prefix}/{rank}", "")
    return prefix


def connect_store(timeout_s: float = CONNECT_TIMEOUT_S) -> Store:
    """Open a connection to the rendezvous store of the world that the environment describes.

    The launcher hosts the store where it can, otherwise rank 0 does. Give each user of it a prefix of its own, as in
    `init_process_group(store=PrefixStore("world", store), rank=..., world_size=...)`. Under torchrun, which may restart
    ranks, the first call of a process is collective; see [Note: worlds in one store].

    Args:
        timeout_s: limit for connecting, and for each later wait on the store.

    Raises:
        RankError: the environment describes no world, or its store does not answer.
    """
    from torch.distributed import PrefixStore, rendezvous

    try:
        host_world_store(timeout_s)
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    except (ValueError, RuntimeError, OSError) as error:  # a variable is missing or malformed; nobody answers
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in names)
        raise RankError(
            f"no rendezvous store reached within {timeout_s:g} s: {format_exception_only(error)}. The environment has "
            f"{values}. "
            "Start the ranks with `meshwright train` or torchrun, which set these, or set them to an address that "
            "every rank can reach."
        ) from error
    if not is_launched_by_torchrun():
        return store
    with _PREFIX_LOCK:
        if not _PREFIX:
            _PREFIX.append(agree_on_prefix(store, int(get_rank_variable()), get_world_size(), timeout_s=timeout_s))
    return PrefixStore(_PREFIX[0], store)
