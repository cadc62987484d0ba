"""Seconds until a model has its initial weights, by ranks, beside transformers' own.

    python benchmarks/init.py --json benchmarks/results/init.json

584 million parameters in float32, on one thread: transformers' constructor; ours, of all weights (one rank), and of a
quarter (what each of four ranks holds under fsdp2), by both ways of `model.init`. Alternated; the least of some rounds.
A table of larger models follows by the values that a core draws in a second.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import llama, origin
from transformers import AutoModelForCausalLM

from meshwright.model.pretrained import init_model_on_meta

LARGER = {"8B": 8.03e9, "70B": 70.6e9}


def by_transformers(config: Any) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def ours(config: Any, init: str, ranks: int) -> None:
    """Build the model, and draw what the first of so many ranks holds of each parameter."""
    model, values = init_model_on_meta(config, torch.float32, 0, init=init)
    if values is None:
        raise ValueError("this model is not drawn in parts")
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // ranks)
        values.read(name, [0] * parameter.dim(), [rows, *parameter.shape[1:]])


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"num_attention_heads": options.hidden // 64, "num_key_value_heads": options.hidden // 128 or 1}
    config = llama(options.hidden, options.layers, options.vocab, **sizes)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    contestants: dict[str, Callable[[], None]] = {
        "transformers": lambda: by_transformers(config),
        "parallel, one rank": lambda: ours(config, "parallel", 1),
        "parallel, of four ranks": lambda: ours(config, "parallel", 4),
        "transformers, of four ranks": lambda: ours(config, "transformers", 4),
    }
    took: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, work in contestants.items():
            took[name].append(seconds(work))
    least = {name: min(each) for name, each in took.items()}
    rate = count / least["parallel, one rank"]
    found = {
        "command": "python benchmarks/init.py",
        **origin(),
        "parameters": count,
        "seconds": {name: round(each, 2) for name, each in least.items()},
        "values_per_second_and_core": round(rate),
        "larger": {
            name: {f"{ranks} ranks of 12 cores": round(size / ranks / 12 / rate, 1) for ranks in (8, 64)}
            for name, size in LARGER.items()
        },
    }
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
