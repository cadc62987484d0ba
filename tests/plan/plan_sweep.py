"""Compare plans with real ranks on all layouts, and write benchmarks/results/plan_exact.json.

    python tests/plan/plan_sweep.py [--only TEXT] [--ranks N]
    python tests/plan/plan_sweep.py --deep [--only TEXT]     # benchmarks/results/plan_deep.json

Each layout is planned and done: bytes at the peak, what holds them, what is held between steps, and each collective in
its order. Results of layouts that are not run again stay in the file.

With --deep, pipelines that are planned from small ones are compared with all of their stages traced whole.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.plan_layouts import Layout, deep_layout, deep_plan, done, planned

from meshwright.base.errors import MeshwrightError, RankError
from meshwright.strategy.registry import get_registry
from meshwright.testing.conformance import layouts_of
from meshwright.testing.pool import pool
from meshwright_plan.depth import NEARLY

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "plan_exact.json"
DEEP_RESULTS = RESULTS.with_name("plan_deep.json")
SP = {"sequence_parallel": True}
MOE, EIGHT = "qwen3_moe", "qwen3_moe of 8"


def pipelines(engine: str, ranks: int, sizes: dict[str, int], **kwargs: Any) -> list[Layout]:
    """Each schedule of a pipeline over a strategy."""
    schedules = dict.fromkeys(("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"), 4)
    return [
        Layout(engine, ranks, sizes, wrapper={"pp_schedule": name}, layers=count, microbatches=count, **kwargs)
        for name, count in {**schedules, "DualPipeV": 8}.items()
    ]


LAYOUTS = [
    Layout("single", 1),
    Layout("fsdp2", 2),
    Layout("fsdp2", 4),
    Layout("fsdp2", 2, {"dp_replicate_size": 2}),
    Layout("fsdp2", 4, {"dp_replicate_size": 2}),
    Layout("fsdp2", 2, {"tp_size": 2}),
    Layout("fsdp2", 4, {"tp_size": 4}),
    Layout("fsdp2", 4, {"tp_size": 2}),
    Layout("fsdp2", 4, {"tp_size": 2}, SP),
    Layout("fsdp2", 2, {"tp_size": 2}, SP),
    Layout("fsdp2", 2, {"cp_size": 2}),
    Layout("fsdp2", 4, {"cp_size": 2}),
    Layout("fsdp2", 4, {"cp_size": 4}),
    Layout("fsdp2", 2, {"cp_size": 2}, {"cp_attention": "ulysses"}),
    Layout("fsdp2", 4, {"cp_size": 2, "tp_size": 2}),
    Layout("fsdp2", 4, {"cp_size": 2, "tp_size": 2}, SP),
    Layout("fsdp2", 2, {}, {"activation_checkpointing": "full"}),
    Layout("fsdp2", 2, {}, {"activation_checkpointing": "selective"}),
    Layout("fsdp2", 2, {}, {"reshard_after_forward": False}),
    Layout("fsdp2", 2, {}, {"reshard_after_forward": False}, microbatches=3),
    Layout("fsdp2", 2, {}, {"offload_policy": {"pin_memory": False}}),
    Layout("fsdp2", 2, {}, {"activation_checkpointing": {"offload": "cpu"}}),
    Layout("fsdp2", 2, {}, {"defer_fsdp_grad_sync": False}),
    Layout("fsdp2", 2, dtype="bfloat16"),
    Layout("fsdp2", 2, microbatches=5),
    Layout("fsdp2", 2, is_adapted=True),
    Layout("fsdp2", 2, {"tp_size": 2}, is_adapted=True),
    Layout("ddp", 2),
    Layout("ddp", 4),
    Layout("ddp", 2, is_adapted=True),
    Layout("ddp", 2, {}, {"engine": "bucketed"}),
    Layout("ddp", 4, {}, {"engine": "bucketed"}),
    Layout("ddp", 2, {}, {"engine": "bucketed", "use_distributed_optimizer": True}),
    Layout("ddp", 4, {}, {"engine": "bucketed", "use_distributed_optimizer": True}),
    Layout("megatron_fsdp", 2),
    Layout("megatron_fsdp", 4),
    Layout("megatron_fsdp", 4, {"dp_replicate_size": 2}),
    *pipelines("fsdp2", 2, {"pp_size": 2}),
    *pipelines("ddp", 2, {"pp_size": 2}),
    Layout("fsdp2", 4, {"pp_size": 4}),
    Layout("fsdp2", 4, {"pp_size": 2}),
    Layout("fsdp2", 4, {"pp_size": 2, "tp_size": 2}),
    Layout("fsdp2", 4, {"pp_size": 2, "cp_size": 2}),
    Layout("ddp", 4, {"pp_size": 2}),
    Layout("fsdp2", 2, model=MOE),
    Layout("fsdp2", 2, {"ep_size": 2}, model=MOE),
    Layout("fsdp2", 4, {"ep_size": 2}, model=MOE),
    Layout("fsdp2", 4, {"ep_size": 4}, model=MOE),
    Layout("fsdp2", 4, {"ep_size": 2, "tp_size": 2}, model=MOE),
    Layout("fsdp2", 4, {"ep_size": 2, "pp_size": 2}, model=MOE),
    Layout("fsdp2", 8, {"tp_size": 2, "dp_replicate_size": 2}),
    Layout("fsdp2", 8, {"pp_size": 2, "tp_size": 2}),
    Layout("fsdp2", 8, {"dp_replicate_size": 2}),
    Layout("fsdp2", 8, {"cp_size": 4}),
    Layout("fsdp2", 8, {"tp_size": 4}, SP),
    Layout("fsdp2", 8, {"ep_size": 8}, model=EIGHT),
    Layout("megatron_fsdp", 8, {"dp_replicate_size": 2}),
    Layout("ddp", 8, {}, {"engine": "bucketed", "use_distributed_optimizer": True}),
]


DEEP = [
    deep_layout("fsdp2", 4, "ZBVZeroBubble", 40, 10),
    deep_layout("fsdp2", 4, "DualPipeV", 40, 10),
    deep_layout("fsdp2", 4, "Interleaved1F1B", 40, 12),
    deep_layout("fsdp2", 4, "InterleavedZeroBubble", 40, 12),
    deep_layout("fsdp2", 6, "1F1B", 30, 9),
    deep_layout("fsdp2", 6, "ZBVZeroBubble", 60, 14),
    deep_layout("fsdp2", 6, "DualPipeV", 60, 14),
    deep_layout("fsdp2", 6, "Interleaved1F1B", 60, 18),
    deep_layout("fsdp2", 6, "InterleavedZeroBubble", 60, 18),
    deep_layout("fsdp2", 8, "1F1B", 40, 10),
    deep_layout("fsdp2", 8, "ZBVZeroBubble", 80, 18),
    deep_layout("ddp", 6, "Interleaved1F1B", 60, 18),
]


def of_conformance() -> Iterator[Layout]:
    """Those that `meshwright check` tries of each strategy."""
    for name, spec in get_registry().strategies.items():
        for _, ranks, sizes, _ in layouts_of(spec, 4):
            # What follows from the others is left out.
            told = {axis: size for axis, size in sizes.items() if axis != "dp_size" and size > 1}
            yield Layout(name, ranks, told, model=MOE if "ep_size" in sizes else "llama")


LAYOUTS += [each for each in of_conformance() if each not in LAYOUTS]


def compared(layout: Layout) -> dict[str, Any]:
    """How a plan and real ranks differ; the error where either is refused."""
    row: dict[str, Any] = {"layout": str(layout), "ranks": layout.ranks}
    try:
        everywhere = pool(layout.ranks).run(done, layout)
    except (RankError, MeshwrightError) as error:
        return {**row, "refused": _first_line(error)}
    peaks, helds, other = [], [], set()
    for rank in sorted({0, layout.ranks // 2, layout.ranks - 1}):
        real = everywhere[rank]
        try:
            told = planned(layout, rank)
        except Exception as error:
            return {**row, "not_planned": f"{type(error).__name__}: {_first_line(error)}"}
        peaks.append(100 * (told.peak.bytes / real.peak.bytes - 1))
        helds.append(100 * (told.after.bytes / real.after.bytes - 1))
        if told.peak != real.peak:
            other.add("peak")
        if told.after != real.after:
            other.add("held")
        if told.collectives != real.collectives:
            other.add("collectives")
    worst = max(peaks, key=abs)
    return {
        **row,
        "exact": not other,
        "peak_deviation_percent": round(worst, 3),
        "held_deviation_percent": round(max(helds, key=abs), 3),
        "differs_in": sorted(other),
    }


def compared_deep(layout: Layout) -> dict[str, Any]:
    """How a plan from small pipelines and one of all stages differ, and whether small ones told it at all."""
    seconds = [time.process_time()]
    told = deep_plan(layout, from_small=True)
    seconds.append(time.process_time())
    whole = deep_plan(layout, from_small=False)
    seconds.append(time.process_time())
    row = {"layout": str(layout), "from_small": told is not None}
    if told is None:
        return row
    pairs = list(zip(told, whole or [], strict=True))
    other = {key for few, all_ in pairs for key in all_ if key not in NEARLY and few.get(key) != all_[key]}
    off = {
        key: round(max((100 * (few[key] / all_[key] - 1) for few, all_ in pairs), key=abs), 2)
        for key in ("step_seconds", "peak_reserved_bytes")
    }
    cost = [round(end - begin, 1) for begin, end in itertools.pairwise(seconds)]
    return {
        **row,
        "exact": not other,
        "differs_in": sorted(other),
        "step_seconds_deviation_percent": off["step_seconds"],
        "reserved_deviation_percent": off["peak_reserved_bytes"],
        "seconds_of_both_plans": cost,
    }


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), (lines or [""])[0])[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layouts whose names contain this")
    parser.add_argument("--ranks", type=int, help="layouts of so many ranks")
    parser.add_argument("--deep", action="store_true", help="pipelines from small ones")
    asked = parser.parse_args()
    layouts, results, compare = (DEEP, DEEP_RESULTS, compared_deep) if asked.deep else (LAYOUTS, RESULTS, compared)
    known = {row["layout"]: row for row in json.loads(results.read_text(encoding="utf-8"))} if results.exists() else {}
    chosen = [each for each in layouts if asked.only in str(each) and asked.ranks in (None, each.ranks)]
    for layout in chosen:
        row = known[str(layout)] = compare(layout)
        print(json.dumps(row), flush=True)
        rows = [known[str(each)] for each in layouts if str(each) in known]
        results.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
