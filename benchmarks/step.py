"""Time one optimizer step of meshwright against the same step written by hand in torch.

Three contestants with equal weights live in each rank: the hand-written loop (raw A), ours, and the hand-written
loop once more (raw B). A round runs one step of each, in an order that changes, so that whatever else the machine
does falls on all alike. The median over rounds of ours / raw A is what our loop costs; that of raw B / raw A is
what a ratio of equals looks like in the same run: the noise. The same ratios of CPU time tell more where other
programs use the machine too: waiting does not count there. The losses must agree at every step.

    python benchmarks/step.py --strategies fsdp2,ddp --json results.json
    python benchmarks/step.py --strategies fsdp2 --tp 2 --ranks 4
    python benchmarks/step.py --strategies ddp-bucketed,ddp-zero1
    python benchmarks/step.py --strategies pipeline-gpipe,pipeline-1f1b,pipeline-interleaved1f1b --microbatches 8
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import origin
from contestants import CONTESTS as CONTESTS_OF_DATA
from contestants import Contest, Step, Work, meshwright_step
from peers import PEERS
from pipelines import SCHEDULES, options, pipeline_by_hand
from rich.console import Console
from rich.table import Table

from meshwright.launch.open_world import open_world
from meshwright.mesh.world import World
from meshwright_run.launch.local import launch_ranks

RAW_A, OURS, RAW_B = CONTESTANTS = ("raw A", "ours", "raw B")


@dataclass(frozen=True)
class PipelineContest:
    """torch's pipeline of a schedule, and ours."""

    schedule: str

    @property
    def by_hand(self) -> Callable[[Work, World], Step]:
        return pipeline_by_hand(self.schedule)

    def ours(self, work: Work, world: World) -> Step:
        return meshwright_step("pipeline", work, world, options(self.schedule, work, world.size))


CONTESTS: dict[str, Contest | PipelineContest] = {
    **CONTESTS_OF_DATA,
    **PEERS,
    **{f"pipeline-{name}": PipelineContest(name) for name in SCHEDULES},
}
TARGET = 0.02
"""How far above the noise our ratio may be."""

TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
"""Relative difference of loss and gradient norm between contestants; sums in another order drift apart slowly."""

RESAMPLES = 2000


@dataclass(frozen=True)
class Plan:
    """What each rank is reported."""

    strategies: tuple[str, ...]
    ranks: int
    rounds: int
    warmup: int
    device: str
    threads: int | None
    work: Work
    json: Path | None
    command: str


@dataclass(frozen=True)
class Race:
    """What was measured of one strategy; rows are rounds, columns are CONTESTANTS."""

    seconds: np.ndarray
    """The slowest rank's time of a step."""
    cpu_seconds: np.ndarray
    """CPU time of a step, over all threads of all ranks."""
    values: np.ndarray
    """(rounds, contestants, 2): loss and gradient norm, warm-up included."""


