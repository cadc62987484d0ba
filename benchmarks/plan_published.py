"""Plans against what others have published: memory and throughput of their runs.

    python benchmarks/plan_published.py                 # all rows of published.json that are planned
    python benchmarks/plan_published.py --rows 0 4      # some of them
    python benchmarks/plan_published.py --table         # write the table from what was found before

What is found goes to results/plan_published.json, and the table into docs/reference/plan.md.

Models are made with few blocks, at two depths; memory and time of a step are linear in the number of blocks.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import pickle
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from published_automodel import fuses
from published_code import running
from published_jobs import DEVICES, blocks, is_automodel, is_megatron, job_of, left_out, traced_depths, vocabulary

from meshwright_plan.allocator import compute_reserved_bytes
from meshwright_plan.config import DeviceSpec, load_device_spec
from meshwright_plan.planner import plan_job as plan_of
from meshwright_plan.planner import trace_rank
from meshwright_plan.timeline import find_pipeline_ranks, simulate_timelines
from meshwright_plan.trace import Operation, StepTrace, TrainingJob

HERE = Path(__file__).parent
FOUND = HERE / "results" / "plan_published.json"
PAGE = HERE.parent / "docs" / "reference" / "plan.md"
BEGIN, END = "<!-- published: begin -->", "<!-- published: end -->"
TRACED = ("model", "gpus", "layout", "activation_checkpointing", "local_batch", "seq", "args", "source", "compile")
TRACED += ("pp_schedule", "hardware", "lora", "grad_accum")
GIB = 2**30
SPEED = "tokens_per_s_per_gpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "published.json")
    parser.add_argument("--rows", nargs="*", type=int, help="by their place in the file; default: all")
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--traces", type=Path, help="a directory that keeps traces, to play them again")
    given = parser.parse_args()
    rows = json.loads(given.file.read_text())
    for number, row in enumerate(rows):
        if given.table or (given.rows is not None and number not in given.rows):
            continue
        if (why := left_out(row)) is not None:
            print(number, title(row), "left out:", why, flush=True)
            continue
        begin = time.perf_counter()
        try:
            found = planned(row, given.traces)
        except Exception as error:  # a row that cannot be planned is reported in the table
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
        print(number, title(row), found, f"{time.perf_counter() - begin:.0f} s", flush=True)
        FOUND.write_text(json.dumps({**known(), key(row): found}, indent=1) + "\n")
    planned_now = {key(row) for row in rows if left_out(row) is None}
    write(rows, {name: plan for name, plan in known().items() if name in planned_now})


def known() -> dict[str, Any]:
    """What was found before, by `key`."""
    return json.loads(FOUND.read_text()) if FOUND.exists() else {}


def key(row: Mapping[str, Any]) -> str:
    """The same for a row wherever it stands."""
    reported = [str(row.get(name)) for name in ("local_batch", "seq", "compile", "async_tp", "pp_schedule")]
    return " ".join([title(row), *reported, row["hardware"].split(",")[0]])


def title(row: Mapping[str, Any]) -> str:
    layout = " ".join(f"{k}={v}" for k, v in row["layout"].items() if not isinstance(v, bool) and v > 1)
    return f"{row['model']} x {row.get('gpus')}: {layout}, {row.get('activation_checkpointing')}, {row['precision']}"


def planned(row: Mapping[str, Any], kept: Path | None = None) -> dict[str, Any]:
    """What the plan says of a row, in the units of the row."""
    device = load_device_spec(next(name for text, name in DEVICES.items() if row["hardware"].startswith(text)))
    depths = traced_depths(row)
    numbers = [_numbers(row, layers, device, kept) for layers in depths]
    if len(numbers) > 1:
        part = (blocks(row) - depths[0]) / (depths[1] - depths[0])
        numbers = [[a + (b - a) * part for a, b in zip(*numbers, strict=True)]]
    allocated, held, taken, seconds, busy, tokens = numbers[0]
    if row["layout"]["pp"] > 1 and not is_megatron(row) and not is_automodel(row):
        allocated, held, taken = _staged(row, device)
    return {
        "allocated_gib": round(allocated / GIB, 2),
        "held_gib": round(held / GIB, 2),
        "reserved_gib": round(taken / GIB, 2),
        "tokens_per_s_per_gpu": round(tokens / seconds, 1),
        "compute_busy": round(busy / seconds, 3),
        "fits": taken < device.memory_bytes - 2 * GIB,
    }


def _staged(row: Mapping[str, Any], device: DeviceSpec) -> list[int]:
    """Bytes at the peak, between steps and reserved, of a pipeline whose stages are too deep to be traced."""
    reported = {name: row[name] for name in TRACED if name in row}
    job = job_of(reported, blocks(row))
    job = replace(job, num_layers=blocks(row), build_with_layers=lambda layers: job_of(reported, layers).build_model())
    with running(reported):
        found = plan_of(job, device, [0, job.degrees.world_size * (job.degrees.pp - 1) // job.degrees.pp])
    return [found[name] for name in ("peak_allocated_bytes", "persistent_bytes", "peak_reserved_bytes")]


def _numbers(row: Mapping[str, Any], layers: int, device: DeviceSpec, kept: Path | None) -> list[float]:
    """Bytes at the peak, between steps and reserved, seconds of the step and of computing, tokens of each rank."""
    reported = {name: row[name] for name in TRACED if name in row}
    job, traces = traced(json.dumps(reported), layers, kept)
    entries = vocabulary(row) // job.degrees.tp
    timed = list(traces)
    if "float8" in row["precision"]:
        timed = [in_float8(each, entries, gathers=gathers_in_float8(row)) for each in traces]
    chunked = ["tp"] if row.get("async_tp") else []
    # Torchtitan has asynchronous tensor parallelism for compiled blocks alone.
    is_compiled = bool(row.get("compile") or row.get("async_tp")) or fuses(row)
    lines = simulate_timelines(timed, job.degrees, device, is_compiled=is_compiled, chunked_groups=chunked)
    # Megatron's last rank writes the figures.
    last = traces[-1]
    taken = max(compute_reserved_bytes(each, workspace=device.workspace_bytes) for each in traces)
    tokens = job.num_microbatches * job.micro_batch_size * job.seq_len * job.degrees.dp / job.degrees.world_size
    seconds = max(each.seconds for each in lines)
    return [last.peak.bytes, last.between_steps.bytes, taken, seconds, lines[-1].busy_seconds(), tokens]


@functools.lru_cache(maxsize=2)
def traced(row: str, layers: int, kept: Path | None = None) -> tuple[TrainingJob, list[StepTrace]]:
    """Rows that differ in precision alone follow each other, and have one trace."""
    reported = json.loads(row)
    job = job_of(reported, layers)
    path = kept and kept / f"{hashlib.sha256(row.encode()).hexdigest()[:16]}-{layers}.pickle"
    if path and path.exists():
        return job, pickle.loads(path.read_bytes())
    with running(reported):
        traces = [trace_rank(job, rank) for rank in find_pipeline_ranks(0, job.degrees)]
    if path:
        path.write_bytes(pickle.dumps(traces))
    return job, traces


def in_float8(trace: StepTrace, vocabulary: int, *, gathers: bool) -> StepTrace:
    """The same with products of blocks in float8: operands are read for their largest value, and cast.

    Args:
        gathers: whether weights of blocks, and what products are given, are gathered in float8, too.
    """

    def changed() -> Iterator[Operation]:
        for number, each in enumerate(trace.operations):
            is_product = each.name.startswith(("aten.mm", "aten.addmm")) and each.flops > 0
            if not is_product or any(vocabulary in shape for shape in each.shapes):
                yield each
                continue
            casts = []
            for place, (block, size) in enumerate(each.reads):
                cast = -(4 * number + place + 2)
                yield replace(
                    each, name="amax", flops=0, reads=((block, size),), writes=((cast * 2, 4),), collective_index=None
                )
                casts.append((cast * 2 + 1, size // 2))
                yield replace(
                    each, name="cast", flops=0, reads=((block, size),), writes=(casts[-1],), collective_index=None
                )
            yield replace(each, dtype=torch.float8_e4m3fn, reads=tuple(casts))

    calls = list(trace.collectives)
    for call in _gathered_for_products(trace) if gathers else ():
        calls[call] = replace(calls[call], nbytes=calls[call].nbytes // 2)
    return replace(trace, operations=tuple(changed()), collectives=tuple(calls))


def _gathered_for_products(trace: StepTrace) -> list[int]:
    """Numbers of the all-gathers of what is given to products of blocks: of weights by FSDP, except for those of the
    root, which are not as large as others; and of sequences, except for their gradients, which are turned for a
    product."""
    weights, found = Counter[int](), []
    for each in trace.operations:
        if each.name.startswith("c10d._allgather_base_") and each.collective_index is not None:
            weights[trace.collectives[each.collective_index].nbytes] += 1
    size_of_block = weights.most_common(1)[0][0] if weights else 0
    waiting: dict[int, int] = {}
    for each in trace.operations:
        call = trace.collectives[each.collective_index] if each.collective_index is not None else None
        if call is not None and call.kind == "all_gather" and each.collective_index is not None:
            if call.group == "tp":
                waiting |= dict.fromkeys((block for block, _ in each.writes), each.collective_index)
            elif each.name.startswith("c10d._allgather_base_") and call.nbytes == size_of_block:
                found.append(each.collective_index)
        elif each.name.startswith("aten.cat"):
            known = [waiting[block] for block, _ in each.reads if block in waiting]
            waiting |= {block: known[0] for block, _ in each.writes if known}
        elif each.flops and each.reads and (number := waiting.pop(each.reads[0][0], None)) is not None:
            rows, columns = each.shapes[0][-2:]
            found += [number] if rows > columns else []
    return found


def gathers_in_float8(row: Mapping[str, Any]) -> bool:
    """By tensors, torchao gathers in float8 what products are given; and weights, as torchtitan's guide says to do."""
    return "float8" in row["precision"] and "rowwise" not in row["precision"]


