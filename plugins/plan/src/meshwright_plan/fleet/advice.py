"""What failures cost a run, and how often it is to save; from what a save takes and how often its ranks fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from meshwright.plugin import MeshwrightError, left_out
from meshwright_run.run_file import RunConfig

from ..config import Device, PlanConfig, asked_of
from ..planned import after_step
from ..report import size_text, table, time_text
from ..trace import Job, without_numbers
from .fleet import HOUR, Copies, Fleet, Saves, best_every, simulate

RARELY_H = 30 * 24.0  # Mean hours between failures from which on they hardly matter
FAILURES, RUNS = 200, 64  # Mean failures of a simulated run, and number of runs
ASSUMED_DETECTION_S = 60.0  # Without a watchdog
MUCH = 0.01  # Least part of the time that is worth reporting
SHARE_OF_LINK = 0.1
"""Part of the links between nodes that copies may take, so that no collective waits for them: assumed."""
FEW = 2  # Blocks of each stage of the model that shows what the optimizer keeps of a parameter
RECOMMENDED, OWN, COPIED, OWN_COPIED = "recommended", "this run", "recommended, copied", "this run, copied"


def failures_of(config: RunConfig, job: Job, device: Device, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return what failures cost a run with this plan, as values of JSON, or how rare they are."""
    asked, ranks = asked_of(config), job.degrees.world_size
    rate = ranks * asked.failures_per_rank_hour
    found = {"ranks": ranks, "mtbf_hours": 1 / rate if rate else None}
    if rate * RARELY_H < 1:
        return {**found, "rows": []}
    each = costs(job, device, plan, asked, asynchronous=config.checkpoint.asynchronous)
    per_node, step_s = min(device.node.ranks, ranks), plan["step_seconds"]
    times = asked.failures_per_rank_hour, _detection_s(config), asked.restart_s
    fleet = Fleet(ranks, per_node, step_s, each.saves, *times)
    after_s = config.checkpoint.after_s
    clock = None if after_s is None else max(1, round(after_s / step_s))
    own = min((each for each in (config.checkpoint.every_steps, clock) if each is not None), default=None)
    return {**found, **asdict(each), "rows": rows(settings(fleet, each, own, _own_copies(config, each, step_s)))}


def _detection_s(config: RunConfig) -> float:
    asked = asked_of(config).detection_s
    return asked if asked is not None else config.watchdog_s or ASSUMED_DETECTION_S


# -- what a save takes


@dataclass(frozen=True)
class Costs:
    """What saving after each step takes: `state_bytes` of a checkpoint, `rank_bytes` of a copy of one rank."""

    state_bytes: int
    rank_bytes: int
    saves: Saves
    copies: Copies


def costs(job: Job, device: Device, plan: Mapping[str, Any], asked: PlanConfig, *, asynchronous: bool = True) -> Costs:
    """Return the costs of saving, from what a rank holds and what disks and links carry."""
    world, per_node = job.degrees.world_size, min(device.node.ranks, job.degrees.world_size)
    whole = state_bytes(job)
    held = (each["held_by_owner"] for each in plan["ranks"])
    own = max(each.get("parameters", 0) + each.get("optimizer", 0) for each in held)
    between = device.node.between.rate

    def on_disk(size: float) -> float:
        """Return the time that the disks need for `size` bytes of each rank."""
        return max(size * per_node / asked.disk_bandwidth, size * world / asked.disk_bandwidth_total)

    # Of ranks that have the same, each writes a part, and reads all.
    hold, write = whole / world / asked.copy_bandwidth, on_disk(whole / world)
    return Costs(
        whole,
        own,
        Saves(1, hold, write, on_disk(own)) if asynchronous else Saves(1, hold + write, 0.0, on_disk(own)),
        Copies(1, own / asked.copy_bandwidth, own / (between * SHARE_OF_LINK), own / between),
    )


def state_bytes(job: Job) -> int:
    """Return the bytes of a checkpoint; bytes per element are those of the first rank of a small model after a step."""
    small = job.at_depth(min(job.layers, FEW * job.degrees.pp))
    try:
        kept = _bytes_of_elements(small)
    except MeshwrightError:
        # A schedule may want more blocks.
        if small is job:
            raise
        kept = _bytes_of_elements(job)
    usual = sum(size for _, size in kept.values()) / max(1, sum(count for count, _ in kept.values()))
    each_of = {name: size / count for name, (count, size) in kept.items() if count}
    parameters = ((without_numbers(name), each) for name, each in job.model().named_parameters())
    return round(sum(each.numel() * each_of.get(name, usual) for name, each in parameters))


def _bytes_of_elements(job: Job) -> dict[str, tuple[int, int]]:
    """Return (elements, bytes kept of them) of parameters, by name without numbers of blocks."""
    with after_step(job, 0) as manager:
        state, skipped = manager.sharded_state(), left_out(manager.model_parts)
    found: dict[str, tuple[int, int]] = {}
    tensors = {} if state.optimizer is None else state.optimizer.tensors
    for name, value in state.model.items():
        kept = [value, *tensors.get(name, {}).values(), *filter(None, [state.averages.get(name)])]
        size = 0 if name in skipped else sum(math.prod(each.shape) * each.dtype.itemsize for each in kept)
        before = found.get(without_numbers(name), (0, 0))
        found[without_numbers(name)] = before[0] + math.prod(value.shape), before[1] + size
    return found


