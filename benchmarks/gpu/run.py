"""Throughput of an 8B-shaped Llama on one GPU in bf16, ours against the same by hand, in one run.

    python benchmarks/gpu/run.py --out throughput.json

Six variants, with and without compile, each without, with selective and with full activation checkpointing. Each runs
in a process of its own under a time limit, altogether at most 8 minutes, and the file is written again after each. In
a variant both contestants live side by side; a round runs one step by hand, one of ours, and one by hand again, so that
the machine's moods fall on both, and the two by hand show the noise.

[Note: what fits] The model has the widths of Llama 3 8B (4096, MLP 14336, 32 heads, 8 for keys and values, vocabulary
128256) and 8 of its 32 layers: 2.8 billion parameters. Training as users do, with float32 weights and AdamW states,
bf16 compute and float32 gradients, takes 16 bytes a parameter: 128 GB for 32 layers, the whole GPU, but 45 GB for 8, so
two contestants fit beside each other. A layer costs the same wherever it stands; only embedding and head weigh more.

[Note: MFU] Model FLOPs of a token, forward and backward: 6 N + 12 L H S, where N counts the parameters that multiply
(all but the input embedding), L layers, H the width of attention, S the sequence. Recomputation does not count.
Attention counts as if it were not causal. Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B. They are divided
by the peak rate: dense bf16 by NVIDIA's data sheet of H100 and H200 SXM, 989.4 TFLOP/s. The rate of a large matrix
product in the same run is told too, since no card reaches its data sheet.

`--device cpu --tiny` goes through the same code with three of the variants, where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEAK_FLOPS = 989.4e12
"""Dense bf16; see [Note: MFU]."""

MODES = ("none", "selective", "full")
VARIANTS = {
    f"{mode}{', compiled' if compiled else ''}": (mode, compiled) for compiled in (False, True) for mode in MODES
}
LIMIT_S = {False: 50, True: 105}
"""Seconds of a variant, by whether it compiles."""

TINY_VARIANTS = ("none", "selective", "full, compiled")

TOLERANCE = 2e-2
"""Relative difference of loss and gradient norm between the contestants, in bf16."""

HAND, OURS, AGAIN = CONTESTANTS = ("by hand", "ours", "by hand again")


@dataclass(frozen=True)
class Size:
    """Shapes and how often; TINY is for machines without a GPU."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    layers: int
    seq: int
    batch: int
    rounds: int
    warmup: int
    product: int
    """Edge of the matrix product that shows what the card can do."""


LARGE = Size(4096, 14336, 32, 8, 128256, layers=8, seq=4096, batch=2, rounds=10, warmup=3, product=8192)
TINY = Size(64, 128, 4, 2, 2048, layers=2, seq=32, batch=2, rounds=3, warmup=2, product=256)


def main() -> int:
    options = _options()
    if options.variant is not None:
        options.out.write_text(json.dumps(run_variant(options)), encoding="utf-8")
        return 0
    report: dict[str, Any] = {"benchmark": "throughput", "variants": {}, "failed": []}
    for name in TINY_VARIANTS if options.tiny else VARIANTS:
        _, compiled = VARIANTS[name]
        found = _in_process(name, options, LIMIT_S[compiled])
        report["about"] = found.pop("about", report.get("about"))
        report["variants"][name] = found
        if "error" in found:
            report["failed"].append(f"{name}: {found['error']}")
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(_line(name, found), flush=True)
    return 1 if report["failed"] else 0


def _in_process(name: str, options: argparse.Namespace, limit_s: int) -> dict[str, Any]:
    notes = options.out.with_name(f"{options.out.stem}.part.json")
    notes.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--variant", name, "--out", str(notes), "--device", options.device]
    process = subprocess.Popen(
        [*command, *(["--tiny"] if options.tiny else [])],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=limit_s)
        ending = f"ended with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        ending = f"took more than {limit_s} s"
    if not notes.exists():
        return {"error": f"{ending}: {errors[-2000:]}"}
    found: dict[str, Any] = json.loads(notes.read_text(encoding="utf-8"))
    notes.unlink()
    return found


def _line(name: str, found: dict[str, Any]) -> str:
    if "contestants" not in found:
        return f"{name}: {found['error']}"
    each = [f"{who} {row['tokens_per_s']:.0f} tokens/s{_on_gpu(row)}" for who, row in found["contestants"].items()]
    return f"{name}: {'; '.join(each)}; ours / by hand {found['ours_to_hand']:.3f} (noise {found['again_to_hand']:.3f})"


def _on_gpu(row: dict[str, float | None]) -> str:
    if row["mfu"] is None or row["peak_gib"] is None:
        return ""
    return f", MFU {row['mfu']:.1%}, {row['peak_gib']:.1f} GiB"


# -- the child's side


