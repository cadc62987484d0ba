"""A chain of random faults under real runs, which must end as those that nothing has happened to, bit for bit.

    python tests/faults/fault_chain.py --faults 100 --seed 24 --json benchmarks/results/faults.json

Each stack trains a tiny model with dropout, under a schedule. Fault after fault strikes the same run; where its command
ends, the same command is started again, as a scheduler would. Two stacks or more span several nodes: network namespaces
with torchrun in each. Looked at are: losses, norms, rates and weights at the end; what is left of processes and files;
whether all checkpoints are whole; from where the run continues; and for how long ranks outlive a fault. Which faults
come, when, and to whom follows from the seed, except for what the machine does meanwhile. Needs Linux, root and
iproute2.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import yaml  # noqa: E402
from support import network_namespaces  # noqa: E402
from support.checkpoints import flip_file_bit  # noqa: E402
from support.kill_sweep import (  # noqa: E402
    LAYOUTS,
    TrainingRun,
    build_parser,
    find_ranks,
    hash_weights,
    is_alive,
    make_run,
    new_report,
    read_command_line,
    short_name,
    split_evenly,
    write_report,
)
from support.launched_processes import TORCHRUN, build_clean_environment, find_free_port  # noqa: E402
from support.replication import corrupt_copies, find_agent_ranks  # noqa: E402

from meshwright.checkpoint import list_steps, read_manifest  # noqa: E402
from meshwright.checkpoint.manifest import verify_files  # noqa: E402

WATCHDOG_S = 10.0
EXIT_SLACK_S = 5.0  # Beyond `watchdog_s`, until no rank is left that a fault has broken
WAIT_TIMEOUT_S = 240.0
UNPLUGGED_S, DISK_FULL_S = 5.0, 2.0
STEPS_PER_FAULT, STEPS_PER_FULL_DISK = 12, 150
OVERLAPPED = LAYOUTS["ddp, distributed optimizer"]["strategy_config"]
RENDEZVOUS = "keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=60"
"""Of torchrun's agents: a node that is silent for 5 s is gone."""
MARK = "MESHWRIGHT_TEST_CHAIN"
DISK_BYTES = 64 << 20  # Of the disk that is filled
RESUMED_FROM_MEMORY = re.compile(r"resuming from memory, after step (\d+)")
RESUMED_FROM_DISK = re.compile(r"resuming from \S+/step-(\d+), after step")
FAULT_KINDS = ("rank", "parent", "stop", "full disk", "bit on disk", "bit in memory", "bit in a copy", "pre-emption")
NODE_FAULT_KINDS = (
    "node",
    "agent",
    "cut",
    "cut for good",
)  # What only several nodes have; "parent" is the agent of one there


@dataclass(frozen=True)
class FaultedRun:
    """One way to train, and where."""

    settings: dict[str, Any]
    num_nodes: int = 1
    num_ranks: int = 2
    replicates_state: bool = False

    @property
    def fault_kinds(self) -> list[str]:
        kinds = [each for each in FAULT_KINDS if each != "bit in a copy" or self.replicates_state]
        if self.num_nodes > 1:
            kinds = [each for each in kinds if each != "parent"] + list(NODE_FAULT_KINDS)
        return kinds


STACKS: dict[str, FaultedRun] = {
    "fsdp2 x tp": FaultedRun({"strategy": "fsdp2", "tp_size": 2}, num_ranks=4, replicates_state=True),
    "megatron_fsdp": FaultedRun({"strategy": "megatron_fsdp"}),
    "ddp, distributed optimizer": FaultedRun(
        {"strategy": "ddp", "strategy_config": OVERLAPPED}, num_nodes=2, replicates_state=True
    ),
    "pipeline over fsdp2": FaultedRun({"strategy": "fsdp2", "pp_size": 2}, num_nodes=2, num_ranks=4),
    "fsdp2": FaultedRun({"strategy": "fsdp2", "batch_size": 6}, num_nodes=3, num_ranks=3, replicates_state=True),
}


