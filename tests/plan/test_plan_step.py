"""What a traced step reserves and how long it takes: by its own operators, on devices made up for it."""

from __future__ import annotations

import pytest
import torch
from support.plan_layouts import Layout, planned

from meshwright.mesh.sizes import Degrees
from meshwright.plan.allocator import GATHER, LARGE_GRANULE, REDUCE, reserved, streams
from meshwright.plan.device import Device, find_device
from meshwright.plan.meter import StepMeter
from meshwright.plan.time import COMPUTE, Timeline, play
from meshwright.plan.touched import touched
from meshwright.plan.trace import Trace

FAST, SLOW = 1e15, 1e4
"""Bytes a second."""


def with_links(bandwidth: float) -> Device:
    """A device whose links have no latency."""
    device = find_device("h100-80gb")
    free = {"ring_s": 1e-12, "tree_s": 1e-12}
    link = device.node.inside.model_copy(update={"bandwidth": bandwidth, "efficiency": 1.0, **free})
    node = {"inside": link, "between": link, "ring_begin_s": 1e-12, "tree_begin_s": 1e-12}
    return device.model_copy(update={"node": device.node.model_copy(update=node)})


def played(layout: Layout, bandwidth: float) -> tuple[list[Trace], list[Timeline]]:
    """All stages' first ranks."""
    degrees: Degrees = layout.job().degrees
    each = degrees.world_size // degrees.pp
    traces = [planned(layout, stage * each) for stage in range(degrees.pp)]
    return traces, play(traces, degrees, with_links(bandwidth))


def test_memory_of_streams_is_what_was_gathered_and_reduced():
    trace = planned(Layout("fsdp2", 2), 0)
    found = streams(trace.operations)
    sizes = dict[int, int]()
    for block, change in trace.log:
        sizes[block] = max(sizes.get(block, 0), change)
    calls = {kind: [c for c in trace.collectives if c.kind == kind] for kind in ("all_gather", "reduce_scatter")}
    gathered = [sizes[block] for block, stream in found.items() if stream == GATHER]
    reduced = [sizes[block] for block, stream in found.items() if stream == REDUCE]
    assert gathered == [-(-call.bytes // 512) * 512 for call in calls["all_gather"]]
    assert reduced == [-(-call.bytes // call.ranks // 512) * 512 for call in calls["reduce_scatter"]]


@pytest.mark.parametrize("layout", [Layout("fsdp2", 2), Layout("ddp", 2), Layout("fsdp2", 2, {"tp_size": 2})], ids=str)
def test_no_less_is_reserved_than_allocated(layout):
    trace = planned(layout, 0)
    # Small blocks of three streams, and one workspace.
    assert trace.peak.bytes <= reserved(trace) <= trace.peak.bytes + 3 * (LARGE_GRANULE + (2 << 20))
    assert reserved(trace, workspace=LARGE_GRANULE) == reserved(trace) + LARGE_GRANULE


COMMUNICATE = [
    Layout("fsdp2", 2),
    Layout("fsdp2", 2, {}, {"activation_checkpointing": "full"}),
    Layout("ddp", 2, {}, {"engine": "bucketed"}),
    Layout("fsdp2", 4, {"tp_size": 2}, {"sequence_parallel": True}),
    Layout("fsdp2", 2, {"cp_size": 2}),
    Layout("fsdp2", 2, {"ep_size": 2}, model="qwen3_moe"),
    Layout("fsdp2", 2, {"pp_size": 2}),
]


@pytest.mark.parametrize("layout", COMMUNICATE, ids=str)
def test_a_step_is_bound_by_what_is_slow(layout):
    traces, fast = played(layout, FAST)
    _, slow = played(layout, SLOW)
    for trace, quickly, slowly in zip(traces, fast, slow, strict=True):
        links = [span for span in slowly.spans if span.stream not in (COMPUTE, GATHER, REDUCE)]
        assert len(links) == len([call for call in trace.collectives if call.kind != "recv"])
        carried = max(slowly.busy(span.stream) for span in links)
        assert quickly.seconds < carried <= slowly.seconds
        assert quickly.busy() == pytest.approx(slowly.busy())
    if len(traces) == 1:
        # Of no cost, messages do not hold up the host, which issues such small operators more slowly than they run.
        assert fast[0].seconds == pytest.approx(sum(_host(trace) for trace in traces), rel=0.05)


def _host(trace: Trace) -> float:
    from meshwright.plan.kernels import is_kernel

    device = find_device("h100-80gb")
    issued = [each.call is not None or is_kernel(each) for each in trace.operations]
    return device.cpu_s * (sum(issued) + 0.2 * (len(issued) - sum(issued)))


def test_stages_wait_for_each_other():
    _, together = played(Layout("fsdp2", 2, {"pp_size": 2}), SLOW)
    alone = max(line.busy() for line in together)
    # Each microbatch crosses the boundary and comes back.
    assert min(line.seconds for line in together) > alone + 2 * 2 * 2 * 16 * 64 * 8 / SLOW / 2


def test_parts_of_a_block_that_are_put_together_are_all_read():
    whole, meter = torch.ones(8, 64), StepMeter()
    parts = whole.split(2)
    meter.see([whole])
    made = torch.cat(parts, 1)
    meter.see([made])
    reads, writes = touched(meter, torch.ops.aten.cat.default, (list(parts), 1), {}, made)
    assert [size for _, size in reads] == [size for _, size in writes] == [whole.nbytes]
    # Twice the same is read once.
    reads, _ = touched(meter, torch.ops.aten.mul.Tensor, (whole, whole), {}, made)
    assert [size for _, size in reads] == [whole.nbytes]
