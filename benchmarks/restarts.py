"""From the death of a rank to the next completed step, beside what torchrun alone takes on the same machine.

    python benchmarks/restarts.py --rounds 5 --json benchmarks/results/restarts.json

Two ranks train a tiny model, and one of them is killed again and again. Contestants take turns. "torchrun alone" is a
script of ten lines that adds up a tensor, and keeps nothing; with transformers it also imports what a model needs. It
gets TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its ranks read the addresses of those that have died, and may
not meet (torch 2.13). Seconds, median and worst; Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import yaml  # noqa: E402
from common import origin  # noqa: E402
from support.kill_sweep import TrainingRun, end_session, find_ranks, make_run  # noqa: E402
from support.launched_processes import TORCHRUN, build_clean_environment  # noqa: E402
from support.replication import find_agent_ranks  # noqa: E402

BARE = """
import sys, time
import torch, torch.distributed as dist
{more}
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1000))
    if dist.get_rank() == 0:
        with open(sys.argv[1], "a") as file:
            file.write(f"{{time.time()}}\\n")
    time.sleep(0.05)
"""
AGENT = (*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=999")
PATIENCE_S = 120.0


class Contestant:
    """A command with two ranks, one of which is killed.

    Args:
        command: what is started.
        done: when the last step was done, and which it was.
    """

    def __init__(self, command: list[str], done: Callable[[], tuple[float, int]], **environment: str) -> None:
        self._done = done
        nothing = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, env=build_clean_environment(**environment), stdout=nothing, stderr=nothing, start_new_session=True
        )

    def _ranks(self) -> list[int]:
        return find_ranks(self._process) or find_agent_ranks(self._process.pid)

    def run(self, rounds: int, dice: random.Random) -> list[float]:
        """Seconds from each death to the next completed step."""
        found = []
        try:
            for _ in range(rounds):
                self._await(self._done()[1] + 5, 0.0)
                time.sleep(dice.uniform(0.2, 0.7))
                victim, killed = dice.choice(self._ranks()), time.time()
                os.kill(victim, signal.SIGKILL)
                # What is done by then was under way.
                time.sleep(0.3)
                found.append(self._await(self._done()[1] + 1, killed + 0.3) - killed)
        finally:
            end_session(self._process)
            self._process.wait()
        return found

    def _await(self, step: int, since: float) -> float:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            moment, reached = self._done()
            if reached >= step and moment > since:
                return moment
            if self._process.poll() is not None:
                raise RuntimeError(f"{self._process.args} has ended with {self._process.returncode}")
            time.sleep(0.005)
        raise RuntimeError(f"{self._process.args} does not continue")


def bare(workplace: Path, name: str, more: str = "") -> Contestant:
    script, lines = workplace / f"{name}_alone.py", workplace / f"{name}.lines"
    script.write_text(BARE.format(more=more))
    lines.unlink(missing_ok=True)

    def done() -> tuple[float, int]:
        found = lines.read_text().split() if lines.is_file() else []
        return (float(found[-1]), len(found)) if found else (0.0, 0)

    return Contestant([*AGENT, str(script), str(lines)], done, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def ours(workplace: Path, name: str, *, copies: bool, torchrun: bool) -> Contestant:
    checkpoint: dict[str, Any] = (
        {"every": 100_000, "replicate": "neighbour"} if copies else {"every": 5, "keep_last": 2}
    )
    settings = {"strategy": "fsdp2", "nproc": 2, "max_restarts": 999, "steps": 200_000, "checkpoint": checkpoint}
    run = make_run(workplace, name, settings)
    values = yaml.safe_load(run.file.read_text()) | {"eval": {"every": None, "max_sequences": 4}}
    if torchrun:
        del values["max_restarts"], values["nproc"]
    run.file.write_text(yaml.safe_dump(values))
    main = ["-m", "meshwright", "train", str(run.file)]
    return Contestant([*AGENT, *main] if torchrun else [sys.executable, *main], lambda: _last(run))


def _last(run: TrainingRun) -> tuple[float, int]:
    path = run.directory / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.is_file() else ""
    if not whole:
        return 0.0, 0
    line = json.loads(whole.rpartition("\n")[2])
    return float(line["time"]), int(line["step"])


CONTESTANTS: dict[str, Callable[[Path], Contestant]] = {
    "torchrun alone": lambda place: bare(place, "alone"),
    "torchrun alone, transformers imported": lambda place: bare(
        place, "transformers", "import transformers.models.auto.modeling_auto"
    ),
    "meshwright train, from memory": lambda place: ours(place, "memory", copies=True, torchrun=False),
    "meshwright train, from disk": lambda place: ours(place, "disk", copies=False, torchrun=False),
    "torchrun, meshwright from memory": lambda place: ours(place, "memory-torchrun", copies=True, torchrun=True),
    "torchrun, meshwright from disk": lambda place: ours(place, "disk-torchrun", copies=False, torchrun=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deaths", type=int, default=3, help="in a round")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    dice, found = random.Random(24), {name: list[float]() for name in CONTESTANTS}
    load = os.getloadavg()[0]
    for number in range(options.rounds):
        for name, make in CONTESTANTS.items():
            with tempfile.TemporaryDirectory() as workplace:
                found[name] += make(Path(workplace)).run(options.deaths, dice)
        sys.stderr.write(f"round {number + 1} of {options.rounds}\n")
    report = {
        "command": f"python benchmarks/restarts.py --rounds {options.rounds}",
        **origin(),
        "load_before": round(load, 2),
        "seconds": {
            name: {
                "deaths": len(times),
                "median": round(statistics.median(times), 2),
                "worst": round(max(times), 2),
            }
            for name, times in found.items()
        },
    }
    sys.stderr.write(json.dumps(report, indent=1) + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
