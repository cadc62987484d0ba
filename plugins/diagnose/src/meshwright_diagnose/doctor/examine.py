"""All checks, alone or as the ranks of a launcher."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright.plugin import get_registry, open_world
from meshwright_run.first_run.answers import find_machine
from meshwright_run.launch.local import launch
from meshwright_run.launch.rank import guarded

from .directory import directory_findings
from .finding import Finding, failed
from .machine import backend_findings, clock_findings, device_findings, limit_findings
from .software import plugin_findings, setting_findings, version_findings
from .together import PATIENCE_S, findings_of, meet

RANKS = 2
"""Started without a launcher."""


def of_machine(directory: Path | None) -> Iterator[Finding]:
    """Run the checks of one process."""
    yield from version_findings()
    yield from plugin_findings(get_registry())
    yield from device_findings()
    yield from limit_findings()
    yield from setting_findings(os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", find_machine().count)))
    yield from backend_findings()
    yield from clock_findings()
    if directory is not None:
        yield from directory_findings(directory)


def of_local_ranks() -> Iterator[Finding]:
    """Start two ranks on this machine and let them communicate; on accelerators, too, if there are two."""
    yield from _met("cpu")
    if torch.accelerator.device_count() >= RANKS:
        yield from _met(None)


def _met(device: str | None) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="meshwright-") as place:
        result = Path(place) / "found.json"
        code = launch(meet, (str(result), None, device), nproc=RANKS)
        if code or not result.is_file():
            mend = (
                "What the ranks have said stands above. Two processes of this machine must reach each other over the "
                "loopback interface; GLOO_SOCKET_IFNAME=lo names it."
            )
            yield failed("ranks", "ranks", f"{RANKS} ranks were started, and did not meet (exit code {code})", mend)
            return
        rows: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    yield from (Finding(**row) for row in rows)


def of_launched_ranks(directory: Path | None) -> tuple[int, list[Finding]]:
    """Check this machine and the others as a rank of a launcher's world. Collective.

    Returns:
        The exit code if the world failed, otherwise 0; and the findings, on the first rank.
    """
    found: list[Finding] = []
    code = guarded(_as_rank, (found, directory), timeout_s=PATIENCE_S)
    return code, found


def _as_rank(store: dist.Store | None, found: list[Finding], directory: Path | None) -> None:
    with open_world(store=store, timeout_s=PATIENCE_S) as world:
        own = list(of_machine(directory)) if world.rank == 0 else []
        own += findings_of(world, directory)
        found += world.from_first(lambda: own)
