"""A step of DPO with a vocabulary of 131,072 on two ranks of fsdp2: the objective by rows, and written by hand.

By hand: whole logits, their log_softmax, gather, and the formula. Both train equal models on equal batches, and their
losses must agree, or the exit code is 1. Measured are the peak of memory by tensors beyond what is held before the
step, the time, in turns and a changing order, and whether five steps run within a limit of the memory of each rank
(RLIMIT_DATA, beyond what it has when they begin). Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import llama, origin
from support.measurements import limit_memory, measure_memory
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from meshwright import Mesh, MeshSizes, RankError, count_tokens, open_world, optimizer_factory, resolve
from meshwright.base.types import Batch
from meshwright.strategy.contract import StrategyManager
from meshwright_objectives import DPO
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing import pool

VOCABULARY, FEATURES, SEQUENCES, LENGTH, PROMPT = 131_072, 64, 2, 512, 64
BETA, STEPS = 0.1, 5
KINDS = ("by rows", "by hand")

Step = Callable[[], float]


def step_of(kind: str) -> tuple[StrategyManager, Step]:
    """A model under fsdp2 on this rank, and a step of it that gives the loss over all ranks."""
    world = open_world("cpu")
    stack, degrees = resolve("fsdp2", MeshSizes(), world.size)
    manager = stack.build(Mesh(degrees, world))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(llama(FEATURES, 2, VOCABULARY, num_attention_heads=1))
    module = manager.parallelize(model)
    manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=1e-3)))
    batch, objective = _batch(manager.mesh.data_rank), DPO(beta=BETA)

    def by_rows() -> float:
        pairs = count_tokens([batch], manager.mesh, objective)
        loss = float(manager.forward_backward([batch], num_tokens=pairs, objective=objective))
        manager.optimizer_step()
        return loss

    def by_hand() -> float:
        logits = module(input_ids=batch["input_ids"], use_cache=False).logits
        loss = _dpo(logits, batch) / degrees.dp
        loss.backward()
        reported = loss.detach().clone()
        dist.all_reduce(reported)
        manager.optimizer_step()
        return float(reported)

    return manager, {"by rows": by_rows, "by hand": by_hand}[kind]


def _batch(data_rank: int) -> Batch:
    """One pair: chosen and rejected behind a common prompt, and what a reference has said of it."""
    generator = torch.Generator().manual_seed(data_rank)
    ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator)
    ids[:, :PROMPT] = ids[0, :PROMPT]
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    said = -11.8 + 0.1 * torch.randn(SEQUENCES, LENGTH, generator=generator)
    return {"input_ids": ids, "labels": labels, "reference_log_probs": said}


def _dpo(logits: Tensor, batch: Batch) -> Tensor:
    targets = batch["labels"][:, 1:]
    mask = targets != -100
    log_probs = logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    ratios = ((log_probs - batch["reference_log_probs"][:, :-1]) * mask).sum(1)
    return -F.logsigmoid(BETA * (ratios[0::2] - ratios[1::2])).sum()


def memory(kind: str) -> dict[str, Any]:
    """Of this rank: bytes at the peak of the second step beyond those before it, and the losses of both."""
    manager, step = step_of(kind)
    losses = [step()]
    held = [[*manager.model_parts], manager.optimizer]
    before = measure_memory(lambda: None, *held).after.total
    peak = measure_memory(lambda: losses.append(step()), *held).peak
    return {"peak_mib": (peak.total - before) / 2**20, "gradients_mib": peak.gradients / 2**20, "losses": losses}


def times(rounds: int) -> list[tuple[float, float]]:
    """Of this rank: time of a step by rows over that by hand, wall and CPU, for each round."""
    steps = {kind: step_of(kind)[1] for kind in KINDS}
    found = []
    for index in range(rounds + 1):
        seconds = {}
        for kind in KINDS[:: 1 if index % 2 else -1]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[kind]()
            seconds[kind] = (time.perf_counter() - wall, time.process_time() - cpu)
        (wall, cpu), (wall_by_hand, cpu_by_hand) = (seconds[kind] for kind in KINDS)
        found.append((wall / wall_by_hand, cpu / cpu_by_hand))
    return found[1:]


def within(kind: str, limit_mib: int) -> list[float]:
    """Of this rank: the losses of a few steps within a limit."""
    _, step = step_of(kind)
    with limit_memory(limit_mib * 2**20):
        return [step() for _ in range(STEPS)]


def reported_within(kind: str, limit_mib: int) -> str:
    """What becomes of steps within a limit."""
    pool(2).close()
    try:
        return f"{len(pool(2).run(within, kind, limit_mib)[0])} steps"
    except RankError as error:
        lines = [line for line in str(error).splitlines() if "memory" in line]
        return lines[-1].strip() if lines else f"failed otherwise: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limits-mib", type=int, nargs="*", default=[512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {kind: pool(2).run(memory, kind)[0] for kind in KINDS}
    peaks = {kind: found[kind]["peak_mib"] for kind in KINDS}
    print(", ".join(f"{kind}: {peak:.1f} MiB" for kind, peak in peaks.items()))
    limits = {limit: {kind: reported_within(kind, limit) for kind in KINDS} for limit in arguments.limits_mib}
    for limit, reported in limits.items():
        print(f"within {limit} MiB: {reported}")
    ratios = [statistics.median(each) for each in zip(*pool(2).run(times, arguments.rounds)[0], strict=True)]
    print(f"time by rows / by hand: wall {ratios[0]:.3f}, CPU {ratios[1]:.3f}")
    if arguments.json is not None:
        sizes = {"vocabulary": VOCABULARY, "features": FEATURES, "rows": SEQUENCES * LENGTH, "ranks": 2}
        times_of = {"rounds": arguments.rounds, "wall_ratio": ratios[0], "cpu_ratio": ratios[1]}
        report = {**origin(), **sizes, "memory": found, "within_mib": limits, **times_of}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    ours, theirs = (found[kind]["losses"] for kind in KINDS)
    return int(any(abs(one - other) > 1e-4 * abs(other) for one, other in zip(ours, theirs, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