# -- how often to save


def _own_copies(config: RunConfig, found: Costs, step_s: float) -> Copies | None:
    """Return the copies that a run makes; one that is due while another is sent is left out."""
    asked = config.checkpoint.copies
    if asked is None:
        return None
    send_s = found.copies.send_s
    if asked.bytes_per_s is not None:
        send_s = max(send_s, found.rank_bytes / asked.bytes_per_s)
    every = asked.every * max(1, math.ceil(send_s / (asked.every * step_s)))
    return replace(found.copies, every=every, send_s=send_s)


def settings(fleet: Fleet, found: Costs, own: int | None, own_copies: Copies | None = None) -> dict[str, Fleet]:
    """Return the fleet by name: as it should save and as it does (every `own` steps), without and with copies."""
    made = {RECOMMENDED: fleet.saving(best_every(fleet))}
    given = own_copies if fleet.nodes > 1 else None
    if own is not None:
        every = 1 if given is None else given.every
        made[OWN] = fleet.saving(math.ceil(own / every) * every, given)
    if fleet.nodes > 1:
        copies, rare = copied(fleet, found.copies)
        made[COPIED] = fleet.saving(rare, copies)
        if own is not None and given is None:
            every = min(copies.every, own)
            if found.copies.send_s <= every * fleet.step_s:
                made[OWN_COPIED] = fleet.saving(round(own / every) * every, replace(copies, every=every))
    return made


def copied(fleet: Fleet, copies: Copies) -> tuple[Copies, int]:
    """Return how often to copy, and how often to save then: disks are for what takes a node and its copies alone."""
    every = best_every(replace(fleet, saves=Saves(1, copies.hold_s, copies.send_s, copies.load_s)))
    # A second failure takes the node that has the copies, or whose copies the first one had.
    second = 2 * fleet.node_share**2 * fleet.down_s(from_disk=True) / fleet.mtbf_s / max(1, fleet.nodes - 1)
    rate = fleet.failures_per_rank_hour * min(1.0, fleet.pair_share + second)
    rare = best_every(replace(fleet, failures_per_rank_hour=rate)) if rate else every
    return replace(copies, every=every), math.ceil(rare / every) * every


def rows(fleets: Mapping[str, Fleet]) -> list[dict[str, Any]]:
    """Simulate each setting, and return what its time is spent on."""
    outcome = simulate([*fleets.values()], [FAILURES * each.mtbf_s for each in fleets.values()], runs=RUNS)
    return [
        {
            "name": name,
            "every": fleet.saves.every,
            "minutes": fleet.saves.every * fleet.step_s / 60,
            "copied_every": None if fleet.copies is None else fleet.copies.every,
            "parts": outcome.means(place),
        }
        for place, (name, fleet) in enumerate(fleets.items())
    ]


# -- in words


def told(found: Mapping[str, Any], config: RunConfig) -> list[Any]:
    if found["mtbf_hours"] is None:
        return ["failures: none (plan.failures_per_rank_hour=0)"]
    hours = found["mtbf_hours"]
    text = f"{hours:,.0f} h" if hours >= 100 else f"{hours:.2g} h" if hours >= 1 else f"{hours * HOUR / 60:.2g} min"
    often = f"failures: one of {found['ranks']:,} ranks fails every {text}"
    if not found["rows"]:
        return [f"{often}, so they hardly matter"]
    saves = found["saves"]
    title = (
        f"{often}; a save of {size_text(found['state_bytes'])} holds up {time_text(saves['hold_s'])} and is "
        f"written in {time_text(saves['write_s'])}"
    )
    names = ("every [steps]", "[min]", "copied every [steps]", "useful", "redone", "saving", "waiting")
    made = table(title, ("checkpoints", *names), left=("checkpoints",))
    for row in found["rows"]:
        parts = row["parts"]
        waiting = parts["detection"] + parts["restart"] + parts["reading"]
        shares = (parts["useful"], parts["redone"], parts["saves"] + parts["copies"], waiting)
        every = f"{row['every']:,}", f"{row['minutes']:.3g}", str(row["copied_every"] or "")
        made.add_row(row["name"], *every, *(f"{each:.1%}" for each in shares))
    made.caption = " ".join(_remarks(found, config))
    return [made]


def _remarks(found: Mapping[str, Any], config: RunConfig) -> Iterator[str]:
    row = {each["name"]: each for each in found["rows"]}
    best = row[RECOMMENDED]
    yield f"Recommended: checkpoint.every={best['every']} ({best['minutes']:.3g} min)."
    if OWN not in row:
        yield "This run saves nothing on the way: a failure loses all of it."
    elif (more := best["parts"]["useful"] - row[OWN]["parts"]["useful"]) >= MUCH:
        yield f"That leaves {more:.1%} more of the time than every {row[OWN]['every']:,} steps."
    if COPIED in row:
        yield "Copied: with checkpoint.replicate: neighbour."
    yield (
        f"A failure is noticed after {time_text(_detection_s(config))}, and ranks are there again after "
        f"{time_text(asked_of(config).restart_s)}; see docs/fleet.md."
    )
