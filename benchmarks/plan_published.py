"""Plans against what others have published: memory and throughput of their runs.

    python benchmarks/plan_published.py                 # all rows of published.json that are planned
    python benchmarks/plan_published.py --rows 0 4      # some of them
    python benchmarks/plan_published.py --table         # write the table from what was found before

What is found goes to results/plan_published.json, and the table into docs/plan.md.

Models are made with few blocks, at two depths; memory and time of a step are linear in the number of blocks.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.mesh.sizes import MeshSizes
from meshwright.plan.allocator import reserved
from meshwright.plan.device import find_device
from meshwright.plan.report import trace_rank
from meshwright.plan.time import play
from meshwright.plan.trace import Job, Operation, Trace
from meshwright.strategy.stack import resolve
from meshwright.train.optim import optimizer_factory
from meshwright.train.optimizer_config import OptimizerConfig

HERE = Path(__file__).parent
FOUND = HERE / "results" / "plan_published.json"
PAGE = HERE.parent / "docs" / "plan.md"
BEGIN, END = "<!-- published: begin -->", "<!-- published: end -->"
DEPTHS = (4, 8)
TRACED = ("model", "gpus", "layout", "activation_checkpointing", "local_batch", "seq")
GIB = 2**30

LLAMA = {"llama3-8b": (4096, 14336, 32, 32, 8, 128256), "llama3-70b": (8192, 28672, 80, 64, 8, 128256)}
LLAMA |= {"llama3.1-8b": LLAMA["llama3-8b"], "llama3.1-70b": LLAMA["llama3-70b"]}
LLAMA |= {"llama3.1-405b": (16384, 53248, 126, 128, 8, 128256)}
LLAMA |= {"llama2-13b": (5120, 13824, 40, 40, 40, 32000), "llama2-70b": (8192, 28672, 80, 64, 8, 32000)}
"""Hidden and intermediate size, blocks, heads, heads of keys, vocabulary: from the models' cards."""

DEVICES = {"H100 SXM HBM2e": "h100-96gb", "H100 94GB": "h100-96gb", "H200": "h200", "A100 80GB": "a100-80gb"}
CHECKPOINTING = {"none": False, "full": "full", "selective_op": "selective", "selective_layer": "selective"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "published.json")
    parser.add_argument("--rows", nargs="*", type=int, help="by their place in the file; default: all")
    parser.add_argument("--table", action="store_true", help="only write the table")
    given = parser.parse_args()
    rows = json.loads(given.file.read_text())
    found: dict[str, Any] = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    for number, row in enumerate(rows):
        if given.table or (given.rows is not None and number not in given.rows):
            continue
        if (why := left_out(row)) is not None:
            print(number, title(row), "left out:", why, flush=True)
            continue
        begin = time.perf_counter()
        try:
            found[key(row)] = planned(row)
        except Exception as error:  # a row that cannot be planned is told in the table
            found[key(row)] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
        print(number, title(row), found[key(row)], f"{time.perf_counter() - begin:.0f} s", flush=True)
        FOUND.write_text(json.dumps(found, indent=1) + "\n")
    if PAGE.exists():
        write(rows, found)


def key(row: Mapping[str, Any]) -> str:
    """The same for a row wherever it stands."""
    told = [str(row.get(name)) for name in ("local_batch", "seq", "compile", "async_tp")]
    return " ".join([title(row), *told, row["hardware"].split(",")[0]])


def title(row: Mapping[str, Any]) -> str:
    layout = " ".join(f"{k}={v}" for k, v in row["layout"].items() if not isinstance(v, bool) and v > 1)
    return f"{row['model']} x {row.get('gpus')}: {layout}, {row.get('activation_checkpointing')}, {row['precision']}"


def left_out(row: Mapping[str, Any]) -> str | None:
    """Why a row is not planned."""
    if row["model"] not in LLAMA:
        return "not of torchtitan"
    if row["layout"]["pp"] > 1:
        return "pipelines: all stages have to be traced"
    return None


def job_of(row: Mapping[str, Any], layers: int) -> Job:
    layout = row["layout"]
    sizes = {f"{axis}_size": layout.get(axis, 1) for axis in ("tp", "pp", "cp")} | {"dp_size": layout["dp_shard"]}
    checkpointing = CHECKPOINTING[row["activation_checkpointing"].split(" ")[0]]
    config = {
        "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        # They compute all logits at once, where ranks share the vocabulary each its part.
        "loss_chunk_rows": row["local_batch"] * row["seq"] if layout["tp"] > 1 else 0,
        "activation_checkpointing": checkpointing,
        "sequence_parallel": layout.get("sequence_parallel", layout["tp"] > 1),
    }
    stack, degrees = resolve("fsdp2", MeshSizes(**sizes), row["gpus"], config=config)
    make = functools.partial(model, row["model"], layers)
    factory = optimizer_factory(OptimizerConfig(lr=1e-4))
    return Job(stack, degrees, make, factory, rows=row["local_batch"], length=row["seq"])