@dataclass(frozen=True)
class Estimate:
    """A median over rounds with its bootstrap interval of 95%."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def main(arguments: Sequence[str]) -> int:
    return launch_ranks(run_rank, (plan := parse(arguments),), nproc=plan.ranks)


def run_rank(store: dist.Store, plan: Plan) -> None:
    """What each rank does; the first one reports."""
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    console = Console(soft_wrap=True, highlight=False)
    summaries = {}
    with open_world(plan.device, store=dist.PrefixStore("world", store)) as world:
        for strategy in plan.strategies:
            if world.rank == 0:
                console.print(f"{strategy}: {plan.warmup} + {plan.rounds} rounds of three steps on {world.size} ranks")
            race = run_race(strategy, plan, world)
            disagreement = largest_disagreement(race)
            if disagreement > TOLERANCE[plan.work.dtype]:
                raise SystemExit(_unequal(strategy, race, disagreement))
            summaries[strategy] = {**summary(race, plan), "largest_relative_disagreement": disagreement}
    if world.rank == 0:
        console.print(as_table(summaries))
        if plan.json is not None:
            report = {**about(plan), "strategies": summaries}
            plan.json.write_text(json.dumps(report, indent=2, default=asdict) + "\n", encoding="utf-8")


def run_race(strategy: str, plan: Plan, world: World) -> Race:
    contestants: dict[str, Step] = {
        RAW_A: CONTESTS[strategy].by_hand(plan.work, world),
        OURS: CONTESTS[strategy].ours(plan.work, world),
        RAW_B: CONTESTS[strategy].by_hand(plan.work, world),
    }
    rounds = plan.warmup + plan.rounds
    seconds, cpu_seconds = np.zeros((2, rounds, len(CONTESTANTS)))
    values = np.zeros((rounds, len(CONTESTANTS), 2))
    # With what is there already out of its sight, a step pays for the collection of its own garbage only.
    gc.collect()
    gc.freeze()
    for index, order in enumerate(itertools.islice(orders(plan.work.seed), rounds)):
        for column in order:
            gc.collect()
            dist.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            values[index, column] = contestants[CONTESTANTS[column]](index)
            if world.device.type != "cpu":
                torch.accelerator.synchronize()
            seconds[index, column] = time.perf_counter() - start
            cpu_seconds[index, column] = time.process_time() - cpu_start
            dist.barrier()
    gc.unfreeze()
    return Race(
        seconds=_over_ranks(seconds, dist.ReduceOp.MAX, world)[plan.warmup :],
        cpu_seconds=_over_ranks(cpu_seconds, dist.ReduceOp.SUM, world)[plan.warmup :],
        values=values,
    )


def _over_ranks(numbers: np.ndarray, op: dist.ReduceOp.RedOpType, world: World) -> np.ndarray:
    reduced = torch.from_numpy(numbers).to(world.device)
    dist.all_reduce(reduced, op=op)
    return reduced.cpu().numpy()


def orders(seed: int) -> Iterator[tuple[int, ...]]:
    """Orders of the contestants, equal on all ranks; each six rounds hold every order once."""
    shuffle = random.Random(seed).shuffle
    while True:
        block = list(itertools.permutations(range(len(CONTESTANTS))))
        shuffle(block)
        yield from block


def largest_disagreement(race: Race) -> float:
    """Largest relative difference from raw A over all rounds; infinite where a value is not finite, or 0."""
    if not (np.isfinite(race.values) & (race.values != 0)).all():
        return float("inf")
    reference = race.values[:, :1]
    return float((np.abs(race.values - reference) / np.abs(reference)).max())


def _unequal(strategy: str, race: Race, disagreement: float) -> str:
    lines = [f"{strategy}: loss or gradient norm differ by {disagreement:.2g}, so the contestants do unequal work."]
    for index, row in enumerate(race.values[:10]):
        values = "  ".join(
            f"{name}: {loss:.7g} {norm:.7g}" for name, (loss, norm) in zip(CONTESTANTS, row, strict=True)
        )
        lines.append(f"  step {index + 1}  {values}")
    return "\n".join(lines)


def summary(race: Race, plan: Plan) -> dict[str, Any]:
    """Medians over rounds, with intervals from rounds drawn again with replacement."""
    drawn = np.random.default_rng(plan.work.seed).integers(plan.rounds, size=(RESAMPLES, plan.rounds))
    medians = np.median(race.seconds, axis=0)
    return {
        "median_step_s": {name: round(float(each), 5) for name, each in zip(CONTESTANTS, medians, strict=True)},
        "wall": _ratios(race.seconds, drawn),
        "cpu_time": _ratios(race.cpu_seconds, drawn),
    }


def _ratios(seconds: np.ndarray, drawn: np.ndarray) -> dict[str, Estimate]:
    raw_a, ours, raw_b = seconds.T
    ratios = {"ours_to_raw": ours / raw_a, "raw_to_raw": raw_b / raw_a}
    medians = {name: np.median(each) for name, each in ratios.items()}
    resampled = {name: np.median(each[drawn], axis=1) for name, each in ratios.items()}
    for each in (medians, resampled):
        each["above_noise"] = each["ours_to_raw"] - each["raw_to_raw"]
    return {name: _estimate(medians[name], resampled[name]) for name in medians}


def _estimate(median: float, resampled: np.ndarray) -> Estimate:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Estimate(*(round(float(value), 5) for value in (median, low, high)))


def as_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="one optimizer step: medians over rounds, with 95% intervals", title_justify="left")
    for heading in ("", *summaries):
        table.add_column(heading, justify="right" if heading else "left")
    for name in CONTESTANTS:
        table.add_row(f"{name} [ms]", *(f"{1000 * each['median_step_s'][name]:.1f}" for each in summaries.values()))
    rows = {"ours / raw A": "ours_to_raw", "raw B / raw A (noise)": "raw_to_raw", "above noise": "above_noise"}
    for clock in ("wall", "cpu_time"):
        table.add_section()
        for label, key in rows.items():
            prefix = "CPU: " if clock == "cpu_time" else ""
            table.add_row(prefix + label, *(str(each[clock][key]) for each in summaries.values()))
    table.add_section()
    verdicts = ("yes" if each["wall"]["above_noise"].median <= TARGET else "no" for each in summaries.values())
    table.add_row(f"<= {TARGET} above noise", *verdicts)
    return table


def about(plan: Plan) -> dict[str, Any]:
    """Where the numbers come from, and with which settings."""
    settings = {name: getattr(plan, name) for name in ("ranks", "rounds", "warmup", "device")}
    return {
        **origin(),
        "benchmark": "step",
        "command": plan.command,
        "settings": {**settings, "threads": torch.get_num_threads(), **asdict(plan.work)},
        "gpu": torch.cuda.get_device_name() if plan.device == "cuda" else None,
    }


def parse(arguments: Sequence[str]) -> Plan:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--strategies", default="fsdp2,ddp", help=f"out of {', '.join(CONTESTS)} (default: %(default)s)"
    )
    parser.add_argument("--ranks", type=_positive, help="default: one per accelerator, 2 on a CPU")
    parser.add_argument("--rounds", type=_positive, default=72, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=_positive, default=5, help="rounds before (default: %(default)s)")
    parser.add_argument("--hidden", type=_positive, default=256, help="width, a multiple of 64 (default: %(default)s)")
    parser.add_argument("--layers", type=_positive, default=4, help="blocks (default: %(default)s)")
    parser.add_argument("--seq", type=_positive, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--batch", type=_positive, default=2, help="sequences of a microbatch (default: %(default)s)")
    parser.add_argument("--microbatches", type=_positive, default=2, help="per rank and step (default: %(default)s)")
    parser.add_argument(
        "--tp", type=_positive, default=1, help="ranks of tensor parallelism, fsdp2 only (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the accelerator if there is one")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32", help="default: %(default)s")
    parser.add_argument("--threads", type=_positive, help="CPU threads of each rank (default: cores / ranks)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)

    strategies = tuple(options.strategies.split(","))
    if unknown := [name for name in strategies if name not in CONTESTS]:
        parser.error(f"no hand-written loop for {', '.join(unknown)}; there is one for {', '.join(CONTESTS)}")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    ranks = options.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    if options.tp > 1 and strategies != ("fsdp2",):
        parser.error(f"--tp {options.tp} needs --strategies fsdp2: the other loops have no tensor parallelism")
    if ranks % options.tp or (options.hidden // 64) % options.tp:
        parser.error(f"--tp {options.tp} must divide the {ranks} ranks and the {options.hidden // 64} attention heads")
    chunks = max(
        (SCHEDULES[name.partition("-")[2]][1] for name in strategies if name.startswith("pipeline-")), default=0
    )
    if chunks and options.layers % (chunks * ranks):
        parser.error(f"--layers {options.layers} is no multiple of the {chunks * ranks} stages")
    if options.hidden % 64:
        parser.error(f"--hidden {options.hidden} is not a multiple of 64, the width of an attention head")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: its directory does not exist")
    return Plan(
        strategies=strategies,
        ranks=ranks,
        rounds=options.rounds,
        warmup=options.warmup,
        device=device,
        threads=options.threads,
        work=Work(**{name.name: getattr(options, name.name) for name in fields(Work) if hasattr(options, name.name)}),
        json=options.json,
        command=_command(options, parser),
    )


def _command(options: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command line again, without defaults and without --json, whose path means nothing elsewhere."""
    given = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
    given.pop("json", None)
    return " ".join(["python benchmarks/step.py", *(f"--{name} {value}" for name, value in given.items())])


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
