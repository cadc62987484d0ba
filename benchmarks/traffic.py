"""Count what one optimizer step of each sharding strategy sends, and time the steps in turns.

All contestants live in each rank, with equal weights and batches, and their losses and gradient norms must agree at
every step. The collectives of the second step are counted, exactly; the bytes of a call are those of the whole tensor
(`meshwright.tracing.collectives`). Then a round runs one step of each, in an order that changes, and the median over
rounds of each one's time / fsdp2's is reported: on a CPU it says what the strategies' own work costs, not how they
overlap with a GPU.

    python benchmarks/traffic.py --json results.json
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from contestants import Step, Work, meshwright_step
from rich.console import Console
from rich.table import Table
from step import TOLERANCE, Plan, about

from meshwright.launch.open_world import open_world
from meshwright.tracing.collectives import CollectiveTrace, record_collectives
from meshwright_run.launch.local import launch_ranks

CONTESTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp2": ("fsdp2", {}),
    "fsdp2, each microbatch": ("fsdp2", {"defer_fsdp_grad_sync": False}),
    "megatron_fsdp ZeRO 1": ("megatron_fsdp", {"zero_dp_strategy": 1}),
    "megatron_fsdp ZeRO 2": ("megatron_fsdp", {"zero_dp_strategy": 2}),
    "megatron_fsdp ZeRO 3": ("megatron_fsdp", {"zero_dp_strategy": 3}),
}
"""Strategy and options by name; the first is what the others are compared with."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def main(arguments: Sequence[str]) -> int:
    return launch_ranks(run_rank, (plan := parse(arguments),), nproc=plan.ranks)


def run_rank(store: dist.Store, plan: Plan) -> None:
    """What each rank does; the first one reports."""
    torch.set_num_threads(plan.threads or 1)
    with open_world(plan.device, store=dist.PrefixStore("world", store)) as world:
        steps = {
            name: meshwright_step(strategy, plan.work, world, config)
            for name, (strategy, config) in CONTESTANTS.items()
        }
        _check({name: step(0) for name, step in steps.items()}, 0)
        counted = {name: record_collectives(functools.partial(step, 1)) for name, step in steps.items()}
        seconds = _race(steps, plan, start=2)
        slowest = torch.from_numpy(seconds)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if world.rank == 0:
            report(counted, slowest.numpy(), plan)


def _check(values: dict[str, tuple[float, float]], index: int) -> None:
    """Raise SystemExit if losses or norms differ."""
    rows = np.array(list(values.values()))
    apart = np.abs(rows - rows[:1]) / np.abs(rows[:1])
    if not apart.max() <= TOLERANCE["float32"]:
        raise SystemExit(f"step {index}: loss and gradient norm differ: {values}")


def _race(steps: dict[str, Step], plan: Plan, start: int) -> np.ndarray:
    """Seconds by round and contestant."""
    names, shuffle = list(steps), random.Random(plan.work.seed).shuffle
    seconds = np.zeros((plan.warmup + plan.rounds, len(names)))
    gc.collect()
    gc.freeze()
    for index in range(len(seconds)):
        shuffle(order := list(range(len(names))))
        values = {}
        for column in order:
            gc.collect()
            dist.barrier()
            before = time.perf_counter()
            values[names[column]] = steps[names[column]](start + index)
            seconds[index, column] = time.perf_counter() - before
        _check(values, start + index)
    return seconds[plan.warmup :]


def report(counted: dict[str, CollectiveTrace], seconds: np.ndarray, plan: Plan) -> None:
    """Print a table, and write JSON where the plan says so."""
    ratios = np.median(seconds / seconds[:, :1], axis=0)
    elements = sum(p.numel() for p in plan.work.model().parameters())
    rows: dict[str, Any] = {}
    for (name, traffic), ratio, median in zip(counted.items(), ratios, np.median(seconds, axis=0), strict=True):
        large = CollectiveTrace(tuple(each for each in traffic if each.nbytes > 1024))
        rows[name] = {
            "collectives": {
                kind: {"calls": len(large.filter(kind)), "bytes": large.filter(kind).nbytes} for kind in KINDS
            },
            "small_collectives": len(traffic) - len(large),
            "median_step_s": round(float(median), 5),
            "time_to_fsdp2": round(float(ratio), 4),
        }
    table = Table(title=f"a step on {plan.ranks} ranks: calls, and bytes of the whole / bytes of the model")
    for heading in ("", *KINDS, "up to 1 KiB", "time / fsdp2"):
        table.add_column(heading)
    width = elements * getattr(torch, plan.work.dtype).itemsize
    for name, row in rows.items():
        cells = (f"{each['calls']}, {each['bytes'] / width:.2f}" for each in row["collectives"].values())
        table.add_row(name, *cells, str(row["small_collectives"]), f"{row['time_to_fsdp2']:.3f}")
    Console(soft_wrap=True, highlight=False).print(table)
    if plan.json is not None:
        whole = {**about(plan), "benchmark": "traffic", "model_bytes": width, "contestants": rows}
        plan.json.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str]) -> Plan:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that count (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="width, a multiple of 64 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=2, help="per rank and step (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    given = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
    given.pop("json", None)
    return Plan(
        strategies=tuple(CONTESTANTS),
        ranks=options.ranks,
        rounds=options.rounds,
        warmup=options.warmup,
        device="cpu",
        threads=1,
        work=Work(options.hidden, options.layers, options.seq, 2, options.microbatches, "float32"),
        json=options.json,
        command=" ".join(["python benchmarks/traffic.py", *(f"--{name} {value}" for name, value in given.items())]),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
