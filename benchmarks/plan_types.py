"""Plan every type of transformers' causal LMs, and tell which cannot be planned and why.

    python benchmarks/plan_types.py                 # all; what is known already stays
    python benchmarks/plan_types.py --only qwen3    # types whose names contain this, once more

Types are tiny instances (`meshwright_testing.zoo`). Writes benchmarks/results/plan_types.json and a table into
docs/reference/plan.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.base.errors import MeshwrightError
from meshwright.mesh.sizes import MeshSizes
from meshwright.optim.build import optimizer_factory
from meshwright.optim.config import OptimizerConfig
from meshwright.strategy.stack import resolve
from meshwright_plan.planner import trace_rank
from meshwright_plan.trace import TrainingJob
from meshwright_testing.zoo import build_zoo_config, zoo_types, zoo_unsupported_reason

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan_types.json"
PAGE = ROOT / "docs" / "reference" / "plan.md"
BEGIN, END = "<!-- types: begin -->", "<!-- types: end -->"
LAYOUTS: dict[str, dict[str, int]] = {"dp_shard=4": {}}
ROWS, LENGTH = 2, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=None, help="types whose names contain this")
    asked = parser.parse_args()
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    types = [each for each in zoo_types() if zoo_unsupported_reason(each) is None]
    for layout, sizes in LAYOUTS.items():
        for model_type in types:
            cells = known.setdefault(model_type, {})
            if layout in cells and (asked.only is None or asked.only not in model_type):
                continue
            begin = time.perf_counter()
            cells[layout] = planned(model_type, sizes)
            print(model_type, layout, cells[layout], f"{time.perf_counter() - begin:.1f} s", flush=True)
            RESULTS.write_text(json.dumps({each: known[each] for each in types if each in known}, indent=1) + "\n")
    write({each: known[each] for each in types})


def planned(model_type: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The peak of the first rank in bytes, or why there is no plan."""
    try:
        stack, degrees = resolve("fsdp2", MeshSizes(**sizes), 4)
        adamw = optimizer_factory(OptimizerConfig(lr=1e-3))
        job = TrainingJob(
            stack,
            degrees,
            functools.partial(made, model_type),
            adamw,
            num_microbatches=2,
            micro_batch_size=ROWS,
            seq_len=LENGTH,
        )
        return {"peak_allocated_bytes": trace_rank(job, 0).peak.bytes}
    except MeshwrightError as error:
        return {"refused": str(error)}


def made(model_type: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = build_zoo_config(model_type)
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    return model.train()


def write(found: Mapping[str, Mapping[str, Any]]) -> None:
    """How many are planned in each layout, and the others by reason, into the page."""
    lines = [f"Of {len(found)} types:", "", "| layout | planned | not planned |", "|---|---:|---|"]
    for layout in LAYOUTS:
        reasons: dict[str, list[str]] = {}
        for model_type, cells in found.items():
            if "refused" in cells[layout]:
                reasons.setdefault(" ".join(cells[layout]["refused"].split())[:200], []).append(model_type)
        count = len(found) - sum(map(len, reasons.values()))
        reported = "<br>".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        lines.append(f"| {layout} | {count} | {reported.replace('|', '/')} |")
    text = PAGE.read_text(encoding="utf-8")
    before, behind = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + "\n\n" + "\n".join(lines) + "\n\n" + behind, encoding="utf-8")


if __name__ == "__main__":
    main()
