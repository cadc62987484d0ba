"""Ten steps of a model with 131,072 entries on two ranks whose memory is limited: by rows, and with whole logits.

Each rank may have so many MiB of memory of its own (RLIMIT_DATA) beyond what it has when it begins. By rows the steps
are run; with whole logits (loss_chunk_rows=0) they are expected to fail for want of memory. The exit code is 1 if one
of this is not so. Linux only.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from common import llama, origin
from transformers import AutoModelForCausalLM

from meshwright import Mesh, MeshSizes, RankError, count_tokens, open_world, optimizer_factory, resolve
from meshwright.testing import pool
from meshwright.train.run_file import OptimizerConfig

VOCABULARY, FEATURES, SEQUENCES, LENGTH, STEPS = 131_072, 64, 2, 512, 10


def train(config: dict[str, Any], limit_mib: int) -> list[float]:
    """The losses of ten steps of fsdp2 on this rank, within the limit."""
    world = open_world("cpu")
    stack, degrees = resolve("fsdp2", MeshSizes(), world.size, config=config)
    manager = stack.build(Mesh(degrees, world))
    torch.manual_seed(0)
    manager.parallelize(AutoModelForCausalLM.from_config(llama(FEATURES, 2, VOCABULARY, num_attention_heads=1)))
    manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=1e-3)))
    used = next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("VmData:")
    )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used * 1024 + limit_mib * 2**20, before[1]))
    losses = []
    try:
        for step in range(STEPS):
            torch.manual_seed(10 * step + manager.mesh.data_rank)
            ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
            batches = [{"input_ids": ids, "labels": ids}]
            tokens = count_tokens(batches, manager.mesh)
            losses.append(float(manager.forward_backward(batches, num_tokens=tokens)))
            manager.clip_grad_norm(1.0)
            manager.optimizer_step()
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
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
        told = "trained"
    except RankError as error:
        lines = [line for line in str(error).splitlines() if "memory" in line]
        told = lines[-1].strip() if lines else "failed otherwise"
    print(f"whole logits: {told}")
    if arguments.json is not None:
        sizes = {"vocabulary": VOCABULARY, "features": FEATURES, "rows": SEQUENCES * LENGTH, "ranks": 2}
        report = {**origin(), **sizes, "limit_mib": arguments.limit_mib, "by_rows": losses, "whole_logits": told}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(len(losses) != STEPS or "memory" not in told)


if __name__ == "__main__":
    sys.exit(main())
