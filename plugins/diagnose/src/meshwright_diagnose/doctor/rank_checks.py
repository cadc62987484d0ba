"""Checks that ranks make together: versions, links, clocks and a shared directory; and the sequence of all checks."""

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

from meshwright.plugin import World, __version__, get_registry, open_world, wait_for_gloo_threads
from meshwright_run.init_wizard.answers import detect_machine
from meshwright_run.launch.local import launch_ranks
from meshwright_run.launch.rank_process import run_guarded

from .checks import (
    CheckResult,
    check_backends,
    check_clocks,
    check_devices,
    check_directory,
    check_limits,
    check_plugins,
    check_settings,
    check_versions,
    make_failure,
    scratch_directory,
)

MESSAGE_BYTES = 16 * 2**20  # Size of the timed all-reduce
NUM_REPEATS = 5
RENDEZVOUS_TIMEOUT_S = 60.0  # Time for which a rank waits for the others
MAX_CLOCK_SKEW_S = 1.0  # Metrics and checkpoints of nodes are compared by their timestamps
VISIBILITY_TIMEOUT_S = 10.0  # Time for a new file to be visible on all nodes
_LINKS, _CLOCKS, _DIRECTORY, _RANKS = "links", "clocks", "directory", "ranks"
_ROUNDS = 8


@dataclass(frozen=True)
class RankInfo:
    """A rank, its host and its versions. The leader of a node is its first rank."""

    rank: int
    host: str
    is_node_leader: bool
    versions: str


def run_rank_checks(store: dist.Store | None, result: str, directory: str | None, device: str | None) -> None:
    """Run the checks of one rank. Rank 0 writes the findings to the file `result` as JSON. Collective."""
    with open_world(device, store=store, timeout_s=RENDEZVOUS_TIMEOUT_S) as world:
        found = list(check_ranks(world, None if directory is None else Path(directory)))
        if world.rank == 0:
            Path(result).write_text(json.dumps([asdict(each) for each in found]), encoding="utf-8")
        wait_for_gloo_threads()


def check_ranks(world: World, directory: Path | None) -> Iterator[CheckResult]:
    """Yield the findings. Every rank yields as many, but only those of rank 0 count. Collective."""
    versions = f"meshwright {__version__}, torch {torch.__version__}, python {platform.python_version()}"
    own = RankInfo(world.rank, socket.gethostname(), os.environ.get("LOCAL_RANK", "0") == "0", versions)
    ranks: list[RankInfo] = _all_gather(world, own)
    yield _check_same_versions(ranks)
    yield _check_link(world, torch.device("cpu"))
    if world.device.type != "cpu":
        yield _check_link(world, world.device)
    leaders = [each for each in ranks if each.is_node_leader]
    if len(leaders) > 1:
        yield _check_clock_skew(world, leaders)
    if directory is not None and len(leaders) > 1:
        yield from _check_shared_directory(world, directory, leaders)


def _all_gather(world: World, value: Any) -> list[Any]:
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, value, group=world.group)
    return found


def _check_same_versions(ranks: Sequence[RankInfo]) -> CheckResult:
    versions = {each.versions: each for each in reversed(ranks)}
    hosts = len({each.host for each in ranks})
    message = f"{len(ranks)} ranks on {hosts} host{'s' if hosts > 1 else ''} are connected"
    if len(versions) == 1:
        return CheckResult(_RANKS, "ranks", "ok", f"{message}; all have {ranks[0].versions}")
    reported = "; ".join(f"rank {each.rank} on {each.host}: {text}" for text, each in versions.items())
    return CheckResult(
        _RANKS, "ranks", "error", f"{message}; versions differ: {reported}", "Install the same versions on all nodes."
    )


