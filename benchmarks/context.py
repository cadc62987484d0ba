"""Memory of context parallelism: n ranks on a sequence n times as long as one rank trains.

One rank under `single` takes a step on a sequence of `--length` tokens; then `--ranks` ranks, fsdp2 with cp_size of as
many, take one on a sequence so many times as long, once by all-gather and once by Ulysses. The model is the same, a
random Llama in float32. Each rank tells the peak of what its tensors hold (`tests/support/measurements.py`) and the
peak of its resident memory, above what it held before it had a model (VmHWM; Linux with glibc only). In a first step on
a few tokens, losses and gradient norms must be those of one rank.

The exit code is 1 if they are not, or if a rank's tensors need more for the long sequence than one rank for the short.

    python benchmarks/context.py --json results.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import llama, origin
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from meshwright.launch.open_world import open_world
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.sizes import MeshSizes
from meshwright.optim.build import optimizer_factory
from meshwright.step.handshake import count_tokens
from meshwright.strategy.stack import resolve
from meshwright_run.run_file import OptimizerConfig
from meshwright_testing.workers import pool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.measurements import measure_memory

WAYS = ("allgather", "ulysses")
FEW = 64


@dataclass(frozen=True)
class Model:
    """A Llama's sizes."""

    hidden: int
    layers: int
    vocab: int

    def build(self, length: int) -> nn.Module:
        """Random weights, the same on every rank."""
        config = llama(
            self.hidden,
            self.layers,
            self.vocab,
            intermediate_size=3 * self.hidden,
            num_attention_heads=self.hidden // 32,
            num_key_value_heads=max(1, self.hidden // 128),
            max_position_embeddings=length,
        )
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def run_rank(model: Model, length: int, strategy: str, config: dict[str, Any], cp_size: int) -> dict[str, float]:
    """A step on a few tokens, and one on a whole sequence, which is measured."""
    torch.set_num_threads(1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    world = open_world("cpu")
    stack, degrees = resolve(strategy, MeshSizes(cp_size=cp_size), world.size, config=config)
    manager = stack.build(Mesh(degrees, world))
    manager.parallelize(model.build(length))
    optimizer = manager.build_optimizer(optimizer_factory(OptimizerConfig(lr=1e-3)))
    ids = torch.randint(0, model.vocab, (1, length), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    seen: dict[str, float] = {}

    def step(batch: dict[str, Tensor], name: str) -> None:
        num_tokens = count_tokens([batch], manager.mesh)
        seen[f"{name}_loss"] = float(manager.forward_backward([batch], num_tokens=num_tokens))
        seen[f"{name}_norm"] = float(manager.clip_grad_norm(1.0))
        manager.optimizer_step()

    # The optimizer has its state afterwards.
    step({name: tensor[:, :FEW] for name, tensor in batch.items()}, "first")
    start = time.perf_counter()
    held = measure_memory(lambda: step(batch, "long"), manager.model_parts, optimizer).peak
    return {
        **seen,
        "seconds": time.perf_counter() - start,
        "tensors_mb": held.total / 1e6,
        "activations_mb": held.other / 1e6,
        "resident_mb": (_status("VmHWM") - before) / 1e3,
    }


def _status(key: str) -> int:
    """A line of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:")))


def measure(model: Model, length: int, ranks: int, config: dict[str, Any]) -> dict[str, float]:
    """The most that any rank needs."""
    strategy = "fsdp2" if ranks > 1 else "single"
    each = pool(ranks).run(run_rank, model, length, strategy, config, ranks, timeout_s=3000)
    return {key: max(found[key] for found in each) for key in each[0]}


def run(model: Model, length: int, ranks: int) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Results by what was run, and what is wrong with them."""
    results = {f"one rank, {length} tokens": measure(model, length, 1, {})}
    (alone,) = results.values()
    wrong = []
    for way in WAYS:
        config = {"cp_attention": way}
        long = results[f"{way}, {ranks} ranks, {ranks * length} tokens"] = measure(model, ranks * length, ranks, config)
        for key in ("first_loss", "first_norm"):
            if abs(long[key] - alone[key]) > 1e-4 * abs(alone[key]):
                wrong.append(f"{way}: {key} is {long[key]}, and {alone[key]} on one rank")
        if not long["tensors_mb"] <= alone["tensors_mb"]:
            wrong.append(f"{way}: {long['tensors_mb']:.1f} MB, and {alone['tensors_mb']:.1f} MB on one rank")
    return results, wrong


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="What memory does context parallelism save?")
    parser.add_argument("--ranks", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=8192, help="tokens for one rank (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="width, a multiple of 128 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="blocks (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=16384, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    model = Model(options.hidden, options.layers, options.vocab)
    results, wrong = run(model, options.length, options.ranks)
    print(f"{'':36}   tensors activations   resident      step      loss      norm")
    for name, found in results.items():
        sizes = " ".join(f"{found[f'{key}_mb']:7.1f} MB" for key in ("tensors", "activations", "resident"))
        print(f"{name:36} {sizes} {found['seconds']:7.1f} s  {found['long_loss']:.6f}  {found['long_norm']:.6f}")
    if options.json is not None:
        report = {
            **origin(),
            "model": asdict(model),
            "results": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for each in wrong:
        print(f"wrong: {each}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
