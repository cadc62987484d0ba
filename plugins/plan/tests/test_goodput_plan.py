"""What `meshwright plan` says of failures: what a save holds, how often to save, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.plan_layouts import RUN, PlannedLayout, assert_fits

from meshwright.base.validation import validate_config
from meshwright.checkpoint import save_checkpoint
from meshwright.checkpoint.index import read_index
from meshwright.checkpoint.manifest import read_manifest
from meshwright.checkpoint.training_state import RNG_PREFIX
from meshwright.files.command_helpers import gc_paused
from meshwright.launch.open_world import open_world
from meshwright.mesh.mesh import Mesh
from meshwright_plan.config import PlanConfig, load_device_spec
from meshwright_plan.goodput import advice
from meshwright_plan.goodput.advice import (
    RECOMMENDED,
    RECOMMENDED_REPLICATED,
    THIS_RUN,
    THIS_RUN_REPLICATED,
    compute_state_bytes,
    estimate_failure_cost,
    render_failure_cost,
    summarize_failure_cost,
)
from meshwright_plan.goodput.simulation import HOUR
from meshwright_plan.planner import build_job, plan_job
from meshwright_run.run_file import RunConfig
from meshwright_testing.workers import pool

RATE = PlanConfig().failures_per_rank_hour
STEP_S, RANKS = 5.0, 128
OFTEN = {"failures_per_rank_hour": 128 * RATE}  # As often as of 16,384


def _config(**changes: Any) -> RunConfig:
    return validate_config(RunConfig, {**RUN, "steps": 1000, **changes}, where="the run file")


@pytest.fixture(scope="module")
def planned() -> Iterator[dict[str, Any]]:
    """A job and its plan, with steps of 5 s; no option of these tests changes it."""
    device = load_device_spec("h100-80gb")
    with gc_paused(), pytest.MonkeyPatch.context() as patched:
        job = build_job(_config(), RANKS)
        found = {**plan_job(job, device, [0]), "step_seconds": STEP_S}
        size = compute_state_bytes(job)
        patched.setattr(advice, "compute_state_bytes", lambda same: size if same is job else None)
        yield {"job": job, "device": device, "plan": found}


def _failures(planned: dict[str, Any], asked: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return estimate_failure_cost(_config(plan={**OFTEN, **(asked or {})}, **changes), **planned)


def _row(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in found["rows"] if each["name"] == name)


def _saved(layout: PlannedLayout, directory: Path) -> int:
    """Bytes of model and optimizer in a checkpoint that real ranks have written after a step."""
    job = layout.build_job()
    manager = job.stack.build(Mesh(job.degrees, open_world("cpu")))
    model = job.build_model()
    batches = [job.make_batch(model) for _ in range(job.num_microbatches)]
    manager.parallelize(model)
    manager.build_optimizer(job.optimizer_factory)
    manager.forward_backward(batches, num_tokens=manager.begin_step_sync(batches))
    manager.optimizer_step()
    save_checkpoint(manager, directory, step=1)
    stored = read_index(directory, read_manifest(directory)).tensors
    return sum(
        each.shape.numel() * each.dtype.itemsize for name, each in stored.items() if not name.startswith(RNG_PREFIX)
    )


OF_RANKS = [
    PlannedLayout("fsdp2", 2, layers=3),
    PlannedLayout("ddp", 2, {}, {"engine": "bucketed", "use_distributed_optimizer": True}, dtype="float32"),
    PlannedLayout("megatron_fsdp", 2),
    PlannedLayout("fsdp2", 2, {"pp_size": 2}),
    PlannedLayout("fsdp2", 2, {"ep_size": 2}, model="qwen3_moe"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", OF_RANKS, ids=str)
def test_a_checkpoint_is_as_large_as_planned(layout, tmp_path):
    first, _ = pool(2).run(_saved, layout, tmp_path / "saved")
    assert compute_state_bytes(layout.build_deep_job()) == first


def test_failures_of_few_ranks_hardly_matter(planned):
    found = _failures(planned, {"failures_per_rank_hour": RATE / 16})
    assert found == {"ranks": 128, "mtbf_hours": pytest.approx(54 * 24 * 16_384 / 419 / 8), "rows": []}
    assert _failures(planned, {"failures_per_rank_hour": 0})["mtbf_hours"] is None


def test_a_save_holds_up_by_a_copy_and_takes_what_the_disks_need(planned):
    asked = {"device_to_host_bandwidth": 1e3, "disk_bandwidth": 2e3, "disk_bandwidth_total": 1e9}
    found = _failures(planned, asked)
    share, own = found["state_bytes"] / RANKS, found["rank_bytes"]
    assert own >= share
    assert found["checkpoints"]["blocking_s"] == pytest.approx(share / 1e3)
    assert found["checkpoints"]["write_s"] == pytest.approx(8 * share / 2e3)
    assert found["checkpoints"]["load_s"] == pytest.approx(8 * own / 2e3)
    limited = _failures(planned, {**asked, "disk_bandwidth_total": 1e3})
    assert limited["checkpoints"]["write_s"] == pytest.approx(found["state_bytes"] / 1e3)
    link = load_device_spec("h100-80gb").node.inter_node.effective_bandwidth
    assert found["replicas"]["blocking_s"] == pytest.approx(own / 1e3)
    assert found["replicas"]["send_s"] == pytest.approx(own / link / advice.REPLICA_LINK_FRACTION)
    at_once = _failures(planned, asked, checkpoint={"asynchronous": False})["checkpoints"]
    assert (at_once["blocking_s"], at_once["write_s"]) == (pytest.approx(share / 1e3 + 8 * share / 2e3), 0)
    assert _row(found, RECOMMENDED)["every"] * STEP_S >= found["checkpoints"]["write_s"]


SLOW = {"device_to_host_bandwidth": 1e3, "disk_bandwidth": 2e4}
"""A save of this small model takes seconds, as that of a large one does."""


def test_recommended_is_what_was_computed_and_more_of_the_time_than_what_is_far_from_it(planned):
    found = _failures(planned, SLOW, checkpoint={"every": 2000})
    best = _row(found, RECOMMENDED)
    assert {each["name"] for each in found["rows"]} == {
        RECOMMENDED,
        THIS_RUN,
        RECOMMENDED_REPLICATED,
        THIS_RUN_REPLICATED,
    }
    useful = {each["name"]: each["parts"]["useful"] for each in found["rows"]}
    assert useful[RECOMMENDED] > useful[THIS_RUN] + 0.2
    assert useful[THIS_RUN_REPLICATED] > useful[THIS_RUN] + 0.2
    copied = _row(found, RECOMMENDED_REPLICATED)
    assert copied["every"] > 5 * best["every"]
    assert copied["every"] % copied["replicated_every"] == 0
    table, remarks = render_failure_cost(found, _config(plan=OFTEN))
    assert_fits(80, [table, remarks])
    assert f"Recommended: checkpoint.every={best['every']} ({best['minutes']:.3g} min)." in remarks.plain
    assert f"checkpoint.every={best['every']} " in summarize_failure_cost(found)


@pytest.mark.parametrize(("every", "steps"), [("20m", 20 * 60 / STEP_S), ([100, "20m"], 100)])
def test_a_run_that_saves_by_the_clock_saves_so_often(planned, every, steps):
    assert _row(_failures(planned, SLOW, checkpoint={"every": every}), THIS_RUN)["every"] == steps


def test_a_run_that_copies_is_taken_as_it_copies(planned):
    plain = _failures(planned, SLOW, checkpoint={"every": 2000})
    for given, every in (({"every": 100}, 100), ({"every": 50, "max_bandwidth": "1GB/s"}, 50)):
        own = _row(_failures(planned, SLOW, checkpoint={"every": 2000, "replicate": given}, max_restarts=1), THIS_RUN)
        assert (own["replicated_every"], own["every"]) == (every, pytest.approx(2000, abs=every))
        assert own["parts"]["useful"] > _row(plain, THIS_RUN)["parts"]["useful"] + 0.1
    slow = plain["rank_bytes"] / (2.5 * STEP_S)  # what is sent slowly is copied as often as it can be
    found = _failures(planned, SLOW, checkpoint={"every": 2000, "replicate": {"max_bandwidth": slow}}, max_restarts=1)
    assert _row(found, THIS_RUN)["replicated_every"] == 3
    assert THIS_RUN_REPLICATED not in {each["name"] for each in found["rows"]}


@pytest.mark.parametrize(
    ("asked", "more", "part", "lost"),
    [
        ({}, {}, "detection", 60),
        ({}, {"watchdog_s": 120.0}, "detection", 120),
        ({"detection_s": 7.0}, {"watchdog_s": 120.0}, "detection", 7),
        ({"restart_s": 50.0}, {}, "restart", 50),
    ],
)
def test_what_a_failure_takes_is_lost_and_it_is_noticed_as_soon_as_the_watchdog_says(planned, asked, more, part, lost):
    parts = _row(_failures(planned, {**SLOW, **asked}, **more), RECOMMENDED)["parts"]
    # Of the time between two failures.
    assert parts[part] == pytest.approx(lost / (54 * 24 * HOUR / 419), rel=0.05)
