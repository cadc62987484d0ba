"""Plans by a calibrated device file against steps on the machine that was calibrated.

    python benchmarks/plan_calibrated.py              # calibrate, plan and measure; half an hour
    python benchmarks/plan_calibrated.py --ranks 4    # the same for layouts of four ranks alone
    python benchmarks/plan_calibrated.py --table      # write the table from what was found before

For each number of ranks the same processes calibrate, and then step all layouts in turns, so that whatever else the
machine does falls on all alike. What is found goes to results/plan_calibrated.json, and the table into
docs/reference/plan.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import llama, origin
from torch import nn
from transformers import AutoModelForCausalLM

from meshwright.base.validation import validate_config
from meshwright.launch.open_world import open_world
from meshwright.mesh.mesh import Mesh
from meshwright.mesh.sizes import MeshSizes
from meshwright.mesh.world import World
from meshwright.optim.build import optimizer_factory
from meshwright.optim.config import OptimizerConfig
from meshwright.strategy.stack import resolve
from meshwright_plan.calibration.calibrate import calibrate
from meshwright_plan.calibration.measure import MeasurementBudget
from meshwright_plan.config import DeviceSpec
from meshwright_plan.planner import trace_rank
from meshwright_plan.timeline import find_pipeline_ranks, simulate_timelines
from meshwright_plan.trace import TrainingJob
from meshwright_testing.workers import pool

HERE = Path(__file__).parent
FOUND = HERE / "results" / "plan_calibrated.json"
PAGE = HERE.parent / "docs" / "reference" / "plan.md"
BEGIN, END = "<!-- calibrated: begin -->", "<!-- calibrated: end -->"
LIMIT_S = 1800.0


@dataclass(frozen=True)
class Layout:
    """One run that is planned and measured.

    Attributes:
        rows: of a microbatch, of which each rank has two.
    """

    strategy: str
    ranks: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    hidden: int = 512
    blocks: int = 4
    length: int = 512
    rows: int = 1

    def __str__(self) -> str:
        axes = "".join(f", {name.removesuffix('_size')} {size}" for name, size in self.sizes.items())
        sizes = f"{self.blocks} blocks of {self.hidden}, 2 x {self.length} tokens"
        return f"{self.strategy}{axes} on {self.ranks} ranks, {sizes}"

    def job(self, make: Callable[[Layout], nn.Module]) -> TrainingJob:
        stack, degrees = resolve(self.strategy, MeshSizes(**self.sizes), self.ranks, config={}, wrapper_config=None)
        factory = optimizer_factory(OptimizerConfig(lr=1e-4))
        return TrainingJob(stack, degrees, functools.partial(make, self), factory, 2, self.rows, self.length)


LAYOUTS = (
    Layout("fsdp2", 2),
    Layout("ddp", 2),
    Layout("fsdp2", 2, {"tp_size": 2}),
    Layout("fsdp2", 2, {"pp_size": 2}),
    Layout("fsdp2", 2, hidden=1024, blocks=2),
    Layout("ddp", 2, hidden=768, length=1024),
    Layout("fsdp2", 4),
    Layout("ddp", 4),
    Layout("fsdp2", 4, {"tp_size": 2}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="only write the table")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--passes", type=int, default=3, help="of the calibration")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--json", type=Path, default=FOUND)
    given = parser.parse_args()
    if not given.table:
        for ranks in given.ranks:
            found = {**known(given.json), str(ranks): {**origin(), **_of_ranks(ranks, given.rounds, given.passes)}}
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    text = table(json.loads(given.json.read_text()))
    print(text)
    if given.json == FOUND:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def known(path: Path) -> dict[str, Any]:
    """What was found before, by the number of ranks."""
    return json.loads(path.read_text()) if path.exists() else {}


def _of_ranks(ranks: int, rounds: int, passes: int) -> dict[str, Any]:
    """Everything of one number of ranks."""
    layouts = [each for each in LAYOUTS if each.ranks == ranks]
    values, seconds = pool(ranks).run(_measured, layouts, rounds, passes, timeout_s=LIMIT_S)[0]
    device = validate_config(DeviceSpec, values, where="what was measured")
    rows = []
    for layout, measured in zip(layouts, seconds, strict=True):
        rows.append({"layout": str(layout), **planned(layout, device), "measured_s": measured})
        print(rows[-1], flush=True)
    return {"rounds": rounds, "device": values, "rows": rows}


def planned(layout: Layout, device: DeviceSpec) -> dict[str, Any]:
    """What the plan says of a step."""
    job = layout.job(_on_meta)
    traces = [trace_rank(job, rank) for rank in find_pipeline_ranks(0, job.degrees)]
    lines = simulate_timelines(traces, job.degrees, device)
    slowest = max(lines, key=lambda line: line.seconds)
    streams = {span.stream for line in lines for span in line.spans}
    busy = {stream: round(slowest.busy_seconds(stream), 3) for stream in sorted(streams)}
    return {"planned_s": round(slowest.seconds, 3), "planned_busy_s": busy}


def _measured(layouts: list[Layout], rounds: int, passes: int) -> tuple[dict[str, Any], list[list[float]]]:
    """A rank calibrates, and steps each layout so many times: seconds of the slowest rank."""
    world = open_world("cpu")
    device = calibrate(world, "cpu", replace(MeasurementBudget.for_device(world.device), num_passes=passes))
    steps = [_step(layout, world) for layout in layouts]
    found: list[list[float]] = [[] for _ in layouts]
    order = list(range(len(layouts)))
    for turn in range(rounds + 1):
        random.Random(turn).shuffle(order)
        for place in order:
            world.reduce_sum_and_max([0], [])
            begin = time.perf_counter()
            steps[place]()
            took = world.reduce_sum_and_max([], [round((time.perf_counter() - begin) * 1e6)])[1][0] / 1e6
            # The first makes the optimizer's state.
            found[place] += [round(took, 4)] if turn else []
    return device.model_dump(), found


def _step(layout: Layout, world: World) -> Callable[[], None]:
    """What does one step of a layout; as `train.loop.train_step`."""
    job = layout.job(_on_cpu)
    manager = job.stack.build(Mesh(job.degrees, world))
    manager.parallelize(job.build_model(), None)
    manager.build_optimizer(job.optimizer_factory)
    ids = torch.randint(0, 8192, (job.micro_batch_size, job.seq_len))
    batches = [{"input_ids": ids.clone(), "labels": ids.clone()} for _ in range(job.num_microbatches)]

    def step() -> None:
        num_tokens = manager.begin_step_sync(batches)
        loss = manager.forward_backward(batches, num_tokens=num_tokens)
        norm = manager.clip_grad_norm(job.max_grad_norm, job.grad_norm_type)
        manager.read_scalars(loss, norm)
        manager.optimizer_step()

    return step


def _on_meta(layout: Layout) -> nn.Module:
    with torch.device("meta"):
        return _on_cpu(layout)


def _on_cpu(layout: Layout) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = AutoModelForCausalLM.from_config(llama(layout.hidden, layout.blocks, 8192), dtype=torch.float32)
    return made


def table(found: Mapping[str, Any]) -> str:
    """A line for each layout: what was planned, and what was measured."""
    lines = []
    for ranks, world in found.items():
        said = f"{world['cpu']}, torch {world['versions']['torch']}, {world['date']}; {world['rounds']} steps of each"
        lines += [
            f"{ranks} ranks; {said}:",
            "",
            "| layout | planned [s] | fastest step [s] | off | median [s] | off |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for row in world["rows"]:
            reported = [min(row["measured_s"]), statistics.median(row["measured_s"])]
            cells = [f"{value:.2f} | {row['planned_s'] / value - 1:+.0%}" for value in reported]
            lines.append(f"| {row['layout']} | {row['planned_s']:.2f} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    main()