@dataclass
class FaultRecord:
    """A fault, and what came of it."""

    stack: str
    kind: str
    step: int = 0
    resumed_from: str = ""
    resumed_step: int | None = None
    exit_s: float | None = None
    recovery_s: float = 0.0
    is_restarted: bool = False
    target: str = ""


def draw_fault_kinds(stack: FaultedRun, faults: int, rng: random.Random) -> list[str]:
    """Each kind as often as any other, in random order."""
    kinds: list[str] = []
    while len(kinds) < faults:
        more = list(stack.fault_kinds)
        rng.shuffle(more)
        kinds += more
    return kinds[:faults]


class RecoveryError(AssertionError):
    """A run did not survive a fault as it should."""


def find_marked_processes(mark: str) -> dict[int, list[bytes]]:
    """The living processes that have been started with a mark in their environment, and their command lines."""
    found, wanted = {}, f"{MARK}={mark}".encode()
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if not path.name.isdigit() or wanted not in (path / "environ").read_bytes().split(b"\0"):
                continue
            if is_alive(pid := int(path.name)):
                found[pid] = read_command_line(pid).split(b"\0")
    return found


def kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], Any], timeout_s: float = WAIT_TIMEOUT_S, interval_s: float = 0.02) -> float:
    """Seconds until something has come. Broken: it does not."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise RecoveryError(f"not within {timeout_s:g} s")
        time.sleep(interval_s)
    return time.monotonic() - began


class ScheduledJob:
    """What a scheduler does for a run: gives its command on all nodes, and again where it has ended too soon."""

    def __init__(self, run: TrainingRun, stack: FaultedRun, nodes: Sequence[network_namespaces.NamespaceNode]) -> None:
        self.run, self.stack, self.nodes = run, stack, nodes
        self.mark = uuid.uuid4().hex
        self.flip_file = run.file.with_suffix(".flip")
        self.commands: list[subprocess.Popen[bytes]] = []
        self.num_attempts = 0

    @property
    def _outputs(self) -> list[Path]:
        return sorted(self.run.file.parent.glob(f"{self.run.file.stem}.said.*"))

    def read_output(self, offsets: Mapping[Path, int] | None = None) -> str:
        """What all commands have said, or what they have since they had said so much."""
        texts = {path: path.read_bytes()[(offsets or {}).get(path, 0) :] for path in self._outputs}
        return b"".join(texts.values()).decode(errors="replace")

    def output_sizes(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in self._outputs}

    def start(self) -> None:
        self.num_attempts += 1
        main = ("-c", "import bit_flip_target; bit_flip_target.main()", str(self.run.file), str(self.flip_file))
        environment = build_clean_environment(**{MARK: self.mark, "PYTHONPATH": str(HERE)})
        if not self.nodes:
            commands = [[sys.executable, *main]]
        else:
            environment["GLOO_SOCKET_IFNAME"] = network_namespaces.INTERFACE
            # Agents that meet so start over together; with `--master-addr` each would by itself.
            meet = f"--rdzv-endpoint={self.nodes[0].address}:{find_free_port()}"
            size = f"--nproc-per-node={self.stack.num_ranks // len(self.nodes)}"
            script = (str(HERE / "bit_flip_target.py"), *main[2:])
            commands = [
                node.command(
                    *(*TORCHRUN, f"--nnodes={len(self.nodes)}", size, "--max-restarts=99", "--rdzv-backend=c10d", meet),
                    *(f"--rdzv-id={self.mark}", f"--rdzv-conf={RENDEZVOUS},is_host={int(number == 0)}"),
                    *(f"--local-addr={node.address}", *script),
                )
                for number, node in enumerate(self.nodes)
            ]
        self.commands = []
        options: Any = {"env": environment, "stderr": subprocess.STDOUT, "start_new_session": True, "cwd": HERE}
        for number, command in enumerate(commands):
            with self.run.file.with_suffix(f".said.{self.num_attempts:03}.{number}").open("wb") as output:
                self.commands.append(subprocess.Popen(command, stdout=output, **options))

    def find_ranks(self) -> list[int]:
        """The living ranks, in the order in which they were started."""
        if not self.nodes:
            return find_ranks(self.commands[0])
        return [
            pid for each in self.commands if each.poll() is None for pid in find_agent_ranks(each.pid) if is_alive(pid)
        ]

    def find_replica_servers(self) -> list[int]:
        return [
            pid
            for pid, command in find_marked_processes(self.mark).items()
            if b"meshwright_replicate.server" in command
        ]

    def has_ended(self) -> bool:
        return any(each.poll() is not None for each in self.commands)

    def has_succeeded(self) -> bool:
        return all(each.poll() == 0 for each in self.commands)

    def stop(self) -> None:
        """What a scheduler does when one node has failed: SIGTERM to what is left, and SIGKILL later."""
        for each in self.commands:
            if each.poll() is None:
                each.terminate()
        with suppress(RecoveryError):
            wait_until(lambda: all(each.poll() is not None for each in self.commands), 15)
        for each in self.commands:
            if each.poll() is None:
                each.kill()
                each.wait()
        with suppress(RecoveryError):
            wait_until(lambda: not find_marked_processes(self.mark), EXIT_SLACK_S)
        if left := self.kill_all():
            raise RecoveryError(f"processes outlive what has started them: {left}")

    def kill_all(self) -> dict[int, list[bytes]]:
        """Kill all processes of the run; return those that were left."""
        left = find_marked_processes(self.mark)
        kill_all(left)
        for each in self.commands:
            each.wait()
        return left


def fill_disk(directory: Path) -> Path:
    """Fill a disk to its last byte; the file that has it."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    with ballast.open("ab", buffering=0) as file, suppress(OSError):
        while file.write(bytes(512)):
            pass
    return ballast


