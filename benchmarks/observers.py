"""What watching a run costs: a step with everything on beside the same step with nothing, alternated.

Off: the manager's own calls, with no clock read, no record made and no observer called. On: `train_step` of the loop,
which times its parts and reads memory, and all observers of a run: the report with its line of JSON, the journal, the
file of the rank, the picture, and the trackers that are named. Norms by block and exposed communication are asked for
in few steps, and not here. The method is that of `benchmarks/step.py`, whose README says how to read it.

    python benchmarks/observers.py --trackers tensorboard --json benchmarks/results/observers-cpu.json
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import step as steps
import torch.distributed as dist
from contestants import MAX_GRAD_NORM, Step, Work, built
from one_contest import compete
from rich.console import Console

from meshwright.events.run import RunInfo
from meshwright.events.step import StepResult
from meshwright.mesh.world import World
from meshwright.step.handshake import count_tokens
from meshwright.strategy.contract import StrategyManager
from meshwright.strategy.registry import get_registry
from meshwright.tensors.ops import make_event_recorder
from meshwright.training.loop.step import Stopwatch, train_step
from meshwright_run.loss_curve import LossCurvePlotter
from meshwright_run.metrics_report import MetricsReporter
from meshwright_run.observers import attach_trackers, resolve_trackers
from meshwright_run.run_directory import RunDirectory
from meshwright_run.run_logs import EventLog, RankLog

CALLS = 2000
"""Records that observers get, to see what one costs by itself."""


@dataclass(frozen=True)
class ObserverContest:
    """The contest; see `step.Contest`."""

    trackers: tuple[str, ...]

    def by_hand(self, work: Work, world: World) -> Step:
        manager, loop = built("fsdp2", work, world)

        def step(index: int) -> tuple[float, float]:
            microbatches = loop.batches(index)  # type: ignore[operator]
            num_tokens = count_tokens(microbatches, manager.mesh)
            loss = manager.forward_backward(microbatches, num_tokens=num_tokens)
            norm = manager.clip_grad_norm(MAX_GRAD_NORM)
            loss_value, norm_value = manager.read_scalars(loss, norm)
            manager.optimizer_step()
            loop.scheduler.step()  # type: ignore[union-attr]
            return loss_value, norm_value

        return step

    def ours(self, work: Work, world: World) -> Step:
        manager, loop = built("fsdp2", work, world)
        watch = Stopwatch(make_event_recorder(world.device))
        directory = Path(world.run_on_first_rank(lambda: tempfile.mkdtemp()))
        observers = Observers(self.trackers, manager, directory)

        def step(index: int) -> tuple[float, float]:
            result = train_step(manager, loop, index, None, watch)
            observers.tell(replace(result, step=index + 1, num_steps=10**6))
            return result.loss, result.grad_norm

        return step


class Observers:
    """All observers of a run, which are there as long as the process is; the others' steps do not call them."""

    def __init__(self, trackers: Sequence[str], manager: StrategyManager, directory: Path) -> None:
        world, self._held = manager.mesh.world, ExitStack()
        run = RunInfo(
            id="0" * 32,
            name="observers",
            strategy=manager.strategy,
            mesh=str(manager.mesh.degrees),
            world_size=world.size,
            rank=world.rank,
            start_step=0,
            num_steps=10**6,
            num_parameters=None,
            device=world.device.type,
            directory=directory,
        )
        observing, paths = get_registry().observing, RunDirectory(directory)
        self._held.enter_context(observing(RankLog(paths.get_rank_log_path(world.rank))))
        if world.rank == 0:
            self._held.enter_context(attach_trackers(resolve_trackers(trackers), run))
            console = Console(file=io.StringIO(), force_terminal=True)
            reporter = self._held.enter_context(MetricsReporter(paths.metrics, log_every=10, console=console))
            curve = self._held.enter_context(LossCurvePlotter(paths.metrics, paths.loss_curve))
            self._held.enter_context(observing(reporter, curve, EventLog(paths.events)))
        get_registry().hook.on_run_start(run=run, mesh=manager.mesh)

    def close(self) -> None:
        self._held.close()

    def tell(self, result: StepResult) -> None:
        get_registry().hook.on_step_end(result=result)


def call_cost(trackers: Sequence[str]) -> dict[str, float]:
    """Microseconds of the host that one record costs the first rank, in a loop of nothing else."""
    from meshwright.launch.open_world import open_world
    from meshwright.training.loop.step import read_memory_usage

    found: dict[str, float] = {}
    with open_world("cpu") as world:
        manager, _ = built("fsdp2", Work(hidden=64, layers=1, seq=16, batch=1, microbatches=1, dtype="float32"), world)
        times = dict.fromkeys(("data", "forward_backward", "clip", "read", "optimizer"), 0.1)
        result = StepResult(1, CALLS, 2.0, 1.0, 0.1, 100, 0.5, 0, times=times, memory=read_memory_usage(world.device))
        for name, chosen_trackers in (("files", ()), *((each, (each,)) for each in trackers)):
            observers = Observers(chosen_trackers, manager, Path(tempfile.mkdtemp()))
            start = time.perf_counter()
            for number in range(CALLS):
                observers.tell(replace(result, step=number + 1))
            found[name] = round((time.perf_counter() - start) / CALLS * 1e6, 1)
            observers.close()
        start = time.perf_counter()
        for _ in range(CALLS):
            read_memory_usage(world.device)
        found["memory"] = round((time.perf_counter() - start) / CALLS * 1e6, 1)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], add_help=False)
    parser.add_argument("--trackers", default="", help="names, with commas between them")
    parser.add_argument("--json", type=Path)
    options, others = parser.parse_known_args(arguments)
    trackers = tuple(filter(None, options.trackers.split(",")))

    def tell() -> dict[str, Any]:
        costs = call_cost(trackers)
        reported = ", ".join(f"{key} {value}" for key, value in costs.items())
        print("microseconds of one record on the first rank:", reported)
        return {"record_us": costs}

    return compete("observers", "observers", arguments, others, _run_rank, (trackers,), options.json, tell)


def _run_rank(store: dist.Store, plan: Any, trackers: tuple[str, ...]) -> None:
    steps.CONTESTS["observers"] = ObserverContest(trackers)  # type: ignore[assignment]
    steps.run_rank(store, plan)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
