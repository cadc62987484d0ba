"""The pictures of docs/reference/plan.md: what `meshwright plan --png` draws of three runs.

python benchmarks/plan_pictures.py         # some minutes
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml

from meshwright.mesh.sizes import Degrees
from meshwright_plan.config import load_device_spec
from meshwright_plan.planner import build_job, plan_job
from meshwright_plan.plots.plot_data import PlotData, collect_plot_data
from meshwright_plan.plots.png import write_pngs
from meshwright_plan.plugin import load_job_config

DOCS = Path(__file__).parents[1] / "docs"
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "memory": (
        128,
        {"model": LLAMA_8B, "data": {"seq_len": 8192}, "batch_size": 128, "micro_batch_size": 1},
    ),
    "timeline": (
        16,
        {
            "model": {**LLAMA_8B, "num_hidden_layers": 8},
            "data": {"seq_len": 4096},
            "batch_size": 32,
            "tp_size": 2,
            "pp_size": 4,
            "wrapper_config": {"pipeline": {"pp_schedule": "1F1B", "pp_microbatch_size": 1}},
        },
    ),
}
DEVICE = load_device_spec("h100-80gb")
LARGE = Degrees(pp=16, dp_shard=128, tp=8)


def draw(directory: Path) -> None:
    for name, (world, run) in RUNS.items():
        file = directory / "run.yaml"
        file.write_text(yaml.safe_dump({"strategy": "fsdp2", **run}), encoding="utf-8")
        job = build_job(load_job_config(file, []), world)
        write_pngs(directory, collect_plot_data(job, DEVICE, plan_job(job, DEVICE, [0])), [name])
    # A map needs no step.
    write_pngs(directory, PlotData({"ranks": []}, LARGE, DEVICE, (), (), 0, 0), ["mesh"])
    for name in (*RUNS, "mesh"):
        (directory / f"{name}.png").replace(DOCS / "images" / f"plan_{name}.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        draw(Path(made))
