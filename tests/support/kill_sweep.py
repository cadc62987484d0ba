"""Kill runs of `meshwright train` at random moments, and see that they end as one that nobody has killed.

    PYTHONPATH=tests python -m support.kill_sweep --kills 40 --seed 16 --json benchmarks/results/kill.json

Each layout trains a tiny model with dropout under a schedule with warm-up. Its runs are killed again and again, each
time started again by the same command, and at last left to end. Metrics and exported weights must then be those of a
run that was not killed, bit for bit. Short moments, such as while a checkpoint is deleted, are found by watching the
directory. Everything random follows from the seed, except for what the machine does meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from support.commands import copy_environment, write_run

from meshwright_run.metrics_report import NONDETERMINISTIC_FIELDS

STEPS = 24
TIMEOUT_S = 400.0
ZERO1 = {"engine": "bucketed", "use_distributed_optimizer": True, "overlap_grad_reduce": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2", "nproc": 2},
    "ddp, distributed optimizer": {"strategy": "ddp", "nproc": 2, "strategy_config": ZERO1},
    "megatron_fsdp": {"strategy": "megatron_fsdp", "nproc": 2},
    "pipeline over fsdp2": {"strategy": "fsdp2", "nproc": 4, "pp_size": 2},
    "fsdp2 x tp": {"strategy": "fsdp2", "nproc": 4, "tp_size": 2},
}  # Those of the sweep; more are in test_kill.py
MOMENTS = ("training", "writing", "deleting", "training", "starting", "writing", "exporting", "export command")
VICTIMS = ("rank", "parent", "all")


@dataclass
class KillRecord:
    """One kill, and what it met."""

    layout: str
    moment: str
    victim: str
    step: int = 0
    leftovers: list[str] = field(default_factory=list)
    exit_s: float = 0.0


@dataclass
class TrainingRun:
    """A run file and the directory that it writes."""

    file: Path
    directory: Path

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def count_steps(self) -> int:
        path = self.directory / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def read_metrics(self) -> list[dict[str, Any]]:
        """All that the metrics say, except for durations."""
        lines = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in NONDETERMINISTIC_FIELDS} for line in lines]

    def find_newest_checkpoint(self) -> Path:
        return max(path for path in self.checkpoints.iterdir() if path.name[-1].isdigit())


def short_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def make_run(workplace: Path, name: str, settings: dict[str, Any]) -> TrainingRun:
    """A run of one layout: dropout, warm-up and decay of rate and weights, checkpoints that replace each other."""
    if not (workplace / "run.yaml").exists():
        write_run(workplace)
    values = yaml.safe_load((workplace / "run.yaml").read_text())
    values["model"] |= {"attention_dropout": 0.2, "num_hidden_layers": 4}
    values.pop("strategy_config", None)
    values |= {"steps": STEPS, "sample": None, "eval": {"every": 7, "max_sequences": 4}}
    values |= {"checkpoint": {"every": 2, "keep_last": 2}, "schedule": {"name": "linear", "warmup_steps": 4}}
    values |= {"optimizer": {"lr": 3e-3, "weight_decay": 0.1}, "output_dir": str(workplace / name), **settings}
    path = workplace / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return TrainingRun(path, workplace / name)


class CommandProcess(subprocess.Popen[bytes]):
    """`meshwright` in a session of its own."""

    def __init__(self, *arguments: str) -> None:
        # A pipe that nobody reads would stop it.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        environment = copy_environment()
        options: Any = {"env": environment, "stdout": subprocess.DEVNULL, "start_new_session": True}
        super().__init__([sys.executable, "-m", "meshwright", *arguments], stderr=self._errors, **options)

    def check(self) -> None:
        """Raise AssertionError unless it has ended well."""
        if self.returncode != 0:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace")
            raise AssertionError(f"{self.args} left with {self.returncode}: {said[-3000:]}")


def run_to_end(*arguments: str) -> None:
    process = CommandProcess(*arguments)
    try:
        process.wait(TIMEOUT_S)
    finally:
        end_session(process)
    process.check()


def find_session_processes(process: subprocess.Popen[bytes]) -> dict[int, bytes]:
    """The living processes of a session, and their environments."""
    found = {}
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if path.name.isdigit() and os.getsid(int(path.name)) == process.pid and is_alive(int(path.name)):
                found[int(path.name)] = (path / "environ").read_bytes()
    return found


def find_ranks(process: subprocess.Popen[bytes]) -> list[int]:
    """The living ranks that `meshwright train` has started, in their order: those that its fork server has made."""
    living = find_session_processes(process)
    parents = {pid: int(stat[1]) for pid in living if (stat := read_stat(pid))}
    servers = {
        pid for pid, parent in parents.items() if parent == process.pid and b"forkserver" in read_command_line(pid)
    }
    return sorted(pid for pid, parent in parents.items() if parent in servers)


def read_stat(pid: int) -> list[str]:
    """State, parent and more of a process; nothing where it has gone."""
    return _read_proc(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    stat = read_stat(pid)
    return bool(stat) and stat[0] not in "ZX"


def read_command_line(pid: int) -> bytes:
    return _read_proc(pid, "cmdline")


def _read_proc(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def end_session(process: subprocess.Popen[bytes]) -> None:
    for pid in find_session_processes(process):
        os.kill(pid, signal.SIGKILL)


def kill_victim(process: subprocess.Popen[bytes], victim: str, dice: random.Random) -> None:
    ranks = find_ranks(process)
    if victim == "rank" and ranks:
        os.kill(dice.choice(ranks), signal.SIGKILL)
    elif victim == "parent":
        os.kill(process.pid, signal.SIGKILL)
    else:
        os.killpg(process.pid, signal.SIGKILL)


def wait_for_moment(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> bool:
    """Whether it came before the process ended."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        if condition():
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    end_session(process)
    raise AssertionError("the run neither got so far nor ended")


