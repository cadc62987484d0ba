"""Which sockets of a process, and of all that it has started, wait for connections."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"


def descendants(pid: int) -> set[int]:
    """The process and all that it, or one of these, has started and that are there."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, size = {pid}, 0
    while size < len(found):
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def listening(pids: set[int]) -> dict[str, int]:
    """Addresses, as "127.0.0.1:29500", on which these processes wait, each with one that does."""
    sockets = {inode: address for name in ("tcp", "tcp6") for inode, address in _table(Path("/proc/net") / name)}
    found = {}
    for pid in pids:
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    target = os.readlink(entry.path)
                    if target.startswith("socket:[") and (inode := target[8:-1]) in sockets:
                        found[sockets[inode]] = pid
    return found


def beyond_loopback(addresses: dict[str, int]) -> dict[str, int]:
    """Those that other machines reach."""
    return {each: pid for each, pid in addresses.items() if not _host(each).is_loopback}


def _host(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    host = ipaddress.ip_address(address.rpartition(":")[0].strip("[]"))
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return mapped or host


def _table(path: Path) -> Iterator[tuple[str, str]]:
    for line in path.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] != LISTENING:
            continue
        raw, port = fields[1].split(":")
        # Words of 32 bits in this machine's order.
        words = b"".join(bytes.fromhex(raw[at : at + 8])[::-1] for at in range(0, len(raw), 8))
        family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
        host = socket.inet_ntop(family, words)
        yield fields[9], f"[{host}]:{int(port, 16)}" if ":" in host else f"{host}:{int(port, 16)}"
