"""Load a pretrained model: memory and time of `meshwright.from_pretrained` against transformers' on every rank.

A random Llama is saved in shards to a temporary directory. Then each round loads it three times on all ranks, in an
order that changes, from the page cache:

- ours: `meshwright.from_pretrained(..., "fsdp2")`; each rank ends with its shards in memory.
- plain: `AutoModelForCausalLM.from_pretrained`; its weights are views of the mapped files, and nothing is read yet.
- plain, read: the same, and each weight copied to memory of its own, which the first optimizer step does anyway.

Memory is what the operating system calls anonymous (RssAnon; pages of mapped files can be dropped at will): the peak
while loading, sampled every millisecond, above what was held before. The directory's bytes divided by the ranks are
what a rank must hold. Linux only.

    python benchmarks/load.py --json results.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from common import llama, origin
from memory import Peak
from torch import nn
from transformers import AutoModelForCausalLM

import meshwright
from meshwright.launch.open_world import open_world
from meshwright.mesh.world import World
from meshwright_run.launch.local import launch_ranks

OURS, PLAIN, READ = CONTESTANTS = ("ours", "plain", "plain, read")
LIMIT_MB = 64
"""What a rank may hold beyond its shards."""


@dataclass(frozen=True)
class Plan:
    """What each rank is reported."""

    directory: Path
    tiny: Path
    ranks: int
    rounds: int
    megabytes: float
    json: Path | None


def ours(directory: Path, world: World) -> Any:
    return meshwright.from_pretrained(directory, "fsdp2", world=world)


def plain(directory: Path, world: World) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory)


def read(directory: Path, world: World) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(directory)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def run_rank(store: dist.Store, plan: Plan) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    contestants: dict[str, Callable[[Path, World], Any]] = {OURS: ours, PLAIN: plain, READ: read}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    memory: dict[str, list[float]] = {name: [] for name in contestants}
    with open_world("cpu", store=dist.PrefixStore("world", store)) as world:
        for load in contestants.values():
            load(plan.tiny, world)  # imports, and the first use of each collective
        orders = itertools.cycle(itertools.permutations(CONTESTANTS))
        for order in itertools.islice(orders, plan.rounds):
            for name in order:
                dist.barrier()
                with Peak() as peak:
                    start = time.perf_counter()
                    loaded = contestants[name](plan.directory, world)
                    dist.barrier()
                    seconds[name].append(time.perf_counter() - start)
                memory[name].append(peak.growth)
                del loaded
                gc.collect()
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, (seconds, memory))
    if world.rank == 0:
        report(plan, everyone)


def report(plan: Plan, everyone: list[Any]) -> None:
    shard = plan.megabytes / plan.ranks
    results = {
        name: {
            # The slowest rank's time; the rank that held most.
            "seconds": statistics.median(max(each) for each in zip(*(s[name] for s, _ in everyone), strict=True)),
            "peak_mb": max(value for _, memory in everyone for value in memory[name]),
        }
        for name in CONTESTANTS
    }
    print(f"{plan.megabytes:.0f} MB on {plan.ranks} ranks, {shard:.0f} MB each; median of {plan.rounds} rounds")
    for name, result in results.items():
        print(f"  {name:12} {result['seconds']:6.2f} s   peak of anonymous memory {result['peak_mb']:7.1f} MB")
    over = results[OURS]["peak_mb"] - shard
    print(f"ours holds {over:.1f} MB beyond its shard (limit {LIMIT_MB})")
    if plan.json is not None:
        found = {
            **origin(),
            "model_mb": plan.megabytes,
            "ranks": plan.ranks,
            "rounds": plan.rounds,
            "results": results,
            "beyond_shard_mb": over,
            "limit_mb": LIMIT_MB,
        }
        plan.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if over > LIMIT_MB:
        raise SystemExit(f"a rank holds {over:.1f} MB beyond its shard, more than {LIMIT_MB}")


def save(directory: Path, hidden: int, layers: int, vocab: int) -> float:
    """A random model in float32; gives its MB."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(hidden, layers, vocab), dtype=torch.float32)
    model.save_pretrained(directory, max_shard_size="100MB")
    return sum(parameter.nbytes for parameter in model.parameters()) / 1e6


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="What does loading a pretrained model cost?")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=6, help="default: %(default)s, one of each order")
    parser.add_argument("--hidden", type=int, default=1024, help="width, a multiple of 64 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=5, help="blocks (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=32000, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        directory, tiny = Path(scratch) / "model", Path(scratch) / "tiny"
        megabytes = save(directory, options.hidden, options.layers, options.vocab)
        save(tiny, 64, 1, 128)
        gc.collect()
        plan = Plan(directory, tiny, options.ranks, options.rounds, megabytes, options.json)
        return launch_ranks(run_rank, (plan,), nproc=plan.ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
