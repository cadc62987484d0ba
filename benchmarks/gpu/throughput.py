"""Throughput of an 8B-shaped Llama on one GPU in bf16: ours, and the same by hand.

    python benchmarks/gpu/throughput.py --out throughput.json --mode selective --compiled --seq 8192

Contestants run one at a time, each in a process of its own and so alone on the card, with expandable segments: by hand
with whole logits, by hand with the loss in chunks of rows, and ours, one after another and then again. Two runs of one
contestant show the noise.

[Note: what fits] The model has the widths of Llama 3 8B (4096, MLP 14336, 32 heads, 8 for keys and values, vocabulary
128256) and 8 of its 32 layers: 2.8 billion parameters. Training as users do, with float32 weights and AdamW states,
bf16 compute and float32 gradients, takes 16 bytes a parameter: 45 GB. A layer costs the same wherever it stands; only
embedding and head weigh more.

[Note: MFU] Model FLOPs of a token, forward and backward: 6 N + 12 L H S, where N counts the parameters that multiply
(all but the input embedding), L layers, H the width of attention, S the sequence. Recomputation does not count.
Attention counts as if it were not causal. Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B. They are divided
by dense bf16 of NVIDIA's data sheet of H100 and H200 SXM, 989.4 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEAK_FLOPS = 989.4e12
"""Dense bf16; see [Note: MFU]."""
HAND, CHUNKED, OURS = CONTESTANTS = ("by hand", "by hand, loss in chunks", "ours")
MODES = ("none", "selective", "full", "budget")
TOLERANCE = 2e-2
"""Relative difference of loss and gradient norm between contestants, in bf16."""


@dataclass(frozen=True)
class Size:
    """Shapes, the tokens of a step, and how many steps are measured and left out."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int
    tokens: int
    steps: int
    warmup: int


SIZES = {
    "large": Size(4096, 14336, 32, 8, 128256, layers=8, tokens=16384, steps=8, warmup=3),
    # Most of its steps is the host's time.
    "host": Size(256, 512, 4, 2, 2048, layers=4, tokens=1024, steps=30, warmup=10),
    "tiny": Size(64, 128, 4, 2, 2048, layers=2, tokens=64, steps=4, warmup=2),
}


def main() -> int:
    options = _options()
    if options.contestant is not None:
        options.out.write_text(json.dumps(_measure(options)), encoding="utf-8")
        return 0
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.contestants}
    for _ in range(options.rounds):
        for name, found in runs.items():
            found.append(_in_process(name, options))
            print(f"{name}: {found[-1]}", flush=True)
            report = _report(options, runs)
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if report["failed"] else 0