class FaultChain:
    """All faults of a stack."""

    def __init__(self, workplace: Path, name: str, stack: FaultedRun, faults: int, rng: random.Random) -> None:
        self.name, self.stack, self.rng = name, stack, rng
        self._kinds = draw_fault_kinds(stack, faults, rng)
        steps = STEPS_PER_FAULT * faults + STEPS_PER_FULL_DISK * self._kinds.count("full disk") + 12
        short = short_name(name)
        settings = stack.settings | {"nproc": stack.num_ranks, "steps": steps, "watchdog_s": WATCHDOG_S}
        settings |= {"verify_every": 3, "max_restarts": 1000, "timeout_s": 60}
        self.baseline = make_run(workplace, f"{short}-whole", settings)
        checkpoint: dict[str, Any] = {"every": 4, "keep_last": 3, "on_error": "continue"}
        if stack.replicates_state:
            checkpoint |= {"replicate": "neighbor", "every": 25}
        self.disk = workplace / f"{short}-disk"
        self.run = make_run(workplace, f"{short}-struck", settings | {"checkpoint": checkpoint})
        # On a disk of its own, which can be filled.
        values = yaml.safe_load(self.run.file.read_text()) | {"output_dir": str(self.disk / "run")}
        self.run = TrainingRun(self.run.file, self.disk / "run")
        for made, more in ((self.baseline, yaml.safe_load(self.baseline.file.read_text())), (self.run, values)):
            more["model"]["num_hidden_layers"] = 2
            if stack.num_nodes > 1 and made is self.run:
                del more["nproc"], more["max_restarts"]
            made.file.write_text(yaml.safe_dump(more))

    def iter_faults(self) -> Iterator[FaultRecord]:
        """Each fault. Broken: the run does not survive one."""
        self._train_baseline()
        with (
            self._mount_disk(),
            network_namespaces.create_nodes(self.stack.num_nodes)
            if self.stack.num_nodes > 1
            else nullcontext(()) as nodes,
        ):
            job = self.job = ScheduledJob(self.run, self.stack, nodes)
            try:
                job.start()
                for kind in self._kinds:
                    yield self._inject_fault(kind)
                self._wait_for_end()
            except Exception as error:
                raise RecoveryError(f"{self.name}: {error}\n{job.read_output()[-6000:]}") from error
            finally:
                job.kill_all()
            self._compare()

    def _train_baseline(self) -> None:
        job = ScheduledJob(self.baseline, replace(self.stack, num_nodes=1), ())
        try:
            job.start()
            wait_until(job.has_ended)
        finally:
            job.kill_all()
        if not job.has_succeeded():
            raise RecoveryError(f"{self.name}: the run that nothing happens to: {job.read_output()[-3000:]}")

    @contextmanager
    def _mount_disk(self) -> Iterator[None]:
        self.disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.disk)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(self.disk)], check=False)

    # -- one fault

    def _inject_fault(self, kind: str) -> FaultRecord:
        job, run, dice = self.job, self.run, self.rng
        self._wait_for_step(run.count_steps() + dice.randint(2, 4))
        time.sleep(dice.uniform(0.0, 0.3))
        self.place = ""
        ranks, attempt, spoken = job.find_ranks(), job.num_attempts, job.output_sizes()
        if len(ranks) != self.stack.num_ranks:
            raise RecoveryError(f"{len(ranks)} ranks, not {self.stack.num_ranks}")
        struck = FaultRecord(self.name, kind)
        struck.step, saved = self._find_last_step(), self._find_saved_steps()
        began = time.time()
        lives_on = self._apply_fault(kind, ranks)
        if not lives_on:
            gone = wait_until(lambda: not any(map(is_alive, ranks)), WATCHDOG_S + EXIT_SLACK_S)
            struck.exit_s = round(gone, 2)
            # Until it was found, or met the others, the run may have done more.
            struck.step = self._find_last_step()
        if kind == "cut for good":
            for node in job.nodes:
                node.plug()
        since = time.time()
        self._wait_for_step(struck.step + 1, since)
        struck.recovery_s = round(self._find_step_time(struck.step + 1, since) - began, 2)
        struck.is_restarted = job.num_attempts > attempt
        reported = job.read_output(spoken)
        self._check_output(kind, reported)
        if lives_on:
            struck.resumed_from = "on"
            if not set(ranks) <= set(job.find_ranks()):
                raise RecoveryError("ranks were ended by what they can live through")
            return struck
        memory, disk = RESUMED_FROM_MEMORY.findall(reported), RESUMED_FROM_DISK.findall(reported)
        struck.target = self.place
        struck.resumed_from = "memory" if memory else "disk" if disk else "the beginning"
        struck.resumed_step = int((memory or disk or [0])[-1])
        whole = max((step for step in saved if not self.place.endswith(f"-{step:08d}")), default=0)
        if struck.resumed_step < whole:
            raise RecoveryError(f"continued after step {struck.resumed_step}, though {whole} was on disk")
        return struck

    def _apply_fault(self, kind: str, ranks: list[int]) -> bool:
        """Strike; whether all ranks are to live on."""
        job, dice = self.job, self.rng
        if kind in ("rank", "stop"):
            os.kill(dice.choice(ranks), signal.SIGKILL if kind == "rank" else signal.SIGSTOP)
        elif kind in ("parent", "agent"):
            os.kill(dice.choice(job.commands).pid, signal.SIGKILL)
        elif kind == "pre-emption":
            for each in job.commands:
                each.terminate()
        elif kind == "full disk":
            # Steps continue, and checkpoints that are due cannot be written, nor can metrics.
            ballast = fill_disk(self.disk)
            time.sleep(DISK_FULL_S)
            ballast.unlink()
            return True
        elif kind == "bit on disk":
            # Where it is the only one, nothing is left to resume from; the run says so, and awaits a copy of it.
            if len(self._find_saved_steps()) > 1:
                newest = list_steps(self.run.checkpoints)[0][1]
                struck = dice.choice(sorted(newest.glob("tensors-*")))
                flip_file_bit(struck, 8 * dice.randrange(struck.stat().st_size) + dice.randrange(8))
                self.place = newest.name
            kill_all((*[each.pid for each in job.commands], *job.find_replica_servers()))
        elif kind == "bit in memory":
            self._flip_bit()
        elif kind == "bit in a copy":
            for keeper in job.find_replica_servers():
                with suppress(OSError):
                    # What is release meanwhile needs none.
                    corrupt_copies(keeper)
            os.kill(dice.choice(ranks), signal.SIGKILL)
        elif kind == "node":
            kill_all(dice.choice(job.nodes).find_pids())
        elif kind == "cut":
            cut = dice.choice(job.nodes)
            cut.unplug()
            time.sleep(UNPLUGGED_S)
            cut.plug()
            return True
        elif kind == "cut for good":
            dice.choice(job.nodes).unplug()
        return False

    def _flip_bit(self) -> None:
        places = ("parameter", "optimizer", "gradient")
        self.place = f"{self.rng.randrange(self.stack.num_ranks)} {self.rng.choice(places)}"
        draft = self.job.flip_file.with_suffix(".draft")
        draft.write_text(self.place)
        draft.rename(self.job.flip_file)
        wait_until(lambda: not self.job.flip_file.exists(), 30)

    def _check_output(self, kind: str, output: str) -> None:
        if "Traceback" in output and not self.job.nodes:
            raise RecoveryError("a traceback where an error should be")
        if kind == "stop" and "hangs" not in output:
            raise RecoveryError("who hangs was not named")
        if kind == "bit in memory" and f"rank {self.place.split()[0]} on " not in output:
            raise RecoveryError(f"the rank whose bit has flipped ({self.place}) was not named")

    def _wait_for_step(self, step: int, since: float = 0.0) -> None:
        """Wait until a step is done, and begin the run again where its command has ended."""
        wait_until(lambda: self._restart_if_ended() or self._find_step_time(step, since) > 0)

    def _restart_if_ended(self) -> None:
        job = self.job
        if not job.has_ended():
            return
        if job.has_succeeded():
            raise RecoveryError("it has ended before its faults have")
        if job.nodes:
            # All ranks of the others are reported, and end; their agents wait for a node that does not come.
            wait_until(lambda: not job.find_ranks(), WATCHDOG_S + EXIT_SLACK_S)
        job.stop()
        job.start()

    def _wait_for_end(self) -> None:
        def look() -> bool:
            if all(each.poll() == 0 for each in self.job.commands):
                return True
            if any(each.poll() for each in self.job.commands):
                self._restart_if_ended()
            return False

        wait_until(look)
        wait_until(lambda: not find_marked_processes(self.job.mark), EXIT_SLACK_S)

    def _read_metrics(self) -> list[dict[str, Any]]:
        found = []
        with suppress(OSError):
            for line in (self.run.directory / "metrics.jsonl").read_text().splitlines():
                with suppress(ValueError):
                    found.append(json.loads(line))
        return found

    def _find_last_step(self) -> int:
        return max((int(line["step"]) for line in self._read_metrics()), default=0)

    def _find_step_time(self, step: int, since: float) -> float:
        return next(
            (each["time"] for each in self._read_metrics() if each["step"] >= step and each["time"] > since), 0.0
        )

    def _find_saved_steps(self) -> list[int]:
        return [step for step, _ in list_steps(self.run.checkpoints)] if self.run.checkpoints.is_dir() else []

    # -- the end

    def _compare(self) -> None:
        struck, whole = self.run.read_metrics(), self.baseline.read_metrics()
        if differing := [pair for pair in zip(struck, whole, strict=True) if pair[0] != pair[1]]:
            raise RecoveryError(f"{self.name}: other metrics: {differing[0]}")
        if hash_weights(self.run.directory / "model") != hash_weights(self.baseline.directory / "model"):
            raise RecoveryError(f"{self.name}: other weights")
        for _, place in list_steps(self.run.checkpoints):
            manifest = read_manifest(place)
            verify_files(place, manifest, [*manifest.files])
        # What a run does not resume from, since it was altered, it moves aside, and says so.
        beside = [path for path in self.run.checkpoints.iterdir() if not path.name[-1].isdigit()]
        beside += [path for path in self.run.directory.iterdir() if path.name.startswith("model.")]
        if beside:
            raise RecoveryError(f"{self.name}: {[path.name for path in beside]} are left")


