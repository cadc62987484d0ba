"""What the watchdog costs: a step while signs are given and read beside the same step while none are, alternated.

Both are `train_step` of the loop, whose phases the main thread writes down in either. On: the thread of `Heartbeat`
gives signs and reads those of the others, 10 times in `--watchdog` seconds. The default here, 2, is the least that a
run file may ask for, so that each step has some; from 20 on it does so every 2 s. The method is that of
`benchmarks/step.py`, whose README says how to read it.

    python benchmarks/watchdog.py --json benchmarks/results/watchdog-cpu.json
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import step as steps
import torch.distributed as dist
from contestants import Step, Work, built
from one_contest import compete

from meshwright.launch.store import connect_store
from meshwright.mesh.progress import HeartbeatRecord, Progress, TrainingPhase
from meshwright.mesh.world import World
from meshwright.tensors.ops import make_event_recorder
from meshwright.training.loop.step import Stopwatch, train_step
from meshwright_run.launch.hang_detection import read_heartbeats
from meshwright_run.launch.heartbeat import MIN_HEARTBEATS, Heartbeat, write_heartbeat

CALLS = 100_000
TIMEOUT_S = 600.0


class GatedPulse(Heartbeat):
    """A pulse that beats while it may, as often as it is reported, and hears no alarm: what is busy here may be
    slow."""

    def __init__(self, store: dist.Store, world: World, interval_s: float) -> None:
        super().__init__(
            store,
            world.rank,
            world.size,
            timeout_s=TIMEOUT_S,
            on_hang=print,
            watchdog_s=TIMEOUT_S,
            progress=world.progress,
        )
        self.interval_s, self.gate = interval_s, threading.Event()

    def _beat(self, count: int, elapsed_s: float) -> HeartbeatRecord:
        self.gate.wait()
        return super()._beat(count, elapsed_s)


@dataclass(frozen=True)
class Watched:
    """The contest; see `step.Contest`."""

    watchdog_s: float

    def by_hand(self, work: Work, world: World) -> Step:
        manager, loop = built("fsdp2", work, world)
        watch = Stopwatch(make_event_recorder(world.device), world.progress)

        def step(index: int) -> tuple[float, float]:
            result = train_step(manager, loop, index, None, watch)
            return result.loss, result.grad_norm

        return step

    def ours(self, work: Work, world: World) -> Step:
        plain = self.by_hand(work, world)
        store = dist.PrefixStore("pulse", connect_store())
        pulse = GatedPulse(store, world, self.watchdog_s / MIN_HEARTBEATS)
        pulse.start()

        def step(index: int) -> tuple[float, float]:
            pulse.gate.set()
            try:
                return plain(index)
            finally:
                pulse.gate.clear()

        return step


def call_cost() -> dict[str, float]:
    """Microseconds of a CPU for one phase and one microbatch of the main thread, and for one sign of the other, with
    the reading of one and the calls of a store of this machine, in a loop of nothing else."""
    progress, found = Progress(), {}
    progress.phase = TrainingPhase(1, 1, "data")
    store = dist.TCPStore("localhost", 0, 1, is_master=True)

    def sign() -> None:
        write_heartbeat(store, 0, 1, 1.0, progress)
        read_heartbeats(store, [0], [0])
        store.check(["alarm"])

    for name, calls, call in (
        ("phase", CALLS, lambda: progress.enter_phase("clip")),
        ("microbatch", CALLS, progress.tick),
        ("sign", CALLS // 100, sign),
    ):
        start = time.thread_time()
        for _ in range(calls):
            call()
        found[name] = round((time.thread_time() - start) / calls * 1e6, 2)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], add_help=False)
    parser.add_argument("--watchdog", type=float, default=2.0, help="seconds")
    parser.add_argument("--json", type=Path)
    options, others = parser.parse_known_args(arguments)

    def tell() -> dict[str, Any]:
        costs = call_cost()
        print("microseconds of one:", ", ".join(f"{key} {value}" for key, value in costs.items()))
        return {"watchdog_s": options.watchdog, "call_us": costs}

    return compete("watchdog", "watched", arguments, others, _run_rank, (options.watchdog,), options.json, tell)


def _run_rank(store: dist.Store, plan: Any, watchdog_s: float) -> None:
    steps.CONTESTS["watched"] = Watched(watchdog_s)  # type: ignore[assignment]
    steps.run_rank(store, plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
