"""Two nodes on one machine: network namespaces, each with an address of its own, joined by a pair of virtual cards.

A process in one reaches those of the other through their addresses alone, as on two machines: what listens on the
loopback is out of reach, and so is a host's own name. Files and process ids are shared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

CARD = "mw0"
"""The name of the network card in each node."""


@dataclass(frozen=True)
class Node:
    """One of the two.

    Attributes:
        name: of the namespace.
        address: IPv4.
    """

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """What runs `command` in this node."""
        return ["ip", "netns", "exec", self.name, *command]


def why_not() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if shutil.which("ip") is None:
        return "ip (Debian: iproute2) is not installed"
    name = f"mw-{uuid4().hex[:8]}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace: {tried.stderr.strip()}"
    tried = subprocess.run(
        ["ip", "link", "add", CARD, "netns", name, "type", "veth", "peer", "name", "mw1", "netns", name],
        capture_output=True,
        text=True,
        check=False,
    )
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return f"no virtual network card: {tried.stderr.strip()}" if tried.returncode else ""


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two nodes that reach each other; what still runs in them at the end is killed."""
    mark = uuid4().hex[:8]
    nodes = Node(f"mw-{mark}-a", "10.77.0.1"), Node(f"mw-{mark}-b", "10.77.0.2")
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.name)
        first, second = nodes
        pair = ("type", "veth", "peer", "name", CARD, "netns", second.name)
        _run("ip", "link", "add", CARD, "netns", first.name, *pair)
        for node in nodes:
            _run("ip", "-n", node.name, "address", "add", f"{node.address}/24", "dev", CARD)
            for card in ("lo", CARD):
                _run("ip", "-n", node.name, "link", "set", card, "up")
        yield nodes
    finally:
        for node in nodes:
            inside = subprocess.run(["ip", "netns", "pids", node.name], capture_output=True, text=True, check=False)
            for pid in map(int, inside.stdout.split()):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue
            subprocess.run(["ip", "netns", "delete", node.name], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
