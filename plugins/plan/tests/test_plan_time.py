"""What a step reserves and how long it takes: against times that follow by hand, and by traced operators."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.plan_layouts import PlannedLayout, trace_planned_rank
from support.tiers import mark_mostly_slow

from meshwright._compat.torch import count_flops
from meshwright.base.errors import ConfigError, MeshError
from meshwright.mesh.sizes import Degrees
from meshwright.tracing.collectives import Collective
from meshwright_plan.allocator import GATHER, LARGE_BUFFER, REDUCE, assign_streams, compute_reserved_bytes
from meshwright_plan.config import DEVICE_DIRECTORY, DeviceSpec, LinkSpec, list_device_specs, load_device_spec
from meshwright_plan.meter import MemorySnapshot, StepMeter
from meshwright_plan.timeline import (
    COMPUTE,
    Timeline,
    estimate_collective_seconds,
    estimate_kernel_seconds,
    find_group_ranks,
    fuse_operations,
    is_kernel,
    simulate_timelines,
)
from meshwright_plan.trace import Operation, StepTrace, memory_access

H100 = load_device_spec("h100-80gb")
LINK = LinkSpec(bandwidth=1e9, efficiency=1.0, ring_step_latency_s=1e-9, tree_step_latency_s=1e-9)
NODE = H100.node.model_copy(update={"intra_node": LINK, "ring_base_latency_s": 1e-9})
COSTS = {"bandwidth": 1e9, "bandwidth_efficiency": 1.0, "min_kernel_s": 1e-9, "launch_overhead_s": 1e-9, "node": NODE}
DEVICE = H100.model_copy(update=COSTS)  # a byte takes a nanosecond, in memory and on the link, and all else nothing
S = 10**9


def kernel(seconds: int, reads: Iterable[int] = (), writes: Iterable[int] = (0,)) -> Operation:
    """What takes so long, and touches these blocks."""
    moved = tuple((block, 0) for block in reads), tuple((block, seconds * S) for block in writes)
    return Operation("aten.op", 0, 0, (), torch.float32, None, *moved)


def trace(rank: int, *steps: Operation | tuple[Operation, Collective]) -> StepTrace:
    operations, calls = [], []
    for step in steps:
        if isinstance(step, tuple):
            operations.append(replace(step[0], collective_index=len(calls)))
            calls.append(step[1])
        else:
            operations.append(step)
    nothing = MemorySnapshot(0, {}, "")
    return StepTrace(rank, nothing, nothing, tuple(calls), tuple(operations), ())


def collective(
    seconds: int, block: int, group: str = "dp_shard", name: str = "c10d.op"
) -> tuple[Operation, Collective]:
    # Half of what is gathered comes from the other rank.
    call = Collective("all_gather", group, 2, torch.float32, seconds * S * 2)
    return Operation(name, 0, 0, (), torch.float32, None, ((block, 0),), ((block, 0),)), call


def message(kind: str, block: int, peer: int) -> tuple[Operation, Collective]:
    touched = ((block, 0),)
    reads, writes = (touched, ()) if kind == "send" else ((), touched)
    call = Collective(kind, "pp", 4, torch.float32, 0)
    return Operation(f"c10d.{kind}", 0, 0, (), torch.float32, None, reads, writes, peer), call


def seconds(*steps: Any, degrees: Degrees | None = None, device: DeviceSpec = DEVICE) -> float:
    return simulate_timelines([trace(0, *steps)], degrees or Degrees(dp_shard=2), device)[0].seconds


BOTH = Degrees(dp_shard=2, tp=2)


@pytest.mark.parametrize(
    ("steps", "degrees", "expected"),
    [
        # The last waits for the collective, which began at once, hidden behind what does not need it.
        ([kernel(1), collective(3, 1), kernel(2, writes=(2,)), kernel(1, (1,), (3,))], None, 4),
        # A collective waits for what it sends.
        ([kernel(2), collective(3, 0)], None, 5),
        # Those of one group follow each other, and of two do not.
        ([collective(3, 0), collective(3, 1)], BOTH, 6),
        ([collective(3, 0), collective(3, 1, group="tp")], BOTH, 3),
    ],
)
def test_operators_wait_for_what_they_need(steps, degrees, expected):
    assert seconds(*steps, degrees=degrees) == pytest.approx(expected, abs=1e-6)


SENT, OTHER = collective(4, 100), collective(4, 101)
COPY_IN = replace(kernel(5, writes=(9,)), name="fsdp.all_gather_copy_in.default")


@pytest.mark.parametrize(
    ("steps", "speed", "is_host", "expected"),
    [
        # Communication is hidden, or half or all of what is computed in four seconds is lost.
        ([SENT, kernel(10)], 1.0, True, 10),
        ([SENT, kernel(10)], 0.5, True, 12),
        ([SENT, kernel(10)], 0.0, True, 14),
        # Nothing is lost where nothing is carried; of two that overlap in time each second is lost once.
        ([kernel(10), SENT, kernel(3)], 0.0, True, 17),
        ([SENT, OTHER, kernel(1)], 0.0, True, 9),
        # A host issues a collective when it has computed, and has one stream of computing.
        ([kernel(10), SENT], 1.0, False, 10),
        ([kernel(10), SENT], 1.0, True, 14),
        ([kernel(10), COPY_IN], 1.0, False, 10),
        ([kernel(10), COPY_IN], 1.0, True, 15),
    ],
)
def test_a_host_computes_less_beside_collectives_and_issues_none_meanwhile(steps, speed, is_host, expected):
    device = DEVICE.model_copy(update={"overlap_speed": speed, "is_host": is_host})
    assert seconds(*steps, device=device) == pytest.approx(expected, abs=1e-6)


def test_a_unit_is_gathered_when_the_one_before_the_last_is_copied_out():
    steps: list[Any] = []
    for unit in range(4):
        steps.append(Operation("fsdp.all_gather_copy_in.default", 0, 0, (), None, None, (), ((unit, 0),)))
        steps.append(collective(1, unit, name="c10d._allgather_base_.default"))
        out = ((unit, 0),), ((10 + unit, 0),)
        steps.append(Operation("fsdp.split_with_sizes_copy.default", 0, 0, (), None, None, *out))
        steps.append(kernel(5, (10 + unit,), (20 + unit,)))
    (line,) = simulate_timelines([trace(0, *steps)], Degrees(dp_shard=2), DEVICE)
    begins = [span.start for span in line.spans if span.stream == "dp_shard"]
    # The third when the first's is copied out at 1, the fourth when the second's is, behind the first's computing.
    assert begins == pytest.approx([0, 1, 2, 6], abs=1e-6)
    assert line.seconds == pytest.approx(21.0, abs=1e-6)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 8)])
def test_a_pipeline_has_the_bubbles_of_its_schedule(stages, microbatches):
    traces = []
    for stage in range(stages):
        steps: list[Any] = []
        for index in range(microbatches):
            steps += [message("recv", 100 + index, stage - 1)] if stage > 0 else []
            steps.append(kernel(1, (100 + index,) if stage else (), (200 + index,)))
            steps += [message("send", 200 + index, stage + 1)] if stage < stages - 1 else []
        traces.append(trace(stage, *steps))
    found = [line.seconds for line in simulate_timelines(traces, Degrees(pp=stages), DEVICE)]
    assert max(found) == pytest.approx(microbatches + stages - 1, abs=1e-5)
    with pytest.raises(MeshError, match=r"ranks \[1\] wait for messages"):
        simulate_timelines(traces[1:2], Degrees(pp=4), DEVICE)


def test_fused_operators_read_and_write_what_others_see():
    chain = [kernel(1, (0,), (1,)), kernel(1, (1,), (2,)), kernel(1, (2,), (3,))]
    product = Operation("aten.mm.default", 1, 0, ((8, 8), (8, 8)), torch.float32, None, ((3, 0),), ((4, 0),))
    one, same = fuse_operations([*chain, product])
    assert same is product
    assert (dict(one.reads), dict(one.writes)) == ({0: 0}, {3: S})


def test_ranks_of_a_group():
    expected = {"tp": [4, 5, 6, 7], "dp_shard": [2, 6, 10, 14], "dp_cp": [2, 6, 10, 14], "pp": [6, 22], "ep": [6]}
    for group, found in expected.items():
        assert find_group_ranks(group, 6, Degrees(pp=2, dp_shard=4, tp=4), len(found)) == found


def test_links_between_nodes_are_slower_and_shared_by_the_ranks_of_a_node():
    node, size = H100.node, 1 << 30
    inside, both, alone = (
        estimate_collective_seconds("all_gather", size, r, node) for r in (range(8), range(16), range(0, 128, 8))
    )
    assert inside == pytest.approx(size * 7 / 8 / node.intra_node.effective_bandwidth, rel=0.05)
    assert alone == pytest.approx(size * 15 / 16 / node.inter_node.effective_bandwidth, rel=0.05)
    assert inside < both < alone
    assert estimate_collective_seconds("all_reduce", size, range(8), node) == pytest.approx(2 * inside, rel=0.05)
    # What is small goes over a tree.
    assert estimate_collective_seconds("all_reduce", 8, range(512), node) < 2 * (
        8 * 63 * node.intra_node.ring_step_latency_s
    )
    assert estimate_collective_seconds("all_gather", size, [3], node) == 0


@pytest.mark.parametrize("name", list_device_specs())
def test_devices_are_whole(name):
    device = load_device_spec(name)
    assert set(device.matmul_efficiency) == set(device.flops) >= {"bfloat16", "float32"}
    rates = [device.matmul_rate("bfloat16", size) for size in (1, 64, 128, 1024, 4096, 1 << 20)]
    assert rates == sorted(rates)
    assert rates[-1] <= device.flops["bfloat16"]
    # Accelerators hide communication, and take no longer for any kind.
    hides = (device.overlap_speed, device.is_host, dict(device.node.slowdown_factors)) == (1.0, False, {})
    assert hides == (name != "cpu")


def test_many_devices_compute_as_the_slowest_of_them():
    device = DEVICE.model_copy(update={"spread": 0.05})
    assert (
        device.straggler_speed(1)
        == DEVICE.model_copy(update={"spread": 0.0}).straggler_speed(512)
        == pytest.approx(1.0)
    )
    # The mean of the lowest of n normally distributed numbers, in standard deviations, from tables.
    for count, lowest in ((2, 0.564), (8, 1.424), (100, 2.508)):
        assert device.straggler_speed(count) == pytest.approx(1 - 0.05 / 2.847 * lowest, abs=5e-4)
    shapes = ((8192, 8192), (8192, 8192))
    product = Operation("aten.mm.default", 2 * 8192**3, 0, shapes, torch.bfloat16, None, (), ((0, 0),))
    one, many = (seconds(product, degrees=Degrees(dp_shard=ranks), device=device) for ranks in (1, 512))
    assert many / one == pytest.approx(1 / device.straggler_speed(512), rel=1e-3)
    # Memory is as fast on all.
    assert seconds(kernel(3), degrees=Degrees(dp_shard=512), device=device) == pytest.approx(3.0, abs=1e-6)


def test_a_device_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    text = (DEVICE_DIRECTORY / "cpu.yaml").read_text()
    path.write_text(text)
    assert load_device_spec(str(path)) == load_device_spec("cpu")
    path.write_text(text.replace("memory_bytes:", "memory_byte:"))
    with pytest.raises(ConfigError, match="memory_byte"):
        load_device_spec(str(path))


def test_the_roofline():
    rows, weights, given = torch.empty(64, 8), torch.empty(4, 8, 16), torch.empty(64, 16)
    operator = torch.ops.aten._grouped_mm.default
    assert count_flops(operator, (rows, weights), {}, given) == 2 * 64 * 8 * 16
    assert count_flops(operator, (rows.t(), given), {}, weights) == 2 * 64 * 8 * 16
    device = load_device_spec("a100-80gb")
    product = functools.partial(Operation, "aten.mm.default", bytes=0, dtype=torch.bfloat16, collective_index=None)
    square, column = (8192, 8192), (8192, 1)
    large = product(flops=2 * 8192**3, shapes=(square, square), reads=((0, 1 << 28),), writes=((1, 1 << 27),))
    narrow = product(flops=2 * 8192**2, shapes=(square, column), reads=((0, 1 << 27),), writes=((1, 1 << 14),))
    assert estimate_kernel_seconds(large, device) == pytest.approx(2 * 8192**3 / device.matmul_rate("bfloat16", 8192))
    assert estimate_kernel_seconds(narrow, device) >= (1 << 27) / device.bandwidth
    # 16 groups of 512 rows, and the gradient of their weights.
    for shapes in (((8192, 2048), (16, 2048, 4096), (16,)), ((2048, 8192), (8192, 4096), (16,))):
        groups = product(flops=2 * 8192 * 2048 * 4096, shapes=shapes, reads=((0, 1),), writes=((1, 1),))
        expected = 2 * 8192 * 2048 * 4096 / device.matmul_rate("bfloat16", 512)
        assert estimate_kernel_seconds(groups, device) == pytest.approx(expected)


FAST, SLOW = 1e15, 1e4  # Bytes a second


def played(layout: PlannedLayout, *bandwidths: float) -> tuple[list[StepTrace], list[list[Timeline]]]:
    """All stages' first ranks, on links without latency of each bandwidth."""
    degrees: Degrees = layout.build_job().degrees
    each = degrees.world_size // degrees.pp
    traces = [trace_planned_rank(layout, stage * each) for stage in range(degrees.pp)]
    lines = []
    for bandwidth in bandwidths:
        free = {"bandwidth": bandwidth, "efficiency": 1.0, "ring_step_latency_s": 1e-12, "tree_step_latency_s": 1e-12}
        link = H100.node.intra_node.model_copy(update=free)
        node = {"intra_node": link, "inter_node": link, "ring_base_latency_s": 1e-12, "tree_base_latency_s": 1e-12}
        lines.append(
            simulate_timelines(traces, degrees, H100.model_copy(update={"node": H100.node.model_copy(update=node)}))
        )
    return traces, lines