def model(name: str, layers: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    hidden, inner, _, heads, key_heads, vocabulary = LLAMA[name]
    config = AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        max_position_embeddings=1 << 19,
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def planned(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the plan says of a row, in the units of the row."""
    device = find_device(next(name for text, name in DEVICES.items() if row["hardware"].startswith(text)))
    numbers = []
    for layers in DEPTHS:
        job, trace = traced(json.dumps({name: row[name] for name in TRACED}), layers)
        timed = in_float8(trace, LLAMA[row["model"]][-1] // job.degrees.tp) if "float8" in row["precision"] else trace
        chunked = ["tp"] if row.get("async_tp") else []
        line = play([timed], job.degrees, device, is_compiled=bool(row.get("compile")), chunked=chunked)[0]
        sizes = (trace.peak.bytes, reserved(trace, workspace=device.workspace_bytes))
        numbers.append((*sizes, line.seconds, line.busy()))
    depth = LLAMA[row["model"]][2]
    grown = [a + (b - a) * (depth - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0]) for a, b in zip(*numbers, strict=True)]
    allocated, taken, seconds, busy = grown
    tokens = job.rows * job.length * job.degrees.dp / row["gpus"] / seconds
    return {
        "allocated_gib": round(allocated / GIB, 2),
        "reserved_gib": round(taken / GIB, 2),
        "tokens_per_s_per_gpu": round(tokens, 1),
        "compute_busy": round(busy / seconds, 3),
        "fits": taken < device.memory_bytes - 2 * GIB,
    }


@functools.lru_cache(maxsize=len(DEPTHS))
def traced(row: str, layers: int) -> tuple[Job, Trace]:
    """Rows that differ in precision and compilation alone follow each other, and have one trace."""
    job = job_of(json.loads(row), layers)
    return job, trace_rank(job, 0)


def in_float8(trace: Trace, vocabulary: int) -> Trace:
    """The same with products of blocks in float8: operands are read for their largest value, and cast."""

    def changed() -> Iterator[Operation]:
        for number, each in enumerate(trace.operations):
            is_product = each.name.startswith(("aten.mm", "aten.addmm")) and each.flops > 0
            if not is_product or any(vocabulary in shape for shape in each.shapes):
                yield each
                continue
            casts = []
            for place, (block, size) in enumerate(each.reads):
                cast = -(4 * number + place + 2)
                yield replace(each, name="amax", flops=0, reads=((block, size),), writes=((cast * 2, 4),), call=None)
                casts.append((cast * 2 + 1, size // 2))
                yield replace(each, name="cast", flops=0, reads=((block, size),), writes=(casts[-1],), call=None)
            yield replace(each, dtype=torch.float8_e4m3fn, reads=tuple(casts))

    return replace(trace, operations=tuple(changed()))


def write(rows: list[dict[str, Any]], found: Mapping[str, Any]) -> None:
    """The table of all rows, into the page."""
    lines = [
        "| run | published GiB | reserved | off | published tokens/s/GPU | planned | off |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        plan = found.get(key(row), {"error": left_out(row) or "not run"})
        more = [f"{row.get('local_batch')} x {row['seq']}", "compiled" if row.get("compile") else ""]
        more += ["async tp" if row.get("async_tp") else "", row["hardware"].split(",")[0]]
        name = f"{title(row)}, {', '.join(filter(None, more))}"
        if "error" in plan:
            lines.append(f"| {name} | {cell(row.get('memory_gib'))} | | | {cell(speed(row))} | {plan['error']} | |")
            continue
        memory, tokens = plan["reserved_gib"], plan["tokens_per_s_per_gpu"]
        fits = "" if plan["fits"] else " (does not fit)"
        told = "out of memory" if row.get("out_of_memory") else cell(row.get("memory_gib"))
        parts = [told, f"{memory}{fits}", off(memory, row.get("memory_gib"))]
        parts += [cell(speed(row)), cell(tokens), off(tokens, speed(row))]
        lines.append(f"| {name} | {' | '.join(parts)} |")
    text = PAGE.read_text()
    before, behind = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(f"{before}\n{summary(rows, found)}\n\n" + "\n".join(lines) + f"\n{behind}")


def speed(row: Mapping[str, Any]) -> float | None:
    return row.get("tokens_per_s_per_gpu")


def summary(rows: list[dict[str, Any]], found: Mapping[str, Any]) -> str:
    """How many are as near as they should be."""
    plans = [(row, found[key(row)]) for row in rows if "error" not in found.get(key(row), {"error": ""})]
    memory = [abs(plan["reserved_gib"] / row["memory_gib"] - 1) <= 0.1 for row, plan in plans if row.get("memory_gib")]
    pairs = []
    for place, (row, plan) in enumerate(plans):
        for other, theirs in plans[:place]:
            alike = all(row[name] == other[name] for name in ("model", "gpus", "precision"))
            mine, its = speed(row), speed(other)
            if alike and row["hardware"] == other["hardware"] and mine and its and abs(mine / its - 1) > 0.1:
                pairs.append((mine > its) == (plan["tokens_per_s_per_gpu"] > theirs["tokens_per_s_per_gpu"]))
    return (
        f"{len(plans)} of {len(rows)} rows are planned. Reserved memory is within 10 % on {sum(memory)} of "
        f"{len(memory)}. Of {len(pairs)} pairs of one model, number of GPUs and precision whose throughput differs by "
        f"more than 10 %, {sum(pairs)} have the faster first."
    )


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def off(planned: float, published: float | None) -> str:
    return "" if published is None else f"{planned / published - 1:+.1%}"


if __name__ == "__main__":
    main()
