"""Steps of an adapter on a base of Llama 3 8B's shape in bf16, on one GPU.

    python benchmarks/gpu/lora.py --out lora.json

The base has new weights: what a step takes does not depend on their values.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import meshwright as mw

BASE = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
BASE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096}
TINY = {**BASE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "vocab_size": 2048}
PEFT = {"type": "lora", "r": 16, "target_modules": "all-linear"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    with mw.open_world(options.device):
        options.out.write_text(json.dumps(_measure(options.device == "cuda"), indent=1) + "\n", encoding="utf-8")


def _measure(on_gpu: bool) -> dict[str, Any]:
    begin = time.perf_counter()
    length = 4096 if on_gpu else 32
    config = {"activation_checkpointing": "full"}
    manager = mw.from_config(BASE if on_gpu else TINY, "fsdp2", config=config, dtype="bfloat16", peft=PEFT)
    manager.build_optimizer(mw.optimizer_factory(mw.OptimizerConfig(lr=1e-4)))
    vocabulary = (BASE if on_gpu else TINY)["vocab_size"]
    ids = torch.randint(int(str(vocabulary)), (4, length), generator=torch.Generator().manual_seed(0))
    batch = [{"input_ids": ids, "labels": ids}]
    seconds, losses = [], []
    for _ in range(6):
        start = time.perf_counter()
        loss = manager.forward_backward(batch, num_tokens=manager.begin_step_sync(batch))
        manager.clip_grad_norm(1.0)
        manager.optimizer_step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    step_s = statistics.median(seconds[2:])
    return {
        "step_s": step_s,
        "tokens_per_s": ids.numel() / step_s,
        "ready_s": time.perf_counter() - begin - sum(seconds),
        "loss": losses[-1],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
    }


if __name__ == "__main__":
    main()
