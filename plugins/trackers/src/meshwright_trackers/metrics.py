"""What a run tells, under the names that all trackers share.

[Note: names of metrics] Values are those of metrics.jsonl, and steps are the run's, from 1:
    train/      loss, grad_norm, learning_rate, learning_rate/GROUP where there are several, tokens, flops
    eval/SET    losses of the sets, in steps that evaluate
    sum/NAME    further sums of an objective
    speed/      tokens_per_second, tokens_per_second_per_device, mfu
    time/step   seconds of the step; time/PART its parts
    memory/KIND bytes of the first rank
    norm/BLOCK  gradient norms by block, in steps that measure them
    checkpoint/ seconds, is_best, in steps that save
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.plugin import RunInfo, RunSummary, SavedCheckpoint, StepResult

Plain = str | int | float | bool | None


def step_metrics(result: StepResult) -> dict[str, float]:
    """The numbers of a step; see [Note: names of metrics]. What is not known is left out."""
    rates = result.learning_rates if len(result.learning_rates) > 1 else {}
    found: dict[str, float | None] = {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/learning_rate": result.learning_rate,
        **_under("train/learning_rate", rates),
        "train/tokens": result.num_tokens,
        "train/flops": result.flops,
        **_under("eval", result.evaluations),
        **_under("sum", result.sums),
        "speed/tokens_per_second": result.tokens_per_second,
        "speed/tokens_per_second_per_device": result.tokens_per_second_per_device,
        "speed/mfu": result.mfu,
        "time/step": result.seconds,
        **_under("time", result.times),
        **_under("memory", result.memory),
        **_under("norm", result.norms),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def checkpoint_metrics(checkpoint: SavedCheckpoint) -> dict[str, float]:
    """The numbers of a checkpoint."""
    return {"checkpoint/seconds": checkpoint.seconds, "checkpoint/is_best": float(checkpoint.is_best)}


def parameters(run: RunInfo) -> dict[str, Plain]:
    """The run file with dots in its keys, without its trackers, which may hold secrets; and `run.` what it became."""
    facts: dict[str, Plain] = {
        "id": run.id,
        "strategy": run.strategy,
        "mesh": run.mesh,
        "world_size": run.world_size,
        "parameters": run.parameters,
        "device": run.device,
        "version": run.version,
    }
    options = {name: value for name, value in run.config.items() if name != "trackers"}
    return {**dict(_flat(options)), **{f"run.{name}": value for name, value in facts.items()}}


def outcome(summary: RunSummary) -> dict[str, str | float]:
    """How a run has ended."""
    return {"end/reason": summary.reason, "end/step": summary.step, "end/seconds": summary.seconds}


def _under(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Plain]]:
    """Lists are numbered where they hold mappings, and else are JSON."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        elif value is None or isinstance(value, str | int | float):
            yield name, value
        else:
            yield name, json.dumps(value, default=str)
