"""All checks, alone or as the ranks of a launcher, which also check versions, links, clocks, and a shared directory."""

from __future__ import annotations

import json
import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

from meshwright.plugin import World, __version__, get_registry, open_world, settle
from meshwright_run.first_run.answers import find_machine
from meshwright_run.launch.local import launch
from meshwright_run.launch.rank import guarded

from .checks import (
    Finding,
    backend_findings,
    clock_findings,
    device_findings,
    directory_findings,
    failed,
    limit_findings,
    plugin_findings,
    setting_findings,
    version_findings,
    workplace,
)

MESSAGE = 16 * 2**20  # Bytes of the timed all-reduce
TIMES = 5
PATIENCE_S = 60.0  # How long a rank waits for others
SKEW_S = 1.0  # By how much clocks may differ: metrics and checkpoints of nodes are compared by their times
VISIBLE_S = 10.0  # Time for a new file to be visible on all nodes
_LINKS, _CLOCKS, _DIRECTORY, _RANKS = "links", "clocks", "directory", "ranks"
_ROUNDS = 8


@dataclass(frozen=True)
class Rank:
    """One rank; `leads` says whether it is the first of its node."""

    rank: int
    host: str
    leads: bool
    versions: str


def meet(store: dist.Store | None, result: str, directory: str | None, device: str | None) -> None:
    """Run one rank's part; the first rank writes the findings to `result` as JSON."""
    with open_world(device, store=store, timeout_s=PATIENCE_S) as world:
        found = list(findings_of(world, None if directory is None else Path(directory)))
        if world.rank == 0:
            Path(result).write_text(json.dumps([asdict(each) for each in found]), encoding="utf-8")
        settle()


def findings_of(world: World, directory: Path | None) -> Iterator[Finding]:
    """Yield the same number of findings on each rank; those of the first rank count."""
    versions = f"meshwright {__version__}, torch {torch.__version__}, python {platform.python_version()}"
    own = Rank(world.rank, socket.gethostname(), os.environ.get("LOCAL_RANK", "0") == "0", versions)
    ranks: list[Rank] = _gathered(world, own)
    yield _alike(ranks)
    yield _link(world, torch.device("cpu"))
    if world.device.type != "cpu":
        yield _link(world, world.device)
    leaders = [each for each in ranks if each.leads]
    if len(leaders) > 1:
        yield _skew(world, leaders)
    if directory is not None and len(leaders) > 1:
        yield from _seen_by_all(world, directory, leaders)


def _gathered(world: World, value: Any) -> list[Any]:
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value, group=world.group)
    return found


def _alike(ranks: Sequence[Rank]) -> Finding:
    versions = {each.versions: each for each in reversed(ranks)}
    hosts = len({each.host for each in ranks})
    said = f"{len(ranks)} on {hosts} host{'s' if hosts > 1 else ''} have met"
    if len(versions) == 1:
        return Finding(_RANKS, "ranks", "ok", f"{said}; all have {ranks[0].versions}")
    told = "; ".join(f"rank {each.rank} on {each.host}: {text}" for text, each in versions.items())
    return Finding(_RANKS, "ranks", "wrong", f"{said}, but differ: {told}", "Install the same versions on all nodes.")


