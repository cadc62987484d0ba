"""What this machine is, and what it reaches: versions, the card, how its allocator is set up, a product, a copy.

python benchmarks/gpu/about.py --out about.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import meshwright
from meshwright import open_world


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    with open_world(options.device) as world:
        options.out.write_text(json.dumps(_about(world.device), indent=1) + "\n", encoding="utf-8")


def _about(device: torch.device) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "meshwright": meshwright.__version__,
        "bfloat16_product_tflops": _product_tflops(8192 if is_cuda else 256, device),
        "copy_gb_per_s": _copy_gb_per_s(2**28 if is_cuda else 2**22, device),
    }
    if not is_cuda:
        return found
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    # The allocator's own word on how it was set up, which the environment alone does not prove.
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    return found | {
        "card": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "expandable_segments": settings.get("expandable_segments"),
        "allocated_bytes": torch.cuda.memory_allocated(device),
        # Beyond torch's allocator: the context, kernels, and other processes on the card.
        "context_bytes": total - free - torch.cuda.memory_reserved(device),
    }


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call, when many run one behind the other."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    took = 0.0
    for repeats in (3, 20):  # the first warm up
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        wait()
        took = (time.perf_counter() - start) / repeats
    return took


def _product_tflops(edge: int, device: torch.device) -> float:
    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * edge**3 / _seconds(lambda: a @ b, device) / 1e12


def _copy_gb_per_s(elements: int, device: torch.device) -> float:
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    return 8 * elements / _seconds(lambda: target.copy_(source), device) / 1e9


if __name__ == "__main__":
    main()