def write(rows: list[dict[str, Any]], found: Mapping[str, Any]) -> None:
    """The tables of all rows, into the page."""
    memory = [row for row in rows if is_megatron(row)]
    others = [row for row in rows if not is_megatron(row)]
    parts = [
        summary(rows, found),
        "Reserved memory [GiB] and tokens a second and GPU, published and planned:",
        table(others, found, [("reserved_gib", "memory_gib"), ("tokens_per_s_per_gpu", "tokens_per_s_per_gpu")]),
        "Memory allocated at the peak and between steps [GiB] of Megatron-LM, and seconds of a step as tokens a second "
        "and GPU:",
        table(memory, found, [("allocated_gib", "memory_gib"), ("held_gib", "held_gib"), (SPEED, SPEED)]),
    ]
    text = PAGE.read_text()
    before, behind = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + "\n\n" + "\n\n".join(parts) + "\n\n" + behind)


def table(rows: list[dict[str, Any]], found: Mapping[str, Any], columns: list[tuple[str, str]]) -> str:
    """A line for each row: of each column what is published, what is planned, and by how much that is off."""
    head = [f"{name.removesuffix('_gib').replace('_', ' ')} | planned | off" for name, _ in columns]
    lines = [f"| run | {' | '.join(head)} |", "| --- |" + " ---: | ---: | ---: |" * len(columns)]
    for row in rows:
        plan = found.get(key(row), {"error": left_out(row) or "not run yet"})
        cells = []
        for place, (mine, theirs) in enumerate(columns):
            reported = published(row, theirs)
            value = plan.get(mine, plan.get("error", "") if not place else None)
            fits = "" if plan.get("fits", True) or place else " (does not fit)"
            out = "out of memory" if row.get("out_of_memory") and not place else cell(reported)
            cells += [out, f"{cell(value)}{fits}", off(value, reported)]
        more = [f"{row.get('local_batch')} x {row['seq']}", "compiled" if row.get("compile") else ""]
        more += ["async tp" if row.get("async_tp") else "", row["hardware"].split(",")[0]]
        lines.append(f"| {title(row)}, {', '.join(filter(None, more))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def published(row: Mapping[str, Any], name: str) -> float | None:
    """A figure of a row."""
    if name == "held_gib":
        return round(row["memory_after_step_bytes"] / GIB, 2)
    if name == SPEED and "iteration_s" in row and row.get("gpus"):
        return round(row["args"]["global-batch-size"] * row["seq"] / row["iteration_s"] / row["gpus"], 1)
    return row.get(name)


def summary(rows: list[dict[str, Any]], found: Mapping[str, Any]) -> str:
    """How many are as near as they should be."""
    plans = [(row, found[key(row)]) for row in rows if "error" not in found.get(key(row), {"error": ""})]
    held = [abs(plan["held_gib"] / published(row, "held_gib") - 1) <= 0.05 for row, plan in plans if is_megatron(row)]
    peak = [abs(plan["allocated_gib"] / row["memory_gib"] - 1) <= 0.1 for row, plan in plans if is_megatron(row)]
    plans = [(row, plan) for row, plan in plans if not is_megatron(row)]
    memory = [abs(plan["reserved_gib"] / row["memory_gib"] - 1) <= 0.1 for row, plan in plans if row.get("memory_gib")]
    pairs = []
    for place, (row, plan) in enumerate(plans):
        for other, theirs in plans[:place]:
            alike = all(row[name] == other[name] for name in ("model", "gpus", "precision"))
            mine, its = row.get(SPEED), other.get(SPEED)
            if alike and row["hardware"] == other["hardware"] and mine and its and abs(mine / its - 1) > 0.1:
                pairs.append((mine > its) == (plan["tokens_per_s_per_gpu"] > theirs["tokens_per_s_per_gpu"]))
    return (
        f"{len(plans) + len(held)} of {len(rows)} rows are planned. Reserved memory is within 10 % on {sum(memory)} of "
        f"{len(memory)}. Of {len(pairs)} pairs of one model, number of GPUs and precision whose throughput differs by "
        f"more than 10 %, {sum(pairs)} have the faster first. Of {len(held)} rows of Megatron-LM, {sum(held)} "
        f"hold what they should within 5 %, and {sum(peak)} have their peak within 10 %."
    )


def cell(value: float | str | None) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:g}"


def off(planned: Any, reported: float | None) -> str:
    return f"{planned / reported - 1:+.1%}" if reported and isinstance(planned, float) else ""


if __name__ == "__main__":
    main()