def build_moment_condition(run: TrainingRun, moment: str, step: int, dice: random.Random) -> Callable[[], bool]:
    """A function that says whether the moment has come."""
    if moment == "starting":
        started, wait = time.monotonic(), dice.uniform(0.5, 12.0)
        return lambda: time.monotonic() - started > wait
    if moment == "training":
        wait = dice.uniform(0.0, 0.1)
        return lambda: run.count_steps() >= step and time.sleep(wait) is None  # type: ignore[func-returns-value]
    if moment == "exporting":
        start = dice.choice(("model.checkpoint", "model.writing"))
        return lambda: any(path.name.startswith(start) for path in _list_directory(run.directory))
    if moment == "deleting":
        add_ballast(run)
    return lambda: any(
        path.name.endswith(f".{moment}") and _parse_step(path) >= step - 4 for path in _list_directory(run.checkpoints)
    )


def add_ballast(run: TrainingRun) -> None:
    """Give the checkpoints that are there more files, so that it takes a moment to delete them."""
    for path in _list_directory(run.checkpoints):
        if path.name[-1].isdigit():
            (path / "ballast").mkdir(exist_ok=True)
            for number in range(4000):
                (path / "ballast" / str(number)).touch()


def _list_directory(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _parse_step(path: Path) -> int:
    found = re.search(r"-(\d+)\.", path.name)
    return int(found[1]) if found else 0


def hash_weights(directory: Path) -> dict[str, str]:
    """Checksums of the weights of a Hugging Face directory."""
    files = sorted(directory.glob("*.safetensors"))
    assert files, f"{directory} holds no weights"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class SweptLayout:
    def __init__(self, workplace: Path, name: str, settings: dict[str, Any], dice: random.Random) -> None:
        self.workplace, self.name, self.rng = workplace, name, dice
        self._settings = settings
        self._count = 0
        whole = self._make_run("whole")
        run_to_end("train", str(whole.file))
        self._numbers, self._weights = whole.read_metrics(), hash_weights(whole.directory / "model")
        assert [each["step"] for each in self._numbers] == list(range(1, STEPS + 1))
        self.baseline = whole
        self.run = self._make_run()

    def _make_run(self, name: str | None = None) -> TrainingRun:
        self._count += 1
        return make_run(self.workplace, f"{short_name(self.name)}-{name or self._count}", self._settings)

    @property
    def num_runs(self) -> int:
        return self._count - 1

    def kill(self, moment: str, victim: str) -> KillRecord:
        """Kill once, at a moment that has surely come."""
        if moment == "export command":
            return self._kill_export()
        for _ in range(4):
            done = self.run.count_steps()
            if done > STEPS - 6 and moment != "exporting":
                self.finish_run()
                self.run, done = self._make_run(), 0
            if moment == "deleting" and done < 5:
                # There must be something to delete.
                self._kill("training", "all", 5)
                done = self.run.count_steps()
            found = self._kill(moment, victim, done + self.rng.randint(2, 4))
            if found is not None:
                return found
            self.compare()
            self.run = self._make_run()
        raise AssertionError(f"{self.name}: no run could be killed while {moment}")

    def _kill(self, moment: str, victim: str, at: int) -> KillRecord | None:
        has_come = build_moment_condition(self.run, moment, at, self.rng)
        process = CommandProcess("train", str(self.run.file))
        if not wait_for_moment(process, has_come):
            process.check()
            return None
        kill_victim(process, victim, self.rng)
        kill = KillRecord(self.name, moment, victim)
        kill.exit_s = self._wait_for_exit(process)
        kill.step, kill.leftovers = self.run.count_steps(), self._find_leftovers()
        return kill

    def _kill_export(self) -> KillRecord:
        source = str(self.baseline.find_newest_checkpoint())
        output = self.baseline.directory.with_name(f"{self.baseline.directory.name}-export")
        process = CommandProcess("export", source, str(output))
        came = wait_for_moment(
            process, lambda: any(p.name.startswith(output.name) for p in _list_directory(self.workplace))
        )
        assert came, "the export ended before it was seen"
        os.killpg(process.pid, signal.SIGKILL)
        kill = KillRecord(self.name, "export command", "all", STEPS)
        kill.exit_s = self._wait_for_exit(process)
        kill.leftovers = sorted(
            path.name for path in _list_directory(self.workplace) if path.name.startswith(output.name)
        )
        run_to_end("export", source, str(output))
        assert hash_weights(output) == self._weights, f"{self.name}: the export after a killed one differs"
        return kill

    def _wait_for_exit(self, process: subprocess.Popen[bytes]) -> float:
        started = time.monotonic()
        while find_session_processes(process):
            if time.monotonic() - started > TIMEOUT_S:
                end_session(process)
                raise AssertionError(f"{self.name}: processes are left after a kill")
            process.poll()
            time.sleep(0.05)
        process.wait()
        return round(time.monotonic() - started, 2)

    def _find_leftovers(self) -> list[str]:
        names = [path.name for path in _list_directory(self.run.checkpoints) if not path.name[-1].isdigit()]
        return sorted(
            names + [path.name for path in _list_directory(self.run.directory) if path.name.startswith("model")]
        )

    def finish_run(self) -> None:
        """Let the run end, and compare it."""
        run_to_end("train", str(self.run.file))
        self.compare()

    def compare(self) -> None:
        assert self.run.read_metrics() == self._numbers, f"{self.run.directory}: other metrics"
        assert hash_weights(self.run.directory / "model") == self._weights, f"{self.run.directory}: other weights"
        left = [name for name in self._find_leftovers() if name != "model"]
        assert not left, f"{self.run.directory}: {left} is left"


def run_sweep(workplace: Path, kills: int, seed: int, name: str) -> Iterator[tuple[KillRecord, int]]:
    """Each kill of a layout, and the number of runs that it has needed so far."""
    dice = random.Random(f"{seed} {name}")
    layout = SweptLayout(workplace, name, LAYOUTS[name], dice)
    victims = [*VICTIMS] * (kills // len(VICTIMS) + 1)
    dice.shuffle(victims)
    for number in range(kills):
        yield layout.kill(MOMENTS[number % len(MOMENTS)], victims[number]), layout.num_runs
    layout.finish_run()


def main() -> None:
    options = build_parser(__doc__, "--kills", 40, 16, LAYOUTS).parse_args()
    command = f"PYTHONPATH=tests python -m support.kill_sweep --kills {options.count} --seed {options.seed}"
    report = new_report(command, steps=STEPS, layouts={}, kills=[])
    with tempfile.TemporaryDirectory(prefix="meshwright-kill-") as workplace:
        for name, count in zip(options.chosen, split_evenly(options.count, len(options.chosen)), strict=True):
            found = report["layouts"][name] = {"runs": 0, "result": "not ended"}
            try:
                for kill, runs in run_sweep(Path(workplace), count, options.seed, name):
                    report["kills"].append(asdict(kill))
                    found["runs"] = runs
                    sys.stderr.write(f"{len(report['kills']):3} {kill}\n")
                    write_report(options.json, report)
                found["result"] = "metrics and weights of a run that was not killed, bit for bit"
            except AssertionError as error:
                found["result"] = f"failed: {error}"
            sys.stderr.write(f"{name}: {found['result']}\n")
            write_report(options.json, report)
    sys.exit(any(each["result"].startswith("failed") for each in report["layouts"].values()))


def new_report(command: str, **more: Any) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"command": command, "date": time.strftime("%Y-%m-%d"), "versions": versions, **more}


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n")


def build_parser(
    text: str | None, option: str, count: int, seed: int, choices: Iterable[str]
) -> argparse.ArgumentParser:
    """Options of a sweep: how many of what strike, a seed, a file for the results, and which are struck."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(option, type=int, default=count, dest="count")
    parser.add_argument("--seed", type=int, default=seed)
    parser.add_argument("--json", type=Path, help="file for the results")
    kind = "--layouts" if option == "--kills" else "--stacks"
    parser.add_argument(kind, nargs="+", choices=list(choices), default=list(choices), dest="chosen")
    return parser


def split_evenly(count: int, parts: int) -> list[int]:
    """A number divided into parts that differ by one at most."""
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]


if __name__ == "__main__":
    main()