def run_variant(options: argparse.Namespace) -> dict[str, Any]:
    """Build both contestants, run the rounds, and say what was measured."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    from contestants import Step, fsdp2_by_hand, meshwright_step
    from gpu.large import LargeWork, by_hand_change
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from meshwright.mesh.world import open_world

    mode, compiled = VARIANTS[options.variant]
    size = TINY if options.tiny else LARGE
    on_gpu = options.device == "cuda"
    config = {
        "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        "activation_checkpointing": False if mode == "none" else mode,
        "enable_compile": compiled,
    }
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with open_world(options.device) as world:
        work = LargeWork.of(size, world.device)
        memory = _Memory(on_gpu)
        change = by_hand_change(mode, compiled)
        builders: dict[str, Callable[[], Step]] = {
            HAND: lambda: fsdp2_by_hand(work, world, change, policy),
            OURS: lambda: meshwright_step("fsdp2", work, world, config),
        }
        steps = {}
        for name, build in builders.items():
            steps[name] = memory.building(name, build)
        steps[AGAIN] = steps[HAND]
        seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
        values: dict[str, list[tuple[float, float]]] = {HAND: [], OURS: []}
        for _ in range(size.warmup + size.rounds):
            for name in CONTESTANTS:
                owner = HAND if name == AGAIN else name
                start = time.perf_counter()
                # Steps of one contestant are counted on, so that both see the same batches.
                values[owner].append(memory.during(owner, steps[name], len(values[owner])))
                seconds[name].append(time.perf_counter() - start)
        both = list(zip(values[HAND], values[OURS], strict=False))
        apart = max(abs(a - b) / abs(a) for hand, ours in both for a, b in zip(hand, ours, strict=True))
        measured = {name: statistics.median(each[size.warmup :]) for name, each in seconds.items()}
        ratio = _median_ratio(seconds, size.warmup)
        result = {
            "contestants": {name: _row(measured[name], memory.peak[name], work, size, on_gpu) for name in (HAND, OURS)},
            "ours_to_hand": ratio(OURS, HAND),
            "again_to_hand": ratio(AGAIN, HAND),
            "largest_relative_disagreement": apart,
            "about": _about(options, size, work, world.device),
        }
    # A NaN is not within the tolerance.
    if not apart <= TOLERANCE:
        result["error"] = f"loss or gradient norm differ by {apart:.2g}, so the contestants do unequal work: {both[:3]}"
    return result


def _median_ratio(seconds: dict[str, list[float]], warmup: int) -> Callable[[str, str], float]:
    def ratio(over: str, under: str) -> float:
        pairs = list(zip(seconds[over], seconds[under], strict=True))[warmup:]
        return statistics.median(a / b for a, b in pairs)

    return ratio


def _row(step_s: float, peak: int | None, work: Any, size: Size, on_gpu: bool) -> dict[str, float | None]:
    tokens = size.batch * size.seq
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "mfu": work.flops_per_token * tokens / step_s / PEAK_FLOPS if on_gpu else None,
        "peak_gib": None if peak is None else peak / 2**30,
    }


class _Memory:
    """Peak memory of each contestant, without what the other one holds."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.peak: dict[str, int | None] = {}
        self._resident: dict[str, int] = {}

    def building(self, name: str, build: Callable[[], Any]) -> Any:
        """Build a contestant, and run its first step, after which its optimizer's state is there."""
        before = self._allocated()
        step = build()
        step(0)
        self._resident[name] = self._allocated() - before
        self.peak[name] = 0 if self.on_gpu else None
        return step

    def during(self, name: str, step: Callable[[int], tuple[float, float]], index: int) -> tuple[float, float]:
        import torch

        if not self.on_gpu:
            return step(index)
        others = self._allocated() - self._resident[name]
        torch.cuda.reset_peak_memory_stats()
        result = step(index)
        torch.cuda.synchronize()
        self.peak[name] = max(self.peak[name] or 0, torch.cuda.max_memory_allocated() - others)
        return result

    def _allocated(self) -> int:
        import gc

        import torch

        if not self.on_gpu:
            return 0
        torch.cuda.synchronize()
        gc.collect()
        return torch.cuda.memory_allocated()


def _about(options: argparse.Namespace, size: Size, work: Any, device: Any) -> dict[str, Any]:
    import torch
    import transformers

    return {
        "command": f"python benchmarks/gpu/run.py --device {options.device}{' --tiny' if options.tiny else ''}",
        "shape": vars(size),
        "parameters": work.parameters,
        "flops_per_token": work.flops_per_token,
        "peak_tflops": PEAK_FLOPS / 1e12,
        "measured_product_tflops": _product_tflops(size.product, device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
    }


def _product_tflops(edge: int, device: Any) -> float:
    """Rate of a square bf16 matrix product on random numbers."""
    import torch

    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for repeats in (3, 20):  # the first are to warm up
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            a @ b
        wait()
    return 2 * edge**3 * repeats / (time.perf_counter() - start) / 1e12


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the JSON goes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="a small model, few rounds, three variants")
    parser.add_argument("--variant", choices=tuple(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.absolute()
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: its directory does not exist")
    return options


if __name__ == "__main__":
    sys.exit(main())
