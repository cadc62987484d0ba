"""Estimate the cost of failures and recommend a checkpoint interval, from save times and failure rates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.text import Text

from meshwright.plugin import MeshwrightError, find_frozen_base_parameters, format_docs_link
from meshwright_run.run_file import RunConfig

from ..config import DeviceSpec, PlanConfig, get_plan_config
from ..planner import manager_after_step
from ..tables import format_seconds, format_size, new_table
from ..trace import TrainingJob, mask_layer_numbers
from .simulation import HOUR, CheckpointSchedule, FailureScenario, ReplicaSchedule, find_best_interval, simulate

RARE_MTBF_HOURS = 30 * 24.0  # Mean hours between failures above which failures are negligible
NUM_SIMULATED_FAILURES, NUM_SIMULATED_RUNS = 200, 64  # Mean failures per simulated run, and number of runs
ASSUMED_DETECTION_S = 60.0  # Without a watchdog
MIN_REPORTED_GAIN = 0.01  # Smallest gain of goodput that is reported
REPLICA_LINK_FRACTION = 0.1
"""Fraction of the bandwidth between nodes that replicas may use, so that collectives do not wait: assumed."""
BLOCKS_PER_STAGE = 2  # Blocks per stage of the small model on which optimizer state is measured
RECOMMENDED = "recommended"
THIS_RUN = "this run"
RECOMMENDED_REPLICATED = "recommended, with replicas"
THIS_RUN_REPLICATED = "this run, with replicas"


def estimate_failure_cost(
    config: RunConfig, job: TrainingJob, device: DeviceSpec, plan: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the cost of failures for a run with this plan, as JSON values. No rows if failures are negligible."""
    asked, ranks = get_plan_config(config), job.degrees.world_size
    rate = ranks * asked.failures_per_rank_hour
    found = {"ranks": ranks, "mtbf_hours": 1 / rate if rate else None}
    if rate * RARE_MTBF_HOURS < 1:
        return {**found, "rows": []}
    each = compute_checkpoint_costs(job, device, plan, asked, asynchronous=config.checkpoint.asynchronous)
    per_node, step_s = min(device.node.ranks, ranks), plan["step_seconds"]
    times = asked.failures_per_rank_hour, _get_detection_s(config), asked.restart_s
    fleet = FailureScenario(ranks, per_node, step_s, each.checkpoints, *times)
    after_s = config.checkpoint.every_seconds
    clock = None if after_s is None else max(1, round(after_s / step_s))
    own = min((each for each in (config.checkpoint.every_steps, clock) if each is not None), default=None)
    return {
        **found,
        **asdict(each),
        "rows": simulate_scenarios(build_scenarios(fleet, each, own, _get_configured_replicas(config, each, step_s))),
    }


def _get_detection_s(config: RunConfig) -> float:
    asked = get_plan_config(config).detection_s
    return asked if asked is not None else config.watchdog_s or ASSUMED_DETECTION_S


# -- cost of a save


@dataclass(frozen=True)
class CheckpointCosts:
    """Costs of saving after each step. `state_bytes`: size of a checkpoint; `rank_bytes`: replica of one rank."""

    state_bytes: int
    rank_bytes: int
    checkpoints: CheckpointSchedule
    replicas: ReplicaSchedule


def compute_checkpoint_costs(
    job: TrainingJob, device: DeviceSpec, plan: Mapping[str, Any], plan_config: PlanConfig, *, asynchronous: bool = True
) -> CheckpointCosts:
    """Return the costs of saving, from the memory of a rank and the bandwidths of disks and links."""
    world, per_node = job.degrees.world_size, min(device.node.ranks, job.degrees.world_size)
    total = compute_state_bytes(job)
    held = (each["persistent_by_owner"] for each in plan["ranks"])
    own = max(each.get("parameters", 0) + each.get("optimizer", 0) for each in held)
    between = device.node.inter_node.effective_bandwidth

    def on_disk(size: float) -> float:
        """Return the seconds that the disks take for `size` bytes of each rank."""
        return max(size * per_node / plan_config.disk_bandwidth, size * world / plan_config.disk_bandwidth_total)

    # Ranks with the same state share the writing, and each reads all of it.
    hold, write = total / world / plan_config.device_to_host_bandwidth, on_disk(total / world)
    return CheckpointCosts(
        total,
        own,
        CheckpointSchedule(1, hold, write, on_disk(own))
        if asynchronous
        else CheckpointSchedule(1, hold + write, 0.0, on_disk(own)),
        ReplicaSchedule(
            1, own / plan_config.device_to_host_bandwidth, own / (between * REPLICA_LINK_FRACTION), own / between
        ),
    )


