"""What failures leave of a fleet's time: goodput over the save interval, for restarts that take longer or less long,
with copies in the memory of other nodes and without, of two runs; and the point of Llama 3.

python benchmarks/goodput.py             # a minute; results/goodput.json and docs/images/goodput.png
python benchmarks/goodput.py --draw      # the picture of what is there

Of 70B on 1,024 GPUs, what a step takes and what is saved are what `meshwright plan` says. Of Llama 3 405B on 16,384
they are those of its report: a step at the rate that it had, and 4 GB of each rank, the most that it names.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from common import origin
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from meshwright.base.validation import validate_config
from meshwright_plan.config import PlanConfig, load_device_spec
from meshwright_plan.goodput.advice import (
    ASSUMED_DETECTION_S,
    REPLICA_LINK_FRACTION,
    choose_replica_schedule,
    compute_checkpoint_costs,
)
from meshwright_plan.goodput.simulation import (
    DAY,
    HOUR,
    CheckpointSchedule,
    FailureScenario,
    ReplicaSchedule,
    compute_goodput,
    daly_interval,
    find_best_interval,
    simulate,
)
from meshwright_plan.planner import build_job, plan_job
from meshwright_run.run_file import RunConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "goodput.json"
PICTURE = ROOT / "docs" / "images" / "goodput.png"
ASKED = PlanConfig()
DEVICE = load_device_spec("h100-80gb")
RESTARTS = (60.0, 300.0, 900.0)
FAILURES, RUNS = 1500, 64
"""Of a simulated run, on the average, and how many of them there are."""
INTERVALS = np.geomspace(35, 12 * HOUR, 40)
"""Between saves [s]."""
LLAMA_3 = {
    "days": 54,
    "ranks": 16_384,
    "unexpected": 419,
    "planned": 47,
    "effective": 0.9,
    "rank_bytes": 4e9,
    "flops_of_a_rank": 400e12,
    "parameters": 405.85e9,
    "tokens": 2048 * 8192,
}
"""The Llama 3 Herd of Models, arXiv:2407.21783, sections 3.3.1 (bytes), 3.3.2 (rate) and 3.3.4. More than that part of
the time was effective."""
RUN: dict[str, Any] = {
    "strategy": "fsdp2",
    "model": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "dtype": "float32",
    },
    "data": {"seq_len": 8192},
    "steps": 1,
    "batch_size": 1024,
    "micro_batch_size": 1,
    "strategy_config": {
        "activation_checkpointing": "full",
        "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    },
}
PLANNED = 1_024
RANKS = (PLANNED, LLAMA_3["ranks"])
COLOURS = ("#2f8f6b", "#3f6fc4", "#d9822b")
TEXT, QUIET, LINE, LIMIT = "#1c2330", "#586173", "#d5dae1", "#b3261e"


def planned_fleet() -> tuple[FailureScenario, ReplicaSchedule]:
    """A run on 1,024 ranks, by its plan."""
    job = build_job(validate_config(RunConfig, RUN, where="the run"), PLANNED)
    found = plan_job(job, DEVICE, [0])
    took = compute_checkpoint_costs(job, DEVICE, found, ASKED)
    return _fleet(PLANNED, found["step_seconds"], took.checkpoints), took.replicas


def published_fleet() -> tuple[FailureScenario, ReplicaSchedule]:
    """Llama 3, by its report."""
    ranks, size, link = LLAMA_3["ranks"], LLAMA_3["rank_bytes"], DEVICE.node.inter_node.effective_bandwidth
    step_s = 6 * LLAMA_3["parameters"] * LLAMA_3["tokens"] / LLAMA_3["flops_of_a_rank"] / ranks
    on_disk = max(size * DEVICE.node.ranks / ASKED.disk_bandwidth, size * ranks / ASKED.disk_bandwidth_total)
    hold = size / ASKED.device_to_host_bandwidth
    copies = ReplicaSchedule(1, hold, size / (link * REPLICA_LINK_FRACTION), size / link)
    return _fleet(int(ranks), step_s, CheckpointSchedule(1, hold, on_disk, on_disk)), copies


def _fleet(ranks: int, step_s: float, saves: CheckpointSchedule) -> FailureScenario:
    rate, seconds = ASKED.failures_per_rank_hour, (ASSUMED_DETECTION_S, ASKED.restart_s)
    return FailureScenario(ranks, DEVICE.node.ranks, step_s, saves, rate, *seconds)


def curve(fleet: FailureScenario, copies: ReplicaSchedule | None) -> dict[str, Any]:
    """Goodput over the save interval, where it is best, and where the formulas say."""
    if copies is None:
        every, reported = 1, find_best_interval(fleet)
    else:
        copies, reported = choose_replica_schedule(fleet, copies)
        every = copies.every
    wanted = sorted({max(1, round(each / fleet.step_s / every)) * every for each in INTERVALS} | {reported})
    fleets = [replace(fleet, replicas=copies, checkpoints=replace(fleet.checkpoints, every=each)) for each in wanted]
    found = simulate(fleets, FAILURES * fleet.mtbf_s, num_runs=RUNS)
    best = int(found.goodput.argmax())
    return {
        "ranks": fleet.ranks,
        "restart_s": fleet.restart_s,
        "replicated_every": None if copies is None else every,
        "every": wanted,
        "goodput": [round(float(each), 5) for each in found.goodput],
        "error": round(float(found.standard_error.max()), 6),
        "closed_form": None if copies is not None else [round(compute_goodput(each), 5) for each in fleets],
        "from_disk": round(float(found.disk_restores.sum() / found.failures.sum()), 4),
        "recommended": {"every": reported, "goodput": round(float(found.goodput[wanted.index(reported)]), 5)},
        "best": {"every": wanted[best], "goodput": round(float(found.goodput[best]), 5)},
    }


def llama_3(fleet: FailureScenario, copies: ReplicaSchedule) -> dict[str, Any]:
    """Whether their effective time is what the simulation has, and how long a restart may take for it.

    Planned interruptions count as failures, too.
    """
    rate = fleet.failures_per_rank_hour * (1 + LLAMA_3["planned"] / LLAMA_3["unexpected"])
    fleet = replace(fleet, failures_per_rank_hour=rate)
    best = replace(fleet, checkpoints=replace(fleet.checkpoints, every=find_best_interval(fleet)))
    least, most = 0.0, HOUR
    while most - least > 1:
        middle = (least + most) / 2
        is_enough = compute_goodput(replace(best, restart_s=middle)) > LLAMA_3["effective"]
        least, most = (middle, most) if is_enough else (least, middle)
    held, rare = choose_replica_schedule(fleet, copies)
    settings = {
        "as assumed": best,
        "as assumed, copied": replace(fleet, replicas=held, checkpoints=replace(fleet.checkpoints, every=rare)),
        "saved each hour": replace(fleet, checkpoints=replace(fleet.checkpoints, every=round(HOUR / fleet.step_s))),
        "the longest restart": replace(best, restart_s=round(least)),
    }
    found = simulate([*settings.values()], LLAMA_3["days"] * DAY, num_runs=400)
    return {
        **LLAMA_3,
        "mtbf_hours": fleet.mtbf_s / HOUR,
        "failures": round(float(found.failures[0].mean()), 1),
        "settings": {
            name: {
                "every": each.checkpoints.every,
                "replicated_every": None if each.replicas is None else each.replicas.every,
                "restart_s": each.restart_s,
                "goodput": round(float(found.goodput[place]), 5),
                "of_runs": [round(float(x), 5) for x in np.quantile(found.parts["useful"][place], (0.05, 0.95))],
                "parts": {part: round(value, 5) for part, value in found.mean_parts(place).items()},
            }
            for place, (name, each) in enumerate(settings.items())
        },
    }


def measure() -> dict[str, Any]:
    fleets = dict(zip(RANKS, (planned_fleet(), published_fleet()), strict=True))
    curves = []
    for fleet, copies in fleets.values():
        for restart_s in RESTARTS:
            slower = replace(fleet, restart_s=restart_s)
            curves += [curve(slower, None), curve(slower, copies)]
    return {
        **origin(),
        "fleets": {
            str(ranks): {
                **asdict(replace(fleet, restart_s=0.0)),
                "replicas": asdict(copies),
                "mtbf_hours": fleet.mtbf_s / HOUR,
                "daly_s": daly_interval(fleet.checkpoints.blocking_s, fleet.mtbf_s),
            }
            for ranks, (fleet, copies) in fleets.items()
        },
        "curves": curves,
        "llama_3": llama_3(*fleets[RANKS[1]]),
    }


# -- the picture


def draw(content: Mapping[str, Any], path: Path = PICTURE) -> None:
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        figure = Figure(figsize=(10.0, 4.6), facecolor="white")
        for place, ranks in enumerate(RANKS):
            axes = figure.add_axes((0.062 + 0.497 * place, 0.245, 0.43, 0.6))
            _panel(axes, content, ranks)
        _legend(figure)
        figure.savefig(path, dpi=130)
    # So few colours are in none of it that more would be seen.
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def _panel(axes: Axes, content: Mapping[str, Any], ranks: int) -> None:
    fleet = content["fleets"][str(ranks)]
    minutes = fleet["step_s"] / 60
    for found in content["curves"]:
        if found["ranks"] != ranks:
            continue
        colour = COLOURS[RESTARTS.index(found["restart_s"])]
        is_copied = found["replicated_every"] is not None
        times = [each * minutes for each in found["every"]]
        axes.plot(times, found["goodput"], color=colour, lw=1.8, ls=(0, (4, 2)) if is_copied else "-")
        reported, best = found["recommended"], found["best"]
        axes.plot(best["every"] * minutes, best["goodput"], "o", ms=8, mfc="white", mec=colour, mew=1.5, zorder=4)
        axes.plot(reported["every"] * minutes, reported["goodput"], "|", ms=10, mew=2.2, color=TEXT, zorder=5)
    if ranks == LLAMA_3["ranks"]:
        axes.axhline(LLAMA_3["effective"], color=LIMIT, lw=1.0, ls=":")
        axes.text(0.56, LLAMA_3["effective"] - 0.034, "Llama 3: above this line", fontsize=8.5, color=LIMIT)
    axes.set_xscale("log")
    axes.set_xlim(0.5, 760)
    axes.set_ylim((0.55, 1.006) if ranks == RANKS[1] else (0.86, 1.002))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xticks([1, 3, 10, 30, 60, 180, 720], ["1 min", "3", "10", "30", "1 h", "3 h", "12 h"])
    axes.minorticks_off()
    axes.tick_params(length=0, colors=QUIET, labelsize=9)
    axes.grid(color=LINE, lw=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)
    axes.set_xlabel("time between checkpoints", fontsize=9, color=QUIET)
    axes.text(
        0,
        1.115,
        f"{'70B' if ranks == PLANNED else 'Llama 3 405B'} on {ranks:,} ranks",
        transform=axes.transAxes,
        fontsize=11,
        weight="bold",
        color=TEXT,
    )
    below = f"goodput; a failure every {fleet['mtbf_hours']:.2g} h"
    axes.text(0, 1.04, below, transform=axes.transAxes, fontsize=9, color=QUIET)


def _legend(figure: Figure) -> None:
    lines = [
        Line2D([], [], color=colour, lw=2, label=f"restart takes {_minutes(seconds)}")
        for seconds, colour in zip(RESTARTS, COLOURS, strict=True)
    ]
    marks = [
        Line2D([], [], color=QUIET, lw=1.8, label="checkpoints only"),
        Line2D([], [], color=QUIET, lw=1.8, ls=(0, (4, 2)), label="with replicas in memory"),
        Line2D([], [], color=TEXT, ls="", marker="|", ms=10, mew=2.2, label="Daly's interval: recommended"),
        Line2D([], [], color=QUIET, ls="", marker="o", ms=8, mfc="white", mew=1.5, label="best in the simulation"),
    ]
    for handles, height in ((lines, 0.075), (marks, 0.012)):
        figure.legend(
            handles=handles,
            loc="lower center",
            bbox_to_anchor=(0.5, height),
            ncols=len(handles),
            fontsize=9,
            frameon=False,
            labelcolor=TEXT,
        )


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only the picture")
    if not parser.parse_args().draw:
        RESULTS.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
    draw(json.loads(RESULTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