def summarize_recovery(records: Sequence[FaultRecord]) -> dict[str, Any]:
    """Median and worst of the seconds until the next completed step, by what the run resumed from."""
    found: dict[str, Any] = {}
    for where in ("memory", "disk", "the beginning", "on"):
        for again in (False, True):
            times = [each.recovery_s for each in records if each.resumed_from == where and each.is_restarted == again]
            if times:
                name = f"{where}{', by a new command' if again else ''}"
                found[name] = {"faults": len(times), "median_s": statistics.median(times), "worst_s": max(times)}
    return found


def main() -> None:
    parser = build_parser(__doc__, "--faults", 100, 24, STACKS)
    parser.add_argument("--keep", type=Path, help="directory for the runs, which stay there")
    options = parser.parse_args()
    if reason := find_missing_requirement():
        sys.exit(reason)
    command = f"python tests/faults/fault_chain.py --faults {options.count} --seed {options.seed}"
    report = new_report(command, watchdog_s=WATCHDOG_S, stacks={}, faults=[])
    every: list[FaultRecord] = []
    temporary = partial(tempfile.TemporaryDirectory, prefix="meshwright-faults-")
    with nullcontext(options.keep) if options.keep else temporary() as workplace:
        for name, faults in zip(options.chosen, split_evenly(options.count, len(options.chosen)), strict=True):
            result = "metrics and weights of a run that nothing has happened to, bit for bit"
            try:
                for struck in run_chain(Path(workplace), name, faults, options.seed):
                    every.append(struck)
                    sys.stderr.write(f"{len(every):3} {struck}\n")
            except RecoveryError as broken:
                result = f"failed: {broken}"
            sys.stderr.write(f"{name}: {result}\n")
            report["stacks"][name] = result
            report["faults"] = [asdict(each) for each in every]
            report["times"] = summarize_recovery(every)
            write_report(options.json, report)
    sys.stderr.write(f"{json.dumps(report['times'], indent=1)}\n")
    sys.exit(any(each.startswith("failed") for each in report["stacks"].values()))


def run_chain(workplace: Path, name: str, faults: int, seed: int) -> Iterator[FaultRecord]:
    """The faults of one stack; see `FaultChain.iter_faults`."""
    return FaultChain(workplace, name, STACKS[name], faults, _build_rng(name, seed)).iter_faults()


def draw_kinds(name: str, faults: int, seed: int) -> list[str]:
    """The kinds of faults that `chain` does with these arguments."""
    return draw_fault_kinds(STACKS[name], faults, _build_rng(name, seed))


def _build_rng(name: str, seed: int) -> random.Random:
    return random.Random(f"{seed} {name}")


def find_missing_requirement() -> str:
    """Why there can be no chain here; empty if there can."""
    with tempfile.TemporaryDirectory() as place:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], capture_output=True, check=False)
        if mounted.returncode:
            return f"no disk of its own can be mounted: {mounted.stderr.decode().strip()}"
        subprocess.run(["umount", place], check=True)
    return network_namespaces.find_missing_requirement()


if __name__ == "__main__":
    main()