def _in_process(name: str, options: argparse.Namespace) -> dict[str, Any]:
    notes = options.out.with_name(f"{options.out.stem}.part.json")
    notes.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--contestant", name, "--out", str(notes), "--device", options.device]
    command += ["--mode", options.mode, "--seq", str(options.seq), "--size", options.size]
    command += ["--compiled"] if options.compiled else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode or not notes.exists():
        return {"error": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(notes.read_text(encoding="utf-8"))
    notes.unlink()
    return found


def _report(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    failed = [f"{name}: {each['error']}" for name, found in runs.items() for each in found if "error" in each]
    good = {name: [each for each in found if "error" not in each] for name, found in runs.items()}
    best = {name: min(each["step_s"] for each in found) for name, found in good.items() if found}
    values = [(each["loss"], each["norm"]) for found in good.values() for each in found]
    apart = max((abs(a - b) / abs(b) for pair in values for a, b in zip(pair, values[0], strict=True)), default=0.0)
    # A NaN is not within the tolerance.
    if not apart <= TOLERANCE:
        failed.append(f"loss or gradient norm differ by {apart:.2g}: contestants do unequal work")
    return {
        **{key: getattr(options, key) for key in ("mode", "compiled", "seq", "size")},
        "contestants": good,
        "ours_to": {name: best[OURS] / best[name] for name in best if name != OURS} if OURS in best else {},
        "largest_relative_disagreement": apart,
        "failed": failed,
    }


# -- a contestant's side


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build one contestant, run its steps, and tell their time and memory."""
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch

    from meshwright.launch.open_world import open_world

    size = SIZES[options.size]
    with open_world(options.device) as world:
        work = _work(size, options.seq, world.device, chunked=options.contestant == CHUNKED)
        begin = time.perf_counter()
        step = _build(options, work, world)
        loss, norm = step(0)
        ready = time.perf_counter() - begin
        seconds, host = [], []
        for index in range(1, size.warmup + size.steps):
            start, start_cpu = time.perf_counter(), time.process_time()
            step(index)
            seconds.append(time.perf_counter() - start)
            host.append(time.process_time() - start_cpu)
        step_s = statistics.median(seconds[size.warmup :])
        on_gpu = world.device.type == "cuda"
        return {
            "step_s": step_s,
            "host_s": statistics.median(host[size.warmup :]),
            "ready_s": ready,
            "tokens_per_s": work.tokens / step_s,
            "mfu": work.flops_per_token * work.tokens / step_s / PEAK_FLOPS if on_gpu else None,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
            "loss": loss,
            "norm": norm,
        }


def _build(options: argparse.Namespace, work: Any, world: Any) -> Callable[[int], tuple[float, float]]:
    """The step of one contestant."""
    import torch
    from contestants import fsdp2_by_hand, meshwright_step
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if options.contestant != OURS:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return fsdp2_by_hand(work, world, _change(options.mode, options.compiled), policy)
    config = {
        "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "activation_checkpointing": {"none": False, "budget": {"budget_gb": 2.0}}.get(options.mode, options.mode),
        "enable_compile": options.compiled,
    }
    return meshwright_step("fsdp2", work, world, config)


def _work(size: Size, seq: int, device: Any, *, chunked: bool) -> Any:
    import torch
    from contestants import Work
    from torch import nn
    from transformers import LlamaConfig, LlamaForCausalLM

    length = min(seq, size.tokens)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=length,
    )

    @dataclass(frozen=True, kw_only=True)
    class Large(Work):
        """A Llama that is made on the device itself: on the host, billions of random numbers take minutes."""

        def model(self) -> nn.Module:
            torch.manual_seed(self.seed)
            with device:
                return LlamaForCausalLM(config)

        @cached_property
        def flops_per_token(self) -> int:
            with torch.device("meta"):
                count = sum(p.numel() for p in LlamaForCausalLM(config).parameters())
            return 6 * (count - size.vocab * size.hidden) + 12 * size.layers * size.hidden * length

        @property
        def tokens(self) -> int:
            return self.batch * self.seq

    batch, chunk_rows = max(1, size.tokens // length), 1024 if chunked else None
    return Large(
        hidden=size.hidden,
        layers=size.layers,
        seq=length,
        batch=batch,
        microbatches=1,
        dtype="float32",
        loss_chunk_rows=chunk_rows,
    )


def _change(mode: str, compiled: bool) -> Callable[[Any], None]:
    """What is done by hand to each block: activation checkpointing, then compile; sharding comes after."""
    import torch
    from torch.utils.checkpoint import checkpoint

    def change(block: Any) -> None:
        if mode != "none":
            # By hand there is no budget: selective is the nearest.
            options = {} if mode == "full" else {"context_fn": _selective_contexts}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
        if compiled:
            block.forward = torch.compile(block.forward)

    return change


def _selective_contexts() -> Any:
    """Keep attention and every second matrix product, as torchtitan's selective mode does."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if "scaled_dot_product" in str(op):
            return CheckpointPolicy.MUST_SAVE
        if op is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the JSON goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--size", choices=tuple(SIZES), default="large", help="of the model; default: %(default)s")
    parser.add_argument("--mode", choices=MODES, default="selective", help="recomputation; default: %(default)s")
    parser.add_argument("--compiled", action="store_true", help="compile blocks")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a sequence; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each contestant; default: %(default)s")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: its directory does not exist")
    return options


if __name__ == "__main__":
    sys.exit(main())
