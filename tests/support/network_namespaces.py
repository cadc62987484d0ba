"""Nodes on one machine: network namespaces, each with an address of its own, whose virtual cards lead to one switch.

A process in one reaches those of the other through their addresses alone, as on two machines: what listens on the
loopback is out of reach, and so is a host's own name. Files and process ids are shared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from uuid import uuid4

INTERFACE = "mw0"  # The name of the network card in each node


@dataclass(frozen=True)
class NamespaceNode:
    """A node, by the namespaces of itself and of its `switch`, its IPv4 `address`, and its `port` there."""

    name: str
    address: str
    switch: str
    port: str

    def command(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]

    def find_pids(self) -> list[int]:
        inside = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(each) for each in inside.stdout.split()]

    def unplug(self) -> None:
        """Pull the cable: what is sent later is lost, and no process learns of it."""
        _run("ip", "-n", self.switch, "link", "set", self.port, "down")

    def plug(self) -> None:
        _run("ip", "-n", self.switch, "link", "set", self.port, "up")


def find_missing_requirement() -> str:
    """Why there can be no namespaces here; empty if there can."""
    if shutil.which("ip") is None:
        return "ip (Debian: iproute2) is not installed"
    name = f"mw-{uuid4().hex[:8]}"
    try:
        _run("ip", "netns", "add", name)
        for kind in (["veth", "peer", "name", "mw1", "netns", name], ["bridge"]):
            _run("ip", "link", "add", f"{INTERFACE}-{kind[0]}", "netns", name, "type", *kind)
    except subprocess.CalledProcessError as error:
        return f"no network namespace with virtual cards: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return ""


@contextmanager
def create_nodes(count: int = 2) -> Iterator[tuple[NamespaceNode, ...]]:
    """Nodes that reach each other; what still runs in them at the end is killed."""
    mark = uuid4().hex[:8]
    switch = f"mw-{mark}"
    found = tuple(NamespaceNode(f"{switch}-{n}", f"10.77.0.{n}", switch, f"port{n}") for n in range(1, count + 1))
    try:
        for name in (switch, *(node.name for node in found)):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for node in found:
            pair = ("type", "veth", "peer", "name", node.port, "netns", switch)
            _run("ip", "link", "add", INTERFACE, "netns", node.name, *pair)
            _run("ip", "-n", switch, "link", "set", node.port, "master", "bridge")
            _run("ip", "-n", node.name, "address", "add", f"{node.address}/24", "dev", INTERFACE)
            for card in ("lo", INTERFACE):
                _run("ip", "-n", node.name, "link", "set", card, "up")
            node.plug()
        yield found
    finally:
        for node in found:
            for pid in node.find_pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
        for name in (*(node.name for node in found), switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
