"""How often a run is to save, from how often its ranks fail and what a save takes; told beside its plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from ...train.run_file import RunConfig
from ..device import Device
from ..pictures.units import size_text, time_text
from ..trace import Job
from .costs import Costs, costs
from .fleet import HOUR, Copies, Fleet, Saves
from .interval import best_every
from .simulation import simulate

RARELY_H = 30 * 24.0
"""Mean hours between failures from which on they hardly matter."""
FAILURES, RUNS = 200, 64
"""Of a simulated run, on the average, and how many of them there are."""
ASSUMED_DETECTION_S = 60.0
"""Without a watchdog."""
MUCH = 0.01
"""A part of the time that is worth telling."""
RECOMMENDED, OWN, COPIED, OWN_COPIED = "recommended", "this run", "recommended, copied", "this run, copied"


def failures_of(config: RunConfig, job: Job, device: Device, plan: Mapping[str, Any]) -> dict[str, Any]:
    """What failures cost a run, as values of JSON; where they hardly matter, how rare they are.

    Args:
        plan: of the job, see `planned.plan`.

    Raises:
        MeshwrightError: as training does.
    """
    asked, ranks = config.plan, job.degrees.world_size
    rate = ranks * asked.failures_per_rank_hour
    found = {"ranks": ranks, "mtbf_hours": 1 / rate if rate else None}
    if rate * RARELY_H < 1:
        return {**found, "rows": []}
    each = costs(job, device, plan, asked, asynchronous=config.checkpoint.asynchronous)
    fleet = Fleet(
        ranks,
        min(device.node.ranks, ranks),
        plan["step_seconds"],
        each.saves,
        asked.failures_per_rank_hour,
        detection_s(config),
        asked.restart_s,
    )
    own, copies = own_every(config, fleet.step_s), own_copies(config, each, fleet.step_s)
    return {**found, **asdict(each), "rows": rows(settings(fleet, each, own, copies))}


def detection_s(config: RunConfig) -> float:
    """Until a failure is noticed: as `plan.detection_s` says, or else the watchdog, or else what is assumed."""
    asked = config.plan.detection_s
    return asked if asked is not None else config.watchdog_s or ASSUMED_DETECTION_S


def own_every(config: RunConfig, step_s: float) -> int | None:
    """Steps between the checkpoints of a run as it is; None: it saves none on the way."""
    after_s = config.checkpoint.after_s
    clock = None if after_s is None else max(1, round(after_s / step_s))
    return min((each for each in (config.checkpoint.every_steps, clock) if each is not None), default=None)


def own_copies(config: RunConfig, found: Costs, step_s: float) -> Copies | None:
    """The copies in memory that a run makes; one that is due while the one before is sent is left out."""
    asked = config.checkpoint.copies
    if asked is None:
        return None
    send_s = found.copies.send_s
    if asked.bytes_per_s is not None:
        send_s = max(send_s, found.rank_bytes / asked.bytes_per_s)
    every = asked.every * max(1, math.ceil(send_s / (asked.every * step_s)))
    return replace(found.copies, every=every, send_s=send_s)


def settings(fleet: Fleet, found: Costs, own: int | None, own_copies: Copies | None = None) -> dict[str, Fleet]:
    """The fleet as it should save and as it does, without and with copies on other nodes, by name."""
    best = best_every(fleet)
    made = {RECOMMENDED: _saving(fleet, best)}
    given = own_copies if fleet.nodes > 1 else None
    if own is not None:
        every = 1 if given is None else given.every
        made[OWN] = _saving(fleet, math.ceil(own / every) * every, given)
    if fleet.nodes > 1:
        copies, rare = copied(fleet, found.copies)
        made[COPIED] = _saving(fleet, rare, copies)
        if own is not None and given is None:
            every = min(copies.every, own)
            if found.copies.send_s <= every * fleet.step_s:
                made[OWN_COPIED] = _saving(fleet, round(own / every) * every, replace(copies, every=every))
    return made


def copied(fleet: Fleet, copies: Copies) -> tuple[Copies, int]:
    """How often to copy, and how often to save then: disks are for what takes a node and its copies alone."""
    as_saves = Saves(1, copies.hold_s, copies.send_s, copies.load_s)
    every = best_every(replace(fleet, saves=as_saves))
    # A second failure meets the node that has the copies, or whose copies the first one had.
    second = 2 * fleet.node_share**2 * fleet.down_s(from_disk=True) / fleet.mtbf_s / max(1, fleet.nodes - 1)
    rate = fleet.failures_per_rank_hour * min(1.0, fleet.pair_share + second)
    rare = best_every(replace(fleet, failures_per_rank_hour=rate)) if rate else every
    return replace(copies, every=every), math.ceil(rare / every) * every


def _saving(fleet: Fleet, every: int, copies: Copies | None = None) -> Fleet:
    return replace(fleet, saves=replace(fleet.saves, every=every), copies=copies)


def rows(fleets: Mapping[str, Fleet]) -> list[dict[str, Any]]:
    """What becomes of the time under each setting, simulated."""
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


# -- told


def told(found: Mapping[str, Any], config: RunConfig) -> list[Any]:
    """What is printed of `failures_of`."""
    if found["mtbf_hours"] is None:
        return ["failures: none (plan.failures_per_rank_hour=0)"]
    often = f"failures: one of {found['ranks']:,} ranks fails every {_hours(found['mtbf_hours'])}"
    if not found["rows"]:
        return [f"{often}, so they hardly matter"]
    saves = found["saves"]
    table = Table(
        title=f"{often}; a save of {size_text(found['state_bytes'])} holds up {time_text(saves['hold_s'])} and is "
        f"written in {time_text(saves['write_s'])}"
    )
    table.add_column("checkpoints")
    for name in ("every [steps]", "[min]", "copied every [steps]", "useful", "redone", "saving", "waiting"):
        table.add_column(name, justify="right")
    for row in found["rows"]:
        parts = row["parts"]
        shares = (
            parts["useful"],
            parts["redone"],
            parts["saves"] + parts["copies"],
            parts["detection"] + parts["restart"] + parts["reading"],
        )
        every = f"{row['every']:,}", f"{row['minutes']:.3g}", str(row["copied_every"] or "")
        table.add_row(row["name"], *every, *(f"{each:.1%}" for each in shares))
    table.caption = " ".join(_remarks(found, config))
    return [table]


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
        f"A failure is noticed after {time_text(detection_s(config))}, and ranks are there again after "
        f"{time_text(config.plan.restart_s)}; see docs/fleet.md."
    )


def _hours(hours: float) -> str:
    return f"{hours:,.0f} h" if hours >= 100 else f"{hours:.2g} h" if hours >= 1 else f"{hours * HOUR / 60:.2g} min"
