"""Which sockets of a process, and of all that it has started, wait for connections."""

from __future__ import annotations

import ipaddress
from contextlib import suppress

import psutil


def listening(pid: int) -> set[str]:
    """Addresses, as "127.0.0.1:29500", on which the process, or one that it or these have started, waits."""
    found = set()
    with suppress(psutil.Error):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with suppress(psutil.Error):
                sockets = process.net_connections("tcp")
                found |= {f"{s.laddr.ip}:{s.laddr.port}" for s in sockets if s.status == psutil.CONN_LISTEN}
    return found


def beyond_loopback(addresses: set[str]) -> set[str]:
    """Those that other machines reach."""
    hosts = {each: ipaddress.ip_address(each.rpartition(":")[0].removeprefix("::ffff:")) for each in addresses}
    return {each for each, host in hosts.items() if not host.is_loopback}
