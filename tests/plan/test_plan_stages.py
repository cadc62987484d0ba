"""Pipelines that are planned from small ones, against all of their stages traced whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.plan_layouts import Layout, check_alike, deep_plan

from meshwright.mesh.mesh import Mesh
from meshwright.plan import planned, stages
from meshwright.plan.trace import Job, Trace, traces


def deep(engine: str, ranks: int, schedule: str, layers: int, microbatches: int) -> Layout:
    wrapper = {"pp_schedule": schedule, "pp_microbatch_size": 2}
    return Layout(engine, ranks, {"pp_size": ranks}, wrapper=wrapper, layers=layers, microbatches=microbatches)


STEPS = [(2, 4, (3, 4)), (2, 6, (3, 4)), (2, 8, (5,))]
"""Ranks, blocks and numbers of microbatches."""
FEWER = ((1, 2, 3),)
"""Blocks of a stage of small pipelines, so that tests take less time."""
PIPELINES = [
    (deep("fsdp2", 2, "1F1B", 10, 6), STEPS),
    (deep("ddp", 2, "GPipe", 10, 6), STEPS),
    (deep("ddp", 2, "Interleaved1F1B", 16, 6), [(2, 4, (6,)), (2, 8, (6,)), (2, 12, (6,))]),
    (deep("ddp", 2, "InterleavedZeroBubble", 16, 6), [(2, 4, (6,)), (2, 8, (6,)), (2, 12, (6,))]),
    (deep("ddp", 2, "ZBVZeroBubble", 16, 5), [(2, 4, (5,)), (2, 8, (5,)), (2, 12, (5,))]),
    (deep("ddp", 2, "DualPipeV", 16, 5), [(2, 4, (5,)), (2, 8, (5,)), (2, 12, (5,))]),
]


@pytest.mark.parametrize(("layout", "steps"), PIPELINES, ids=lambda each: str(each) if isinstance(each, Layout) else "")
def test_small_pipelines_tell_what_large_ones_hold_and_send(layout, steps, monkeypatch):
    traced = []

    def noting(job: Job, mesh: Mesh, counts: Sequence[int]) -> list[Trace]:
        traced.append((mesh.rank, job.degrees.pp, len(job.model().model.layers), tuple(counts)))
        return traces(job, mesh, counts)

    monkeypatch.setattr(planned, "traces", noting)
    if layout.layers > 10:
        monkeypatch.setattr(stages, "DEPTHS", FEWER)
    told = deep_plan(layout, from_small=True)
    assert sorted(traced) == sorted((rank, *step) for rank in range(layout.ranks) for step in steps)
    _check(told, deep_plan(layout, from_small=False))


def test_three_and_four_stages_tell_what_six_hold_and_send(monkeypatch):
    monkeypatch.setattr(stages, "DEPTHS", FEWER)
    layout = deep("ddp", 6, "1F1B", 24, 7)
    _check(deep_plan(layout, from_small=True), deep_plan(layout, from_small=False))


def _check(told, whole):
    assert told is not None
    for few, every in zip(told, whole, strict=True):
        # Such small operators take less than the host needs to issue them, which hides what the schedule tells.
        check_alike(few, every, seconds=0.05)
