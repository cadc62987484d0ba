"""A run file that trains a tiny model in seconds, and the values of one that becomes a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

MODEL: dict[str, Any] = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16}
MODEL |= {"num_hidden_layers": 1, "num_attention_heads": 2}
SIZES = {"vocab_size": 300, "seq_len": 16}


def small_run(directory: Path, **changes: Any) -> dict[str, Any]:
    """The values of a run of one rank, on a corpus that is written beside it."""
    lines = (json.dumps({"text": f"{n} is {n * n}"}) for n in range(300))
    (directory / "corpus.jsonl").write_text("\n".join(lines))
    return {
        "strategy": "single",
        "nproc": 1,
        "device": "cpu",
        "threads_per_rank": 1,
        "steps": 2,
        "batch_size": 2,
        "output_dir": str(directory / "out"),
        "model": MODEL,
        "data": {"corpus": [str(directory / "corpus.jsonl")], "cache_dir": str(directory / "cache"), **SIZES},
        "checkpoint": {"every": 1},
        **changes,
    }


def write_small_run(directory: Path, **changes: Any) -> Path:
    """The run file of `small_run`, in the directory."""
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(small_run(directory, **changes)))
    return path


def job_values(env: dict[str, Any], **launch: Any) -> dict[str, Any]:
    """The values of a run file that can become a job of every kind, with these variables of its ranks."""
    return {
        "strategy": "fsdp2",
        "device": "cpu",
        "model": {"model_type": "llama", "hidden_size": 16},
        "data": SIZES,
        "steps": 100,
        "batch_size": 64,
        "checkpoint": {"every": 10},
        "output_dir": "/shared/runs/run",
        "launch": {
            "nodes": 2,
            "ranks_per_node": 2,
            "env": env,
            "kubernetes": {"image": "image", "volume_claim": "claim", "mount_path": "/shared"},
            "skypilot": {"mounts": {"/shared": "s3://bucket"}},
            **launch,
        },
    }