COMMUNICATE = [
    PlannedLayout("fsdp2", 2),
    PlannedLayout("ddp", 2, {}, {"engine": "bucketed"}),
    PlannedLayout("fsdp2", 4, {"tp_size": 2}, {"sequence_parallel": True}),
    PlannedLayout("fsdp2", 2, {"cp_size": 2}),
    PlannedLayout("fsdp2", 2, {"ep_size": 2}, model="qwen3_moe"),
    PlannedLayout("fsdp2", 2, {"pp_size": 2}),
]


@pytest.mark.parametrize("layout", mark_mostly_slow(COMMUNICATE), ids=str)
def test_a_step_is_bound_by_what_is_slow_and_reserves_no_less_than_it_holds(layout):
    traces, (fast, slow) = played(layout, FAST, SLOW)
    for trace, quickly, slowly in zip(traces, fast, slow, strict=True):
        # Small blocks of three streams, and one workspace.
        assert trace.peak.bytes <= compute_reserved_bytes(trace) <= trace.peak.bytes + 3 * (LARGE_BUFFER + (2 << 20))
        assert compute_reserved_bytes(trace, workspace=LARGE_BUFFER) == compute_reserved_bytes(trace) + LARGE_BUFFER
        sent = [span for span in slowly.spans if span.stream not in (COMPUTE, GATHER, REDUCE)]
        assert len(sent) == len([call for call in trace.collectives if call.kind != "recv"])
        carried = max(slowly.busy_seconds(span.stream) for span in sent)
        assert quickly.seconds < carried <= slowly.seconds
        assert quickly.busy_seconds() == pytest.approx(slowly.busy_seconds())
    if len(traces) == 1:
        # Of no cost, messages do not hold up the host, which issues such small operators more slowly than they run.
        issued = [each.collective_index is not None or is_kernel(each) for each in traces[0].operations]
        host = H100.launch_overhead_s * (sum(issued) + 0.2 * (len(issued) - sum(issued)))
        assert fast[0].seconds == pytest.approx(host, rel=0.05)
    else:
        # Stages wait for each other: each microbatch crosses the boundary and comes back.
        alone = max(line.busy_seconds() for line in slow)
        assert min(line.seconds for line in slow) > alone + 2 * 2 * 2 * 16 * 64 * 8 / SLOW / 2


