"""Directories of runs as runs leave them, made without training: for tests of the page that reads them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

START = 1_700_000_000.0


def build_metrics_line(step: int, *, seed: int = 0, world_size: int = 4, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    chosen = random.Random(seed * 1_000_003 + step)
    seconds = 0.2 + 0.02 * chosen.random()
    line = {
        "step": step,
        "loss": 2 + 5 * math.exp(-step / 300) + 0.05 * chosen.gauss(0, 1),
        "grad_norm": 1 + 0.2 * chosen.random(),
        "learning_rate": 1e-3 * min(1, step / 100),
        "num_tokens": 4096,
        "tokens_per_second": 4096 / seconds,
        "tokens_per_second_per_device": 4096 / seconds / world_size,
        "seconds": seconds,
        "time": START + 0.25 * step,
        "world_size": world_size,
        "times": {"data": 0.005, "forward_backward": 0.8 * seconds, "clip": 0.01, "optimizer": 0.1 * seconds},
        "learning_rates": {"decay": 1e-3 * min(1, step / 100), "no decay": 2e-3},
        "memory": {"host": 500 << 20, "host_peak": 600 << 20, "allocated": 1 << 30, "allocated_peak": 2 << 30},
    }
    if step % 50 == 0:
        line["evaluations"] = {"held_out": 2.1 + 5 * math.exp(-step / 300)}
    return line | changes


def write_lines(path: Path, lines: Sequence[Any] | Iterator[Any], *, mode: str = "a") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def build_event_line(name: str, step: int, **values: Any) -> dict[str, Any]:
    return {"time": START + 0.25 * step, "event": name, "step": step, **values}


def build_start_event(steps: int, *, world_size: int = 4, begin: int = 0) -> dict[str, Any]:
    line = {"time": START + 0.25 * begin, "event": "start", "id": "ab" * 16, "name": "run", "strategy": "fsdp2"}
    line |= {"mesh": f"dp_shard={world_size}", "world_size": world_size, "start_step": begin, "num_steps": steps}
    return line | {"num_parameters": 1_234_567, "device": "cpu", "version": "0.1.0"}


def write_run_directory(
    directory: Path, steps: int = 300, *, seed: int = 0, world_size: int = 4, of_steps: int | None = None
) -> Path:
    """A run that has done so many steps."""
    lines = (build_metrics_line(n, seed=seed, world_size=world_size) for n in range(1, steps + 1))
    write_lines(directory / "metrics.jsonl", lines)
    events = [build_start_event(of_steps or steps, world_size=world_size)]
    events += [
        build_event_line("checkpoint", n, path=f"checkpoints/{n}", seconds=0.1) for n in range(100, steps + 1, 100)
    ]
    write_lines(directory / "events.jsonl", events)
    settings = f"strategy: fsdp2\nsteps: {of_steps or steps}\noptimizer: {{name: AdamW, lr: {1e-3 * (1 + seed)}}}\n"
    (directory / "run.yaml").write_text(settings, encoding="utf-8")
    return directory


def write_rank_files(directory: Path, ranks: int, steps: int = 60, *, slow: int | None = None, last: int = 0) -> None:
    """Files of ranks, of which one may be slow; `last` is the number of the last step, by default `steps`."""
    chosen = random.Random(0)
    for rank in range(ranks):
        lines: list[dict[str, Any]] = []
        for step in range((last or steps) - steps + 1, (last or steps) + 1):
            busy = 0.16 + 0.002 * chosen.random() + (0.05 if rank == slow else 0)
            line: dict[str, Any] = {"step": step, "time": START + 0.25 * step}
            line["seconds"] = 0.21 + 0.001 * chosen.random()
            data = 0.005 + 0.0002 * chosen.random()
            line["times"] = {"data": data, "forward_backward": busy, "optimizer": 0.02}
            line["memory"] = {"host": (500 + rank % 7) << 20, "allocated_peak": (2000 + 13 * (rank % 11)) << 20}
            lines.append(line)
        write_lines(directory / "ranks" / f"{rank:05}.jsonl", lines)


def write_timelines(directory: Path, *, ranks: int = 2, microbatches: int = 4, steps: Sequence[int] = (10, 20)) -> None:
    """Timelines of a 1F1B pipeline, measured and planned."""
    planned: list[list[Any]] = []
    for rank in range(ranks):
        at, row = float(rank), []
        for batch in range(microbatches):
            row += [["F", rank, batch, at, at + 1], ["B", rank, batch, at + 1, at + 3]]
            at += 3
        planned.append(row)
    (directory / "timeline").mkdir(parents=True, exist_ok=True)
    plan = {"schedule": "1F1B", "unit": "forwards of an average stage", "bubble": 0.2, "ranks": planned}
    (directory / "timeline" / "planned.json").write_text(json.dumps(plan), encoding="utf-8")
    for rank, row in enumerate(planned):
        actions = [[kind, stage, batch, 0.01 * begin, 0.011 * end] for kind, stage, batch, begin, end in row]
        line = {"pp_rank": rank, "actions": actions}
        lines = [{"step": n, "time": START + 0.25 * n + 0.001 * rank} | line for n in steps]
        write_lines(directory / "timeline" / f"rank-{rank:05}.jsonl", lines)
