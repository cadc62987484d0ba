"""How often to save: Young's and Daly's intervals, and the goodput that follows without a simulation.

[Note: closed form] Failures are without memory, so a run is a row of attempts that do not know of each other. One lasts
for M seconds on the average, the mean time between failures, and begins when the D seconds from a failure to the next
step have passed without another one: all in all M exp(D / M). With T seconds of steps between two saves, each of which
holds up by d and is written w seconds later, attempts leave on the average exp(-(T + d + w) / M) / (1 - exp(-P / M))
saves, where P is the time from one to the next: T + d, or more where a save waits for the one before. So T of that over
the first is the goodput. With w = 0 it is Daly's complete model, whose best T depends on neither D nor w.
Sources: Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974; Daly, A higher order
estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer Systems 22(3), 2006.
"""

from __future__ import annotations

import math
from dataclasses import replace

from .fleet import Fleet


def young(hold_s: float, mtbf_s: float) -> float:
    """Seconds of steps between two saves that lose the least, in first order."""
    return math.sqrt(2 * hold_s * mtbf_s)


def daly(hold_s: float, mtbf_s: float) -> float:
    """The same in higher order, where a save is not short beside the time between failures."""
    if hold_s >= 2 * mtbf_s:
        return mtbf_s
    part = hold_s / (2 * mtbf_s)
    return young(hold_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - hold_s


def goodput(fleet: Fleet) -> float:
    """The part of a long run's time that is useful, without copies in memory; see [Note: closed form]."""
    saves, mtbf = fleet.saves, fleet.mtbf_s
    steps = saves.every * fleet.step_s
    period = steps + saves.hold_s + fleet.wait_s
    if math.isinf(mtbf):
        return steps / period
    try:
        cycle = mtbf * math.exp(fleet.down_s(from_disk=True) / mtbf)
    except OverflowError:
        return 0.0
    kept = math.exp(-(steps + saves.hold_s + saves.write_s) / mtbf) / -math.expm1(-period / mtbf)
    return steps * kept / cycle


def best_every(fleet: Fleet) -> int:
    """Steps between saves at which a run without copies in memory has the most goodput.

    Not fewer than are written meanwhile, so that no save waits for the one before.
    """
    saves, mtbf = fleet.saves, fleet.mtbf_s
    least = max(1, math.ceil(saves.write_s / fleet.step_s))
    if math.isinf(mtbf):
        raise ValueError("a run that never fails has no best interval.")

    def at(every: int) -> float:
        return goodput(replace(fleet, copies=None, saves=replace(saves, every=every)))

    every = max(least, round(daly(saves.hold_s, mtbf) / fleet.step_s))
    # Daly's is off by little, and the goodput has one hill.
    while at(every + 1) > at(every):
        every += 1
    while every > least and at(every - 1) >= at(every):
        every -= 1
    return every