def _check_link(world: World, device: torch.device) -> CheckResult:
    """Time an all-reduce; the fastest of several counts."""
    name = "gloo" if device.type == "cpu" else str(dist.get_backend_config()).rpartition(":")[2]
    values = torch.ones(MESSAGE_BYTES // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(NUM_REPEATS):
        values.fill_(1.0)
        dist.barrier(group=world.group)
        began = time.perf_counter()
        dist.all_reduce(values, group=world.group)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        seconds.append(time.perf_counter() - began)
    rate = 2 * (world.size - 1) / world.size * MESSAGE_BYTES / min(seconds)
    if not bool((values == world.size).all()):
        fix = "Check the network, its driver and firmware; for NCCL, run with NCCL_DEBUG=INFO."
        return make_failure(_LINKS, name, f"the sum over {world.size} ranks is wrong", fix)
    message = (
        f"an all-reduce of {MESSAGE_BYTES >> 20} MiB over {world.size} ranks takes {min(seconds) * 1e3:,.1f} ms: "
        f"{rate / 1e9:,.2f} GB/s per rank"
    )
    return CheckResult(_LINKS, name, "ok", message)


def _check_clock_skew(world: World, leaders: Sequence[RankInfo]) -> CheckResult:
    """Measure the offset of each node's clock from rank 0's to within half a round trip, as NTP does (Mills 1991)."""
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
        return CheckResult(_CLOCKS, "nodes", "ok", "measured by rank 0")
    rank, (trip, offset) = max(offsets.items(), key=lambda item: abs(item[1][1]))
    host = next(each.host for each in leaders if each.rank == rank)
    message = f"rank {rank} on {host} is {abs(offset):.3g} s {'ahead of' if offset > 0 else 'behind'} rank 0"
    if abs(offset) > MAX_CLOCK_SKEW_S + trip:
        return CheckResult(
            _CLOCKS, "nodes", "warning", message, "Set the clocks of all nodes by NTP (chrony, systemd-timesyncd)."
        )
    return CheckResult(_CLOCKS, "nodes", "ok", f"at most {abs(offset) + trip:.3g} s apart")


def _check_shared_directory(world: World, directory: Path, leaders: Sequence[RankInfo]) -> Iterator[CheckResult]:
    """Write and lock a file on rank 0, and inspect it from one rank of each other node. Collective."""
    leads = any(each.rank == world.rank for each in leaders[1:])
    if world.rank == 0:
        with scratch_directory(directory) as own:
            (own / "file").write_text(socket.gethostname(), encoding="utf-8")
            with FileLock(own / "lock", timeout=5):
                _all_gather(world, str(own))
                seen = _all_gather(world, None)
    else:
        own = Path(_all_gather(world, None)[0])
        seen = _all_gather(world, _inspect_shared_file(own) if leads else None)
    others = {each.host: seen[each.rank] for each in leaders[1:]}
    blind = [host for host, (is_seen, _) in others.items() if not is_seen]
    fix = "Choose a directory of a file system that all nodes have mounted at the same path."
    if blind:
        message = f"a new file in {directory} is not visible within {VISIBILITY_TIMEOUT_S:g} s on {', '.join(blind)}"
        yield CheckResult(_DIRECTORY, "shared", "error", message, fix)
        return
    yield CheckResult(_DIRECTORY, "shared", "ok", f"all {len(leaders)} nodes see the same files")
    unlocked = [host for host, (_, is_locked) in others.items() if not is_locked]
    if unlocked:
        fix = "Mount it with locks that hold across nodes (NFS: without nolock; Lustre: flock, not localflock)."
        yield CheckResult(_DIRECTORY, "locks of nodes", "warning", f"a lock of rank 0 is ignored on {unlocked}", fix)
    else:
        yield CheckResult(_DIRECTORY, "locks of nodes", "ok", "a lock of one node is respected on the others")


def _inspect_shared_file(directory: Path) -> tuple[bool, bool]:
    """Return whether the file of rank 0 is visible here, and whether its lock holds."""
    until = time.monotonic() + VISIBILITY_TIMEOUT_S
    while not (directory / "file").is_file():
        if time.monotonic() > until:
            return False, False
        time.sleep(0.1)
    try:
        with FileLock(directory / "lock", timeout=0):
            return True, False
    except (Timeout, OSError):
        return True, True


NUM_LOCAL_RANKS = 2  # Number of ranks that are started if there is no launcher


def check_machine(directory: Path | None) -> Iterator[CheckResult]:
    yield from check_versions()
    yield from check_plugins(get_registry())
    yield from check_devices()
    yield from check_limits()
    yield from check_settings(os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", detect_machine().num_ranks)))
    yield from check_backends()
    yield from check_clocks()
    if directory is not None:
        yield from check_directory(directory)


def check_local_ranks() -> Iterator[CheckResult]:
    """Run the checks on two new ranks on the CPU, and on two accelerators if there are two."""
    yield from _launch_rank_checks("cpu")
    if torch.accelerator.device_count() >= NUM_LOCAL_RANKS:
        yield from _launch_rank_checks(None)


def _launch_rank_checks(device: str | None) -> Iterator[CheckResult]:
    with tempfile.TemporaryDirectory(prefix="meshwright-") as scratch:
        result = Path(scratch) / "findings.json"
        code = launch_ranks(run_rank_checks, (str(result), None, device), nproc=NUM_LOCAL_RANKS)
        if code or not result.is_file():
            fix = (
                "See the output of the ranks above. Two processes of this machine must be able to connect over the "
                "loopback interface; GLOO_SOCKET_IFNAME=lo selects it."
            )
            yield make_failure(
                "ranks", "ranks", f"the checks of {NUM_LOCAL_RANKS} local ranks failed (exit code {code})", fix
            )
            return
        rows: list[dict[str, Any]] = json.loads(result.read_text(encoding="utf-8"))
    yield from (CheckResult(**row) for row in rows)


def check_launched_ranks(directory: Path | None) -> tuple[int, list[CheckResult]]:
    """Run all checks as a rank of a launcher; return the exit code and the findings. Collective."""
    found: list[CheckResult] = []
    return run_guarded(_run_launched_rank, (found, directory), timeout_s=RENDEZVOUS_TIMEOUT_S), found


def _run_launched_rank(store: dist.Store | None, results: list[CheckResult], directory: Path | None) -> None:
    with open_world(store=store, timeout_s=RENDEZVOUS_TIMEOUT_S) as world:
        own = list(check_machine(directory)) if world.rank == 0 else []
        own += check_ranks(world, directory)
        results += world.run_on_first_rank(lambda: own)
