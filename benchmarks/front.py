"""One model, one loss curve, eight layouts: runs them on this machine, and draws the picture at the top of README.

    python benchmarks/front.py           # runs all, writes results/front.json, draws docs/front*.png
    python benchmarks/front.py --only    # draws again what was written

Each layout is a run of `meshwright train` on four ranks of the CPU over gloo, and one is a single process. Losses come
from their metrics.jsonl. Bytes and memory are those of the plan of each run, of the rank that has most; the run itself
counts both in its third step, and the program fails unless it says that all were as planned.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import front_picture
import yaml
from common import origin

from meshwright.plan.beside.comparison import plan_of
from meshwright.train.run_file import load_run

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "front.json"
RANKS = 4
ONE = "one process"
LAYOUTS: dict[str, dict[str, Any]] = {
    ONE: {"strategy": "single", "nproc": 1},
    "ddp": {"strategy": "ddp"},
    "ddp, its optimizer divided": {
        "strategy": "ddp",
        "strategy_config": {"engine": "bucketed", "use_distributed_optimizer": True},
    },
    "megatron_fsdp": {"strategy": "megatron_fsdp"},
    "fsdp2": {},
    "fsdp2, hybrid 2 x 2": {"dp_replicate_size": 2},
    "fsdp2, tensor 2 x 2": {"tp_size": 2, "strategy_config": {"sequence_parallel": True}},
    "fsdp2, context 2 x 2": {"cp_size": 2},
    "fsdp2, pipeline 2 x 2": {"pp_size": 2},
}
RUN: dict[str, Any] = {
    "strategy": "fsdp2",
    "strategy_config": {"reduce_dtype": "float64"},
    "nproc": RANKS,
    "threads_per_rank": 1,
    "model": {
        "model_type": "llama",
        "dtype": "float64",
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.08,
    },
    "data": {"corpus": "stdlib", "vocab_size": 1024, "seq_len": 64},
    "steps": 60,
    "batch_size": 8,
    "micro_batch_size": 2,
    "optimizer": {"name": "AdamW", "lr": 4e-3, "weight_decay": 0.1, "options": {"betas": [0.9, 0.95]}},
    "schedule": {"name": "cosine", "warmup_steps": 6},
    "max_grad_norm": 1.0,
    "eval": {"sequences": 8},
    "sample": None,
}


def measured(changes: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Run one layout.

    Raises:
        SystemExit: it fails, or holds or sends what was not planned.
    """
    merged = {**RUN, **changes, "output_dir": str(directory / "out")}
    merged["strategy_config"] = {**RUN["strategy_config"], **changes.get("strategy_config", {})}
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(merged, sort_keys=False), encoding="utf-8")
    start = time.perf_counter()
    command = [sys.executable, "-m", "meshwright", "train", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    beside = re.search(r"^plan beside step 3: .*$", done.stdout, flags=re.MULTILINE)
    if done.returncode or beside is None or beside[0].count("as planned") != 3:
        raise SystemExit(f"{changes}: {beside and beside[0]}\n{done.stderr[-3000:]}")
    lines = (directory / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    config = load_run(file)
    plan = plan_of(config, merged["nproc"])
    most = max(plan["ranks"], key=lambda rank: rank["peak_allocated_bytes"])
    return {
        "changes": changes,
        "losses": [json.loads(line)["loss"] for line in lines],
        "sent_bytes": max(sum(map(sent, rank["collectives"])) for rank in plan["ranks"]),
        "peak_bytes": most["peak_allocated_bytes"],
        "peak_by_owner": most["peak_by_owner"],
        "seconds": round(time.perf_counter() - start, 1),
        "beside": beside[0],
    }


def sent(row: dict[str, Any]) -> float:
    """Bytes that a rank sends for calls of one kind: of collectives, as a ring passes the whole tensor around.

    Raises:
        KeyError: how this kind is sent is not known here.
    """
    share = (row["ranks"] - 1) / row["ranks"]
    times = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
    return row["bytes"] * {**times, "broadcast": share, "send": 1, "recv": 0}[row["kind"]]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(LAYOUTS), help="run these, and keep what is known of others")
    given = parser.parse_args()
    known = {} if given.only is None else json.loads(RESULTS.read_text(encoding="utf-8"))["layouts"]
    for name in LAYOUTS if given.only is None else given.only:
        with tempfile.TemporaryDirectory() as directory:
            known[name] = measured(LAYOUTS[name], Path(directory))
        print(f"{name}: loss {known[name]['losses'][-1]!r}, {known[name]['seconds']} s", flush=True)
    layouts = {name: known[name] for name in LAYOUTS if name in known}
    content = {"benchmark": "front", **origin(), "ranks": RANKS, "run": RUN, "layouts": layouts}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    front_picture.draw(content, HERE.parent / "docs")


if __name__ == "__main__":
    main()
