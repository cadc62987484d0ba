"""The rendezvous store of a world, at one address alone.

[Note: who reaches a store] torch's store asks nobody who he is, and torch unpickles some of what it holds: whoever
connects can run code in the ranks. torch's own functions open it on all interfaces. Here it is opened on the address
that the ranks are told: loopback where all are on one machine, else the interface that MASTER_ADDR names. Sockets of
gloo and NCCL stay on loopback there, too. Between machines the network must be trusted.

[Note: worlds in one process] A process may open several worlds, one after the other, over one store. Each world has a
prefix of its own there, or a rank reads the addresses of the previous world and connects to nobody. The store counts
how often each rank has opened a world, so the ranks agree on the number without a message. And a world is open only
once all ranks have connected: a rank that closed its connections before would make a peer fail that still connects.

This module imports torch only where it is used.
Source: torch.distributed.TCPStore (`master_listen_fd`); torch.distributed.elastic.rendezvous.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from .environment import on_one_machine, rank

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LOOPBACK = "127.0.0.1"
ONE_MACHINE = "meshwright-one-machine"
"""Name of the rendezvous backend of `register_one_machine`."""
AGENT_TIMEOUT_S = 600.0
"""For each wait of the agent on its store."""
_BACKLOG = 4096
_HOSTED: dict[tuple[str, str], object] = {}
"""Stores that this process has opened, by address and port; None where torch has to."""
_LOCK = threading.Lock()
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def host_store(address: str, port: int, *, timeout_s: float, spans_machines: bool = False) -> TCPStore | None:
    """Open a store at one address of this machine, and connect to it.

    Args:
        address: a host's name or number.
        port: 0: one that is free, which the store's `port` tells.
        timeout_s: for each later wait on the store.
        spans_machines: ranks of other machines connect to it.

    Returns:
        None where the address is none of this machine's, as behind a forwarded port, or, for other machines, is
        loopback, as a machine may call itself: then only a store on all interfaces is reached.

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


def host_for_ranks(timeout_s: float) -> None:
    """Open the store of the world that the environment describes, if this rank has to and has not yet; torch finds it
    by its port.

    Raises:
        OSError, ValueError: it cannot be opened.
    """
    names = ("MASTER_ADDR", "MASTER_PORT")
    if rank() != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not all(map(os.environ.get, names)):
        return
    address, port = (os.environ[name] for name in names)
    with _LOCK:
        if (address, port) not in _HOSTED:
            spans = not on_one_machine()
            _HOSTED[address, port] = host_store(address, int(port), timeout_s=timeout_s, spans_machines=spans)


def world_store(store: Store, rank: int, size: int) -> Store:
    """Return a view of the store with keys of one world alone; see [Note: worlds in one process]."""
    from torch.distributed import PrefixStore

    return PrefixStore(f"world/{store.add(f'worlds/{size}/{rank}', 1)}/{size}", store)


def wait_until_connected(store: Store, size: int) -> None:
    """Wait until all ranks have connected to each other; see [Note: worlds in one process]."""
    if store.add("connected", 1) == size:
        store.set("all_connected", "")
    store.wait(["all_connected"])


def register_one_machine() -> None:
    """Let torch's elastic agent meet its ranks at a store on loopback, by the rendezvous backend `ONE_MACHINE`."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(ONE_MACHINE, _one_machine)


def _one_machine(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class OneMachine(RendezvousHandler):
        """One agent, which hosts the store for its ranks."""

        use_agent_store = True

        def __init__(self) -> None:
            self._store: Any = None

        def get_backend(self) -> str:
            return ONE_MACHINE

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                self._store = host_store(LOOPBACK, 0, timeout_s=AGENT_TIMEOUT_S)
            return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return str(parameters.run_id)

        def shutdown(self) -> bool:
            return True

    return OneMachine()


def keep_to_loopback() -> None:
    """Have gloo and NCCL use the loopback interface where all ranks are on one machine, unless the environment names
    another interface."""
    if not on_one_machine():
        return
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    for variable in _INTERFACES if loopback else ():
        os.environ.setdefault(variable, str(loopback))