def compute_state_bytes(job: TrainingJob) -> int:
    """Return the bytes of a checkpoint, from the bytes per element on rank 0 of a small model after a step."""
    small = job.with_num_layers(min(job.num_layers, BLOCKS_PER_STAGE * job.degrees.pp))
    try:
        kept = _measure_element_bytes(small)
    except MeshwrightError:
        # A schedule may need more blocks.
        if small is job:
            raise
        kept = _measure_element_bytes(job)
    usual = sum(size for _, size in kept.values()) / max(1, sum(count for count, _ in kept.values()))
    each_of = {name: size / count for name, (count, size) in kept.items() if count}
    parameters = ((mask_layer_numbers(name), each) for name, each in job.build_model().named_parameters())
    return round(sum(each.numel() * each_of.get(name, usual) for name, each in parameters))


def _measure_element_bytes(job: TrainingJob) -> dict[str, tuple[int, int]]:
    """Return (elements, saved bytes) of parameters, by name without block numbers."""
    with manager_after_step(job, 0) as manager:
        state, skipped = manager.sharded_state(), find_frozen_base_parameters(manager.model_parts)
    found: dict[str, tuple[int, int]] = {}
    tensors = {} if state.optimizer is None else state.optimizer.tensors
    for name, value in state.model.items():
        kept = [value, *tensors.get(name, {}).values(), *filter(None, [state.ema_weights.get(name)])]
        size = 0 if name in skipped else sum(math.prod(each.shape) * each.dtype.itemsize for each in kept)
        before = found.get(mask_layer_numbers(name), (0, 0))
        found[mask_layer_numbers(name)] = before[0] + math.prod(value.shape), before[1] + size
    return found


# -- checkpoint interval


def _get_configured_replicas(config: RunConfig, costs: CheckpointCosts, step_s: float) -> ReplicaSchedule | None:
    """Return the configured replica schedule. A replica that is due while another is sent is skipped."""
    asked = config.checkpoint.replicate_config
    if asked is None:
        return None
    send_s = costs.replicas.send_s
    if asked.bytes_per_s is not None:
        send_s = max(send_s, costs.rank_bytes / asked.bytes_per_s)
    every = asked.every * max(1, math.ceil(send_s / (asked.every * step_s)))
    return replace(costs.replicas, every=every, send_s=send_s)


def build_scenarios(
    scenario: FailureScenario,
    costs: CheckpointCosts,
    own_interval: int | None,
    own_replicas: ReplicaSchedule | None = None,
) -> dict[str, FailureScenario]:
    """Return scenarios by name: recommended and configured (`own_interval` steps) saving, without and with replicas."""
    scenarios = {RECOMMENDED: scenario.with_checkpoints(find_best_interval(scenario))}
    given = own_replicas if scenario.nodes > 1 else None
    if own_interval is not None:
        every = 1 if given is None else given.every
        scenarios[THIS_RUN] = scenario.with_checkpoints(math.ceil(own_interval / every) * every, given)
    if scenario.nodes > 1:
        copies, rare = choose_replica_schedule(scenario, costs.replicas)
        scenarios[RECOMMENDED_REPLICATED] = scenario.with_checkpoints(rare, copies)
        if own_interval is not None and given is None:
            every = min(copies.every, own_interval)
            if costs.replicas.send_s <= every * scenario.step_s:
                scenarios[THIS_RUN_REPLICATED] = scenario.with_checkpoints(
                    round(own_interval / every) * every, replace(copies, every=every)
                )
    return scenarios


def choose_replica_schedule(scenario: FailureScenario, replicas: ReplicaSchedule) -> tuple[ReplicaSchedule, int]:
    """Return the replica schedule and the steps between saves, which then serve only a loss of node and replicas."""
    every = find_best_interval(
        replace(scenario, checkpoints=CheckpointSchedule(1, replicas.blocking_s, replicas.send_s, replicas.load_s))
    )
    # A second failure takes the node that holds the replicas, or whose replicas the first node held.
    second = (
        2
        * scenario.node_failure_fraction**2
        * scenario.downtime_s(from_disk=True)
        / scenario.mtbf_s
        / max(1, scenario.nodes - 1)
    )
    rate = scenario.failures_per_rank_hour * min(1.0, scenario.pair_failure_fraction + second)
    rare = find_best_interval(replace(scenario, failures_per_rank_hour=rate)) if rate else every
    return replace(replicas, every=every), math.ceil(rare / every) * every