def test_memory_of_streams_is_what_was_gathered_and_reduced():
    trace = trace_planned_rank(PlannedLayout("fsdp2", 2), 0)
    found = assign_streams(trace.operations)
    sizes = dict[int, int]()
    for block, change in trace.memory_log:
        sizes[block] = max(sizes.get(block, 0), change)
    calls = {kind: [c for c in trace.collectives if c.kind == kind] for kind in ("all_gather", "reduce_scatter")}
    gathered = [sizes[block] for block, stream in found.items() if stream == GATHER]
    reduced = [sizes[block] for block, stream in found.items() if stream == REDUCE]
    assert gathered == [-(-call.nbytes // 512) * 512 for call in calls["all_gather"]]
    assert reduced == [-(-call.nbytes // call.num_ranks // 512) * 512 for call in calls["reduce_scatter"]]


def test_parts_of_a_block_that_are_put_together_are_all_read():
    whole, meter = torch.ones(8, 64), StepMeter()
    parts = whole.split(2)
    meter.track([whole])
    made = torch.cat(parts, 1)
    meter.track([made])
    reads, writes = memory_access(meter, torch.ops.aten.cat.default, (list(parts), 1), {}, made)
    assert [size for _, size in reads] == [size for _, size in writes] == [whole.nbytes]
    # Twice the same is read once.
    reads, _ = memory_access(meter, torch.ops.aten.mul.Tensor, (whole, whole), {}, made)
    assert [size for _, size in reads] == [whole.nbytes]
