"""Compare plans with real ranks on all layouts, and write benchmarks/results/plan_exact.json.

    python plugins/plan/tests/plan_sweep.py [--only TEXT] [--ranks N]
    python plugins/plan/tests/plan_sweep.py --deep [--only TEXT]     # benchmarks/results/plan_deep.json

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

from support.plan_layouts import PlannedLayout, build_deep_layout, plan_deep_layout, trace_planned_rank, trace_real_rank

from meshwright.strategy.registry import get_registry
from meshwright_plan.extrapolation import APPROXIMATE_KEYS
from meshwright_testing.suite import iter_layouts
from meshwright_testing.workers import pool

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "plan_exact.json"
DEEP_RESULTS = RESULTS.with_name("plan_deep.json")
SP = {"sequence_parallel": True}
MOE, EIGHT = "qwen3_moe", "qwen3_moe of 8"
TP, CP, PP, EP, COPIES = ({f"{axis}_size": 2} for axis in ("tp", "cp", "pp", "ep", "dp_replicate"))
OPTIONS: list[dict[str, Any]] = [
    *({"activation_checkpointing": each} for each in ("full", "selective", {"offload": "cpu"})),
    {"reshard_after_forward": False},
    {"offload_policy": {"pin_memory": False}},
    {"defer_fsdp_grad_sync": False},
]


def pipelines(engine: str, ranks: int, sizes: dict[str, int], **kwargs: Any) -> list[PlannedLayout]:
    schedules = dict.fromkeys(("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"), 4)
    return [
        PlannedLayout(engine, ranks, sizes, wrapper={"pp_schedule": name}, layers=count, microbatches=count, **kwargs)
        for name, count in {**schedules, "DualPipeV": 8}.items()
    ]


def of_sizes(strategy: str, *given: tuple[int, dict[str, int]], **options: Any) -> list[PlannedLayout]:
    return [PlannedLayout(strategy, ranks, sizes, **options) for ranks, sizes in given]


LAYOUTS = [
    PlannedLayout("single", 1),
    *of_sizes("fsdp2", (2, {}), (4, {}), (2, COPIES), (4, COPIES), (8, COPIES), (2, TP), (4, TP), (4, {"tp_size": 4})),
    *of_sizes("fsdp2", (2, CP), (4, CP), (4, {"cp_size": 4}), (8, {"cp_size": 4}), (4, CP | TP), (8, TP | COPIES)),
    *of_sizes("fsdp2", (2, TP), (4, TP), (8, {"tp_size": 4}), (4, CP | TP), config=SP),
    *of_sizes("fsdp2", (4, {"pp_size": 4}), (4, PP), (4, PP | TP), (4, PP | CP), (8, PP | TP)),
    *of_sizes("fsdp2", (2, {}), (2, EP), (4, EP), (4, {"ep_size": 4}), (4, EP | TP), (4, EP | PP), model=MOE),
    PlannedLayout("fsdp2", 8, {"ep_size": 8}, model=EIGHT),
    *of_sizes("fsdp2", (2, {}), (2, TP), is_adapted=True),
    PlannedLayout("fsdp2", 2, CP, {"cp_attention": "ulysses"}),
    *(PlannedLayout("fsdp2", 2, {}, options) for options in OPTIONS),
    PlannedLayout("fsdp2", 2, {}, {"reshard_after_forward": False}, microbatches=3),
    PlannedLayout("fsdp2", 2, dtype="bfloat16"),
    PlannedLayout("fsdp2", 2, microbatches=5),
    *of_sizes("ddp", (2, {}), (4, {}), (4, PP)),
    PlannedLayout("ddp", 2, is_adapted=True),
    *of_sizes("ddp", (2, {}), (4, {}), config={"engine": "bucketed"}),
    *of_sizes("ddp", (2, {}), (4, {}), (8, {}), config={"engine": "bucketed", "use_distributed_optimizer": True}),
    *of_sizes("megatron_fsdp", (2, {}), (4, {}), (4, COPIES), (8, COPIES)),
    *pipelines("fsdp2", 2, PP),
    *pipelines("ddp", 2, PP),
]
FOUR = {"ZBVZeroBubble": 10, "DualPipeV": 10, "Interleaved1F1B": 12, "InterleavedZeroBubble": 12}
SIX = {"ZBVZeroBubble": 14, "DualPipeV": 14, "Interleaved1F1B": 18, "InterleavedZeroBubble": 18}
DEEP = [
    *(build_deep_layout("fsdp2", 4, name, 40, count) for name, count in FOUR.items()),
    build_deep_layout("fsdp2", 6, "1F1B", 30, 9),
    *(build_deep_layout("fsdp2", 6, name, 60, count) for name, count in SIX.items()),
    build_deep_layout("fsdp2", 8, "1F1B", 40, 10),
    build_deep_layout("fsdp2", 8, "ZBVZeroBubble", 80, 18),
    build_deep_layout("ddp", 6, "Interleaved1F1B", 60, 18),
]


def of_conformance() -> Iterator[PlannedLayout]:
    for name, spec in get_registry().strategies.items():
        for _, ranks, sizes, _ in iter_layouts(spec, 4):
            # What follows from the others is left out.
            reported = {axis: size for axis, size in sizes.items() if axis != "dp_size" and size > 1}
            yield PlannedLayout(name, ranks, reported, model=MOE if "ep_size" in sizes else "llama")


LAYOUTS += [each for each in of_conformance() if each not in LAYOUTS]


def compared(layout: PlannedLayout) -> dict[str, Any]:
    """How a plan and real ranks differ."""
    everywhere = pool(layout.ranks).run(trace_real_rank, layout)
    pairs = [
        (trace_planned_rank(layout, rank), everywhere[rank])
        for rank in sorted({0, layout.ranks // 2, layout.ranks - 1})
    ]
    peak, held = (
        max(
            (100 * (getattr(reported, name).bytes / getattr(real, name).bytes - 1) for reported, real in pairs), key=abs
        )
        for name in ("peak", "between_steps")
    )
    names = {"peak": "peak", "between_steps": "held", "collectives": "collectives"}
    other = {
        text
        for name, text in names.items()
        for reported, real in pairs
        if getattr(reported, name) != getattr(real, name)
    }
    return {
        "layout": str(layout),
        "ranks": layout.ranks,
        "exact": not other,
        "peak_deviation_percent": round(peak, 3),
        "held_deviation_percent": round(held, 3),
        "differs_in": sorted(other),
    }


def compared_deep(layout: PlannedLayout) -> dict[str, Any]:
    """How a plan from small pipelines and one of all stages differ, and whether small ones reported it at all."""
    seconds = [time.process_time()]
    reported = plan_deep_layout(layout, from_small=True)
    seconds.append(time.process_time())
    whole = plan_deep_layout(layout, from_small=False)
    seconds.append(time.process_time())
    row = {"layout": str(layout), "from_small": reported is not None}
    if reported is None:
        return row
    pairs = list(zip(reported, whole or [], strict=True))
    other = {key for few, all_ in pairs for key in all_ if key not in APPROXIMATE_KEYS and few.get(key) != all_[key]}
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
