"""What benchmarks share: where their numbers come from, and a model of a chosen size."""

from __future__ import annotations

import platform
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

import meshwright


def origin() -> dict[str, Any]:
    """Where numbers come from, without names of machines or directories."""
    return {
        "date": date.today().isoformat(),
        "versions": {
            "meshwright": meshwright.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "cpu": _cpu_name(),
    }


def llama(hidden: int, layers: int, vocab: int, **settings: Any) -> Any:
    """A Llama's configuration; heads have 64 elements unless the settings say otherwise."""
    sizes = {"intermediate_size": hidden * 11 // 4, "num_attention_heads": hidden // 64}
    return AutoConfig.for_model(
        "llama", hidden_size=hidden, num_hidden_layers=layers, vocab_size=vocab, **{**sizes, **settings}
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()
