"""Failures of a fleet: the simulation against a plain walk through each step, and against what can be written down."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from meshwright.base.errors import ConfigError
from meshwright_plan.config import PlanConfig
from meshwright_plan.goodput import simulation as fleets
from meshwright_plan.goodput.simulation import (
    DAY,
    HOUR,
    TIME_PARTS,
    CheckpointSchedule,
    FailureScenario,
    ReplicaSchedule,
    compute_goodput,
    find_best_interval,
    simulate,
)

RATE = PlanConfig().failures_per_rank_hour
LARGE = FailureScenario(16_384, 8, 6.2, CheckpointSchedule(24, 1.0, 33.0, 35.0), RATE, 60.0, 300.0)
COPIED = replace(LARGE, checkpoints=replace(LARGE.checkpoints, every=240), replicas=ReplicaSchedule(24, 1.0, 0.9, 1.0))
TWO_NODES = replace(COPIED, ranks=16, failures_per_rank_hour=RATE * 1024)


class Walk:
    """One run that goes through each step, copy and save, with the luck that `simulate` has."""

    def __init__(self, fleet: FailureScenario, seconds: float, seed: int) -> None:
        self.fleet, self.seconds = fleet, seconds
        self.luck = np.random.default_rng(seed)
        self.parts = dict.fromkeys(TIME_PARTS, 0.0)
        self.now = 0.0
        self.step = self.disk = self.memory = 0
        self.failures = self.from_disk = 0

    def spend(self, part: str, seconds: float) -> bool:
        """Whether it went by without a failure, and before the end."""
        end = min(self.fails_at, self.seconds)
        self.parts[part] += min(seconds, end - self.now)
        self.now = min(self.now + seconds, end)
        return self.now < end

    def train(self) -> None:
        """Steps until something ends them; then what there is to resume from."""
        sent, written = [(0.0, self.step)], [(0.0, self.disk)]
        copies, saves = self.fleet.replicas, self.fleet.checkpoints
        while self.spend("recomputed", self.fleet.step_s):
            self.step += 1
            if copies is not None and self.step % copies.every == 0:
                if not self.spend("replicas", copies.blocking_s):
                    break
                sent.append((self.now + copies.send_s, self.step))
            if self.step % saves.every == 0:
                if not self.spend("checkpoints", max(0.0, written[-1][0] - self.now) + saves.blocking_s):
                    break
                written.append((self.now + saves.write_s, self.step))
        self.memory, self.disk = (max(step for when, step in each if when <= self.now) for each in (sent, written))

    def run(self) -> dict[str, float]:
        fleet, source = self.fleet, self.fleet.checkpoints
        lost_nodes, has_memory, is_down = 0, True, False
        while True:
            until, kind, second = self.luck.standard_exponential(), self.luck.random(), self.luck.random()
            self.fails_at = self.now + until * fleet.mtbf_s
            started, computed = self.step, self.parts["recomputed"]
            waits = {"detection": fleet.detection_s, "restart": fleet.restart_s, "loading": source.load_s}
            if is_up := not is_down or all(self.spend(*each) for each in waits.items()):
                lost_nodes, has_memory = 0, True
                self.train()
            if self.now >= self.seconds:
                self.parts["useful"] = started * fleet.step_s + self.parts["recomputed"] - computed
                self.parts["recomputed"] -= self.parts["useful"]
                return {name: each / self.seconds for name, each in self.parts.items()}
            is_node, is_pair = kind < fleet.node_failure_fraction, kind < fleet.pair_failure_fraction
            if not is_up and is_node and second < 2 * lost_nodes / (fleet.nodes - 1):
                has_memory = False
            has_memory = has_memory and not is_pair and fleet.replicas is not None
            lost_nodes += is_node + is_pair
            self.step, source = (self.memory, fleet.replicas) if has_memory else (self.disk, fleet.checkpoints)
            self.memory = self.step
            self.failures, self.from_disk = self.failures + 1, self.from_disk + (not has_memory)
            is_down = True


WALKED = {
    "as it is": LARGE,
    "never": replace(LARGE, failures_per_rank_hour=0.0),
    "written at once": replace(LARGE, checkpoints=CheckpointSchedule(7, 20.0)),
    "saves wait": replace(LARGE, checkpoints=CheckpointSchedule(3, 2.0, 50.0, 9.0)),
    "saves are longer than attempts": replace(LARGE, checkpoints=CheckpointSchedule(500, 900.0, 50_000.0, 9.0)),
    "down for long": replace(LARGE, detection_s=4000.0, restart_s=9000.0),
    "copied": COPIED,
    "copied, saves wait": replace(
        COPIED, checkpoints=CheckpointSchedule(4, 1.0, 90.0, 60.0), replicas=ReplicaSchedule(2, 3.0, 12.0, 2.0)
    ),
    "copied on two nodes, down for long": replace(TWO_NODES, detection_s=4000.0, pair_failure_fraction=0.0),
    "copied, each second failure of a pair": replace(
        COPIED, pair_failure_fraction=0.5, replicas=ReplicaSchedule(1, 0.3, 6.0, 2.0)
    ),
}


@pytest.mark.parametrize("name", WALKED)
def test_a_simulated_run_is_one_that_goes_step_by_step(name):
    fleet = WALKED[name]
    for seed in range(3):
        found = simulate([fleet], 3 * DAY, num_runs=1, seed=seed)
        walk = Walk(fleet, 3 * DAY, seed)
        assert found.mean_parts() == pytest.approx(walk.run(), abs=1e-9)
        assert sum(found.parts.values()) == pytest.approx(np.ones((1, 1)))
        assert (found.failures.item(), found.disk_restores.item()) == (walk.failures, walk.from_disk)


CLOSED = {
    "as it is": LARGE,
    "saves wait": replace(LARGE, checkpoints=CheckpointSchedule(2, 1.0, 60.0, 35.0)),
    "hardly anything is left": replace(LARGE, failures_per_rank_hour=20 * RATE),
}


@pytest.mark.parametrize("name", CLOSED)
def test_the_closed_form_is_within_what_is_simulated(name):
    fleet = CLOSED[name]
    found = simulate([fleet], 3000 * fleet.mtbf_s, num_runs=100)
    assert found.standard_error[0] < 2e-3
    # What a run begins and ends with is not as the rest is: some 1/3000 of an attempt.
    assert abs(found.goodput[0] - compute_goodput(fleet)) < 4 * found.standard_error[0] + 2e-4


def test_the_closed_form_is_the_complete_model_of_daly():
    fleet = replace(LARGE, checkpoints=CheckpointSchedule(140, 34.0, 0.0, 35.0))
    steps, mtbf, restart = 140 * 6.2, fleet.mtbf_s, 60 + 300 + 35
    took = mtbf * math.exp(restart / mtbf) * (math.exp((steps + 34) / mtbf) - 1)
    assert compute_goodput(fleet) == pytest.approx(steps / took, rel=1e-12)


@given(hold=some.floats(0.1, 1500), mtbf=some.floats(3000, 1e6))
@settings(max_examples=30, deadline=None)
def test_the_best_interval_is_that_of_daly(hold, mtbf):
    fleet = replace(
        LARGE, step_s=0.5, failures_per_rank_hour=HOUR / mtbf / LARGE.ranks, checkpoints=CheckpointSchedule(1, hold)
    )
    # His series is within 1 % of the exact optimum up to a save of half the time between failures.
    assert find_best_interval(fleet) * 0.5 == pytest.approx(fleets.daly_interval(hold, mtbf), rel=0.01, abs=0.6)


@given(every=some.integers(1, 400), hold=some.floats(0, 100), write=some.floats(0, 400), rate=some.floats(1e-6, 1e-3))
@settings(max_examples=30, deadline=None)
def test_no_interval_is_better_than_the_best(every, hold, write, rate):
    fleet = replace(LARGE, failures_per_rank_hour=rate, checkpoints=CheckpointSchedule(every, hold, write))
    best = find_best_interval(fleet)
    assert best * fleet.step_s >= write
    if every * fleet.step_s >= write:
        assert (
            compute_goodput(replace(fleet, checkpoints=replace(fleet.checkpoints, every=best)))
            >= compute_goodput(fleet) - 1e-12
        )


def test_failures_are_as_many_as_their_rate_says():
    found = simulate([LARGE], 54 * DAY, num_runs=200)
    assert found.failures.mean() == pytest.approx(419, abs=4 * math.sqrt(419 / 200))
    same, other = (simulate([LARGE], 54 * DAY, num_runs=200, seed=seed).parts["useful"] for seed in (0, 4))
    assert (found.parts["useful"] == same).all()
    assert (same != other).any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"checkpoints": CheckpointSchedule(25, 1.0)},
            "checkpoints every 25 steps and replicas every 24 do not coincide",
        ),
        ({"replicas": ReplicaSchedule(24, 1.0, 200.0)}, "replicate every 33 steps or more"),
        ({"ranks": 8}, "8 ranks are on one node"),
        (
            {"pair_failure_fraction": 0.9},
            "pair_failure_fraction=0.9 must be at most node_failure_fraction=0.78",
        ),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(change, text):
    with pytest.raises(ConfigError, match=text):
        replace(COPIED, **change)


def test_nothing_to_simulate_is_refused():
    for wrong in ({"scenarios": []}, {"num_runs": 0}, {"seconds": 0.0}):
        with pytest.raises(ConfigError, match="nothing to simulate"):
            simulate(**{"scenarios": [LARGE], "seconds": DAY, **wrong})
