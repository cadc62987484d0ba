"""Save and export checkpoints: time, blocking time, bytes and memory, against torch's own calls in the same run.

A random Llama with AdamW state is sharded by fsdp2. Each round saves it four times, in an order that changes:

- ours: `Checkpointer(asynchronous=False)`: written, synced, checksummed, complete.
- ours, asynchronous: the time until training may continue.
- torch: `get_state_dict` and `torch.distributed.checkpoint.save`, which neither checksums nor renames.
- torch, asynchronous: `async_save` of the same, the time until training may continue.

Then the model is exported by all ranks together. Memory is anonymous memory (RssAnon) above what was held before, its
peak sampled every millisecond. Linux only.

    python benchmarks/checkpoint.py --json results.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import llama, origin
from memory import Peak
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoModelForCausalLM

from meshwright import Checkpointer, Mesh, MeshSizes, OptimizerConfig, optimizer_factory, resolve
from meshwright.checkpoint import export_checkpoint, list_steps
from meshwright.launch.open_world import open_world
from meshwright.mesh.world import World
from meshwright.strategy.contract import StrategyManager
from meshwright_run.launch.local import launch_ranks

OURS, OURS_ASYNC, TORCH, TORCH_ASYNC = CONTESTANTS = ("ours", "ours, asynchronous", "torch", "torch, asynchronous")
EXPORT_LIMIT_MB = 64
BLOCKING_LIMIT = 0.25


@dataclass(frozen=True)
class Plan:
    """What each rank is reported."""

    scratch: Path
    ranks: int
    rounds: int
    hidden: int
    layers: int
    vocab: int
    json: Path | None


def build(plan: Plan, world: World) -> StrategyManager:
    """A sharded model after one step, so that the optimizer has state."""
    stack, degrees = resolve("fsdp2", MeshSizes(), world.size)
    manager = stack.build(Mesh(degrees, world))
    config = llama(plan.hidden, plan.layers, plan.vocab)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    manager.parallelize(model)
    manager.build_optimizer(optimizer_factory(OptimizerConfig()))
    ids = torch.arange(8)[None]
    manager.forward_backward([{"input_ids": ids, "labels": ids}], num_tokens=torch.tensor(7 * world.size))
    manager.optimizer_step()
    return manager


def run_rank(store: dist.Store, plan: Plan) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    with open_world("cpu", store=dist.PrefixStore("world", store)) as world:
        manager = build(plan, world)
        group = dist.new_group(backend="gloo")
        synchronous = Checkpointer(manager, plan.scratch / "ours", keep_last=1, asynchronous=False)
        asynchronous = Checkpointer(manager, plan.scratch / "async", keep_last=1)

        def torch_state() -> dict[str, Any]:
            model, optimizer = get_state_dict(manager.model_parts[0], manager.optimizer)  # type: ignore[attr-defined]
            return {"model": model, "optimizer": optimizer}

        def torch_save() -> None:
            dcp.save(torch_state(), checkpoint_id=plan.scratch / "torch")

        def torch_async() -> Callable[[], object]:
            future = dcp.async_save(torch_state(), checkpoint_id=plan.scratch / "torch-async", process_group=group)
            return future.result  # type: ignore[union-attr, return-value]

        step = itertools.count(1)
        # Each returns what waits for the rest.
        contestants: dict[str, Callable[[], Callable[[], object] | None]] = {
            OURS: lambda: synchronous.save(next(step)),
            OURS_ASYNC: lambda: asynchronous.save(next(step)) or asynchronous.wait,
            TORCH: torch_save,
            TORCH_ASYNC: torch_async,
        }
        seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        orders = itertools.cycle(itertools.permutations(CONTESTANTS))
        for number, order in enumerate(itertools.islice(orders, 0, 24 * plan.rounds, 5)):
            if number > plan.rounds:
                break
            for name in order:
                dist.barrier()
                start = time.perf_counter()
                rest = contestants[name]()
                spent = time.perf_counter() - start
                if rest is not None:
                    rest()
                if number:  # the first round warms up
                    seconds[name].append(spent)
        synchronous.close()
        asynchronous.close()
        dist.barrier()  # until the first rank has removed older ones
        ((_, checkpoint),) = list_steps(plan.scratch / "ours")
        with Peak() as peak:
            start = time.perf_counter()
            export_checkpoint(checkpoint, plan.scratch / "exported", world=world)
            exporting = time.perf_counter() - start
        everyone: list[Any] = [None] * world.size
        dist.all_gather_object(everyone, (seconds, peak.growth, exporting))
        parameters = 0
        if world.rank == 0:
            parameters = sum(parameter.numel() for parameter in manager.model_parts[0].parameters())
    if world.rank == 0:
        report(plan, everyone, checkpoint, parameters)


def report(plan: Plan, everyone: list[Any], checkpoint: Path, parameters: int) -> None:
    state_mb = 3 * parameters * 4 / 1e6
    files = [path.stat().st_size / 1e6 for path in checkpoint.glob("tensors-*.bin")]
    seconds = {
        # The slowest rank's time.
        name: statistics.median(max(each) for each in zip(*(found[name] for found, _, _ in everyone), strict=True))
        for name in CONTESTANTS
    }
    blocking = seconds[OURS_ASYNC] / seconds[OURS]
    shard = parameters * 4 / 1e6 / plan.ranks
    growth = max(each for _, each, _ in everyone)
    found = {
        **origin(),
        "ranks": plan.ranks,
        "parameters": parameters,
        "rounds": plan.rounds,
        "seconds": seconds,
        "ours_over_torch": seconds[OURS] / seconds[TORCH],
        "blocking_share_of_synchronous": blocking,
        "state_mb": state_mb,
        "written_mb_by_rank": files,
        "written_over_state": sum(files) / state_mb,
        "most_over_least_written": max(files) / min(files),
        "export": {
            "seconds": max(each for _, _, each in everyone),
            "shard_mb": shard,
            "peak_extra_mb": growth,
            "beyond_shard_mb": growth - shard,
        },
    }
    print(json.dumps(found, indent=2))
    if plan.json is not None:
        plan.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    problems = []
    if blocking > BLOCKING_LIMIT:
        problems.append(f"an asynchronous save blocks {blocking:.2f} of a synchronous one, above {BLOCKING_LIMIT}")
    if growth - shard > EXPORT_LIMIT_MB:
        problems.append(f"export holds {growth - shard:.0f} MB beyond the shard, above {EXPORT_LIMIT_MB}")
    if problems:
        raise SystemExit("; ".join(problems))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="What do saving and exporting cost?")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s, after one to warm up")
    parser.add_argument("--hidden", type=int, default=1024, help="width, a multiple of 64 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=5, help="blocks (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=32000, help="default: %(default)s")
    parser.add_argument("--scratch", type=Path, help="where to write; a temporary directory otherwise")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(dir=options.scratch))
    try:
        plan = Plan(scratch, options.ranks, options.rounds, options.hidden, options.layers, options.vocab, options.json)
        return launch_ranks(run_rank, (plan,), nproc=plan.ranks)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
