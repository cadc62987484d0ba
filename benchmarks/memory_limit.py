"""Ten steps of a model with 131,072 entries on two ranks whose memory is limited: by rows, and with whole logits.

Each rank may have so many MiB of memory of its own (RLIMIT_DATA) beyond what it has when it begins. By rows the steps
are run, and the loss falls; with whole logits (loss_chunk_rows=0) they fail for want of memory. The exit code is 1 if
one of this is not so. Linux only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from common import llama, origin
from support.measurements import limit_memory
from transformers import AutoModelForCausalLM

from meshwright import Mesh, MeshSizes, RankError, count_tokens, open_world, optimizer_factory, resolve
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing import pool

VOCABULARY, FEATURES, SEQUENCES, LENGTH, STEPS = 131_072, 64, 2, 512, 10
OCCURRING = 64


def train(config: dict[str, Any], limit_mib: int) -> list[float]:
    """The losses of ten steps of fsdp2 on this rank, within the limit."""
    world = open_world("cpu")
    stack, degrees = resolve("fsdp2", MeshSizes(), world.size, config=config)
    manager = stack.build(Mesh(degrees, world))
    torch.manual_seed(0)
    manager.parallelize(AutoModelForCausalLM.from_config(llama(FEATURES, 2, VOCABULARY, num_attention_heads=1)))
    manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=1e-2)))
    losses = []
    with limit_memory(limit_mib * 2**20):
        for step in range(STEPS):
            torch.manual_seed(10 * step + manager.mesh.data_rank)
            # Of the whole vocabulary few ids occur, which can be learned in so few steps.
            ids = torch.randint(OCCURRING, (SEQUENCES, LENGTH)) * (VOCABULARY // OCCURRING)
            batches = [{"input_ids": ids, "labels": ids}]
            tokens = count_tokens(batches, manager.mesh)
            losses.append(float(manager.forward_backward(batches, num_tokens=tokens)))
            manager.clip_grad_norm(1.0)
            manager.optimizer_step()
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit-mib", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    losses = pool(2).run(train, {}, arguments.limit_mib)[0]
    print(f"by rows: {len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}")
    try:
        pool(2).run(train, {"loss_chunk_rows": 0}, arguments.limit_mib)
        reported = "trained"
    except RankError as error:
        lines = [line for line in str(error).splitlines() if "memory" in line]
        reported = lines[-1].strip() if lines else "failed otherwise"
    print(f"whole logits: {reported}")
    if arguments.json is not None:
        sizes = {"vocabulary": VOCABULARY, "features": FEATURES, "rows": SEQUENCES * LENGTH, "ranks": 2}
        report = {**origin(), **sizes, "limit_mib": arguments.limit_mib, "by_rows": losses, "whole_logits": reported}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(losses[-1] >= losses[0] - 1.0 or "memory" not in reported)


if __name__ == "__main__":
    sys.exit(main())