def _link(world: World, device: torch.device) -> Finding:
    """Time an all-reduce; the best of some counts."""
    name = "gloo" if device.type == "cpu" else str(dist.get_backend_config()).rpartition(":")[2]
    values = torch.ones(MESSAGE // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(TIMES):
        values.fill_(1.0)
        dist.barrier(group=world.group)
        began = time.perf_counter()
        dist.all_reduce(values, group=world.group)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
    rate = 2 * (world.size - 1) / world.size * MESSAGE / min(seconds)
    if not bool((values == world.size).all()):
        mend = "Look at the network, its driver and firmware; for NCCL run with NCCL_DEBUG=INFO."
        return failed(_LINKS, name, f"the sum over {world.size} ranks is wrong", mend)
    said = (
        f"an all-reduce of {MESSAGE >> 20} MiB over {world.size} ranks takes {min(seconds) * 1e3:,.1f} ms: "
        f"{rate / 1e9:,.2f} GB/s of each rank"
    )
    return Finding(_LINKS, name, "ok", said)


def _skew(world: World, leaders: Sequence[Rank]) -> Finding:
    """Measure the clocks of nodes against the first's, up to half a round trip, as NTP does (Mills 1991)."""
    offsets: dict[int, tuple[float, float]] = {}
    for each in leaders[1:]:
        for _ in range(_ROUNDS):
            clock = torch.zeros(1, dtype=torch.float64)
            if world.rank == 0:
                began = time.time()
                dist.send(clock, each.rank)
                dist.recv(clock, each.rank)
                ended = time.time()
                trip = ended - began
                offset = float(clock) - (began + ended) / 2
                offsets[each.rank] = min(offsets.get(each.rank, (trip, offset)), (trip, offset))
            elif world.rank == each.rank:
                dist.recv(clock, 0)
                clock.fill_(time.time())
                dist.send(clock, 0)
    if not offsets:
        return Finding(_CLOCKS, "nodes", "ok", "measured by rank 0")
    rank, (trip, offset) = max(offsets.items(), key=lambda item: abs(item[1][1]))
    host = next(each.host for each in leaders if each.rank == rank)
    said = f"rank {rank} on {host} is {abs(offset):.3g} s {'ahead of' if offset > 0 else 'behind'} rank 0"
    if abs(offset) > SKEW_S + trip:
        return Finding(_CLOCKS, "nodes", "warning", said, "Let NTP (chrony, systemd-timesyncd) set all nodes' clocks.")
    return Finding(_CLOCKS, "nodes", "ok", f"at most {abs(offset) + trip:.3g} s apart")


def _seen_by_all(world: World, directory: Path, leaders: Sequence[Rank]) -> Iterator[Finding]:
    """The first rank writes and locks a file, and one rank of each other node looks at it."""
    leads = any(each.rank == world.rank for each in leaders[1:])
    if world.rank == 0:
        with workplace(directory) as own:
            (own / "file").write_text(socket.gethostname(), encoding="utf-8")
            with FileLock(own / "lock", timeout=5):
                _gathered(world, str(own))
                seen = _gathered(world, None)
    else:
        own = Path(_gathered(world, None)[0])
        seen = _gathered(world, _look(own) if leads else None)
    others = {each.host: seen[each.rank] for each in leaders[1:]}
    blind = [host for host, (is_seen, _) in others.items() if not is_seen]
    mend = "Name a directory of a file system that all nodes have mounted at the same place."
    if blind:
        said = f"{directory} of rank 0 is not seen within {VISIBLE_S:g} s on {', '.join(blind)}"
        yield Finding(_DIRECTORY, "shared", "wrong", said, mend)
        return
    yield Finding(_DIRECTORY, "shared", "ok", f"all {len(leaders)} nodes see the same")
    unlocked = [host for host, (_, is_locked) in others.items() if not is_locked]
    if unlocked:
        mend = "Mount it with locks that hold between nodes (NFS: without nolock; Lustre: flock, not localflock)."
        yield Finding(_DIRECTORY, "locks of nodes", "warning", f"a lock of rank 0 does not hold {unlocked}", mend)
    else:
        yield Finding(_DIRECTORY, "locks of nodes", "ok", "a lock of one node holds the others")


def _look(own: Path) -> tuple[bool, bool]:
    """Whether the first rank's file is visible here, and its lock holds."""
    until = time.monotonic() + VISIBLE_S
    while not (own / "file").is_file():
        if time.monotonic() > until:
            return False, False
        time.sleep(0.1)
    try:
        with FileLock(own / "lock", timeout=0):
            return True, False
    except (Timeout, OSError):
        return True, True


RANKS = 2  # Started without a launcher


def of_machine(directory: Path | None) -> Iterator[Finding]:
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
    """Check this machine and the others as a rank of a launcher's world; return exit code and findings. Collective."""
    found: list[Finding] = []
    return guarded(_as_rank, (found, directory), timeout_s=PATIENCE_S), found


def _as_rank(store: dist.Store | None, found: list[Finding], directory: Path | None) -> None:
    with open_world(store=store, timeout_s=PATIENCE_S) as world:
        own = list(of_machine(directory)) if world.rank == 0 else []
        own += findings_of(world, directory)
        found += world.from_first(lambda: own)
