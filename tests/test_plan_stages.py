"""Pipelines that are planned from small ones, against all of their stages traced whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from plan_layouts import Layout, check_alike

from meshwright.mesh.mesh import Mesh
from meshwright.plan import planned
from meshwright.plan.device import find_device
from meshwright.plan.trace import Job, Trace, traces


def options(schedule: str) -> dict[str, object]:
    return {"pp_schedule": schedule, "pp_microbatch_size": 2}


PIPELINES = [
    (Layout("fsdp2", 2, {"pp_size": 2}, wrapper=options("1F1B")), 11, 6, [(4, (3, 4)), (6, (3, 4)), (8, (5,))]),
    (Layout("ddp", 2, {"pp_size": 2}, wrapper=options("GPipe")), 11, 6, [(4, (3, 4)), (6, (3, 4)), (8, (5,))]),
]


@pytest.mark.parametrize(("layout", "layers", "microbatches", "steps"), PIPELINES, ids=str)
def test_small_pipelines_tell_what_large_ones_hold_and_send(layout, layers, microbatches, steps, monkeypatch):
    traced = []

    def noting(job: Job, mesh: Mesh, counts: Sequence[int]) -> list[Trace]:
        traced.append((mesh.rank, len(job.model().model.layers), tuple(counts)))
        return traces(job, mesh, counts)

    monkeypatch.setattr(planned, "traces", noting)
    job, device = layout.deep_job(layers, microbatches), find_device("h100-80gb")
    told = planned.plan(job, device)["ranks"]
    assert sorted(traced) == sorted((rank, *step) for rank in (0, 1) for step in steps)
    monkeypatch.setattr(planned, "from_small", lambda *_: None)
    for few, whole in zip(told, planned.plan(job, device)["ranks"], strict=True):
        # Such small operators take less than the host needs to issue them, which hides what the schedule tells.
        check_alike(few, whole, seconds=0.15)