def simulate_scenarios(scenarios: Mapping[str, FailureScenario]) -> list[dict[str, Any]]:
    """Simulate each scenario, and return the fractions of its time."""
    outcome = simulate(
        [*scenarios.values()],
        [NUM_SIMULATED_FAILURES * each.mtbf_s for each in scenarios.values()],
        num_runs=NUM_SIMULATED_RUNS,
    )
    return [
        {
            "name": name,
            "every": fleet.checkpoints.every,
            "minutes": fleet.checkpoints.every * fleet.step_s / 60,
            "replicated_every": None if fleet.replicas is None else fleet.replicas.every,
            "parts": outcome.mean_parts(place),
        }
        for place, (name, fleet) in enumerate(scenarios.items())
    ]


# -- as text


def summarize_failure_cost(failures: Mapping[str, Any]) -> str:
    """Return a sentence about failures and the recommended checkpoint interval; "" if failures are negligible."""
    if not failures["rows"]:
        return ""
    hours = failures["mtbf_hours"]
    text = f"{hours:,.0f} h" if hours >= 100 else f"{hours:.2g} h" if hours >= 1 else f"{hours * HOUR / 60:.2g} min"
    often = f"one of {failures['ranks']:,} ranks fails every {text}"
    best = next(each for each in failures["rows"] if each["name"] == RECOMMENDED)
    useful = best["parts"]["useful"]
    return (
        f"{often}: checkpoint.every={best['every']} ({best['minutes']:.3g} min) keeps {useful:.1%} of the time useful"
    )


def render_failure_cost(failures: Mapping[str, Any], config: RunConfig) -> list[Any]:
    """Return a table of the scenarios, and remarks; nothing if failures are negligible."""
    if not failures["rows"]:
        return []
    rows, saves = failures["rows"], failures["checkpoints"]
    table = new_table("failures and checkpoints", ("", *(row["name"] for row in rows)), left=("",))
    for column in table.columns:
        column.no_wrap = False
    waits = ("detection", "restart", "loading")
    groups = {"recomputed": ("recomputed",), "saving": ("checkpoints", "replicas"), "waiting": waits}
    table.add_row("checkpoint every", *(f"{row['every']:,} steps" for row in rows))
    table.add_row("which takes", *(f"{row['minutes']:.3g} min" for row in rows))
    if any(row["replicated_every"] for row in rows):
        table.add_row("replicas every", *(_format_steps(row["replicated_every"]) for row in rows))
    for name, keys in {"useful time": ("useful",), **groups}.items():
        table.add_row(name, *(f"{sum(row['parts'][key] for key in keys):.1%}" for row in rows))
    saved = (
        f"A save of {format_size(failures['state_bytes'])} blocks training for "
        f"{format_seconds(saves['blocking_s'])} and is written in {format_seconds(saves['write_s'])}."
    )
    return [table, Text(" ".join([saved, *_format_remarks(failures, config)]))]


def _format_steps(steps: int | None) -> str:
    return "" if steps is None else f"{steps:,} steps"


def _format_remarks(failures: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    row = {each["name"]: each for each in failures["rows"]}
    best = row[RECOMMENDED]
    yield f"Recommended: checkpoint.every={best['every']} ({best['minutes']:.3g} min)."
    if THIS_RUN not in row:
        yield "This run saves no periodic checkpoints: a failure loses all steps."
    elif (more := best["parts"]["useful"] - row[THIS_RUN]["parts"]["useful"]) >= MIN_REPORTED_GAIN:
        yield f"That makes {more:.1%} more of the time useful than saving every {row[THIS_RUN]['every']:,} steps."
    if RECOMMENDED_REPLICATED in row:
        yield "Rows with replicas: checkpoint.replicate: neighbor."
    yield (
        f"A failure is detected after {format_seconds(_get_detection_s(config))}, and ranks are restarted "
        f"{format_seconds(get_plan_config(config).restart_s)} later; see {format_docs_link('reference/goodput.md')}"
    )
