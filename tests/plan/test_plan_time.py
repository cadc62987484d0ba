"""How long a step takes: what overlaps, what waits, what links carry; against times that follow by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from meshwright._compat.arithmetic import arithmetic
from meshwright.base.errors import ConfigError, MeshError
from meshwright.mesh.sizes import Degrees
from meshwright.plan import kernels, links
from meshwright.plan.device import DEVICES, Device, Link, devices, find_device
from meshwright.plan.meter import Held
from meshwright.plan.time import play
from meshwright.plan.trace import Operation, Trace
from meshwright.testing.collectives import Collective

LINK = Link(bandwidth=1e9, efficiency=1.0, ring_s=1e-9, tree_s=1e-9)
DEVICE = find_device("h100-80gb").model_copy(
    update={
        "bandwidth": 1e9,
        "bandwidth_efficiency": 1.0,
        "kernel_s": 1e-9,
        "cpu_s": 1e-9,
        "node": find_device("h100-80gb").node.model_copy(update={"inside": LINK, "ring_begin_s": 1e-9}),
    }
)
"""A byte takes a nanosecond, in memory and on the link, and all else nothing."""
S = 10**9


def kernel(seconds: int, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> Operation:
    """What takes so long, and touches these blocks."""
    sizes = [*((block, 0) for block in reads), *((block, 0) for block in writes)]
    moved = (sizes[-1][0], seconds * S)
    return Operation(
        "aten.op", 0, 0, (), torch.float32, None, tuple(sizes[: len(reads)]), (*sizes[len(reads) : -1], moved)
    )


def trace(rank: int, *steps: Operation | tuple[Operation, Collective]) -> Trace:
    operations, calls = [], []
    for step in steps:
        if isinstance(step, tuple):
            operations.append(replace(step[0], call=len(calls)))
            calls.append(step[1])
        else:
            operations.append(step)
    nothing = Held(0, {}, "")
    return Trace(rank, nothing, nothing, tuple(calls), tuple(operations), ())


def collective(seconds: int, block: int, group: str = "dp_shard", ranks: int = 2) -> tuple[Operation, Collective]:
    # Half of what is gathered comes from the other rank.
    call = Collective("all_gather", group, ranks, torch.float32, seconds * S * 2)
    return Operation("c10d.op", 0, 0, (), torch.float32, None, ((block, 0),), ((block, 0),)), call


def message(kind: str, seconds: int, block: int, peer: int) -> tuple[Operation, Collective]:
    call = Collective(kind, "pp", 4, torch.float32, seconds * S)
    touched = ((block, 0),)
    reads, writes = (touched, ()) if kind == "send" else ((), touched)
    return Operation(f"c10d.{kind}", 0, 0, (), torch.float32, None, reads, writes, peer), call


def seconds(*traces: Trace, degrees: Degrees | None = None) -> list[float]:
    return [line.seconds for line in play(traces, degrees or Degrees(dp_shard=2), DEVICE)]


def test_communication_is_hidden_behind_what_does_not_need_it():
    found = seconds(trace(0, kernel(1, writes=(0,)), collective(3, 1), kernel(2, writes=(2,)), kernel(1, (1,), (3,))))
    # The last waits for the collective, which began at once.
    assert found == pytest.approx([4.0], abs=1e-6)


def test_a_collective_waits_for_what_it_sends():
    assert seconds(trace(0, kernel(2, writes=(0,)), collective(3, 0))) == pytest.approx([5.0], abs=1e-6)


def test_collectives_of_one_group_follow_each_other_and_of_two_do_not():
    one = trace(0, collective(3, 0), collective(3, 1))
    two = trace(0, collective(3, 0), collective(3, 1, group="tp"))
    degrees = Degrees(dp_shard=2, tp=2)
    assert seconds(one, degrees=degrees) == pytest.approx([6.0], abs=1e-6)
    assert seconds(two, degrees=degrees) == pytest.approx([3.0], abs=1e-6)


def test_a_unit_is_gathered_when_the_one_before_the_last_is_copied_out():
    steps = []
    for unit in range(4):
        copy_in = Operation("fsdp.all_gather_copy_in.default", 0, 0, (), None, None, (), ((unit, 0),))
        gather = (replace(collective(1, unit)[0], name="c10d._allgather_base_.default"), collective(1, unit)[1])
        out = Operation("fsdp.split_with_sizes_copy.default", 0, 0, (), None, None, ((unit, 0),), ((10 + unit, 0),))
        steps += [copy_in, gather, out, kernel(5, (10 + unit,), (20 + unit,))]
    (line,) = play([trace(0, *steps)], Degrees(dp_shard=2), DEVICE)
    begins = [span.start for span in line.spans if span.stream == "dp_shard"]
    # The third when the first's is copied out at 1, the fourth when the second's is, behind the first's computing.
    assert begins == pytest.approx([0, 1, 2, 6], abs=1e-6)
    assert line.seconds == pytest.approx(21.0, abs=1e-6)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 8)])
def test_a_pipeline_has_the_bubbles_of_its_schedule(stages, microbatches):
    traces = []
    for stage in range(stages):
        steps = []
        for index in range(microbatches):
            if stage > 0:
                steps.append(message("recv", 0, 100 + index, stage - 1))
            steps.append(kernel(1, (100 + index,) if stage else (), (200 + index,)))
            if stage < stages - 1:
                steps.append(message("send", 0, 200 + index, stage + 1))
        traces.append(trace(stage, *steps))
    found = seconds(*traces, degrees=Degrees(pp=stages))
    assert max(found) == pytest.approx(microbatches + stages - 1, abs=1e-5)


def test_who_waits_for_nobody_is_told():
    with pytest.raises(MeshError, match=r"ranks \[1\] wait for messages"):
        seconds(trace(1, message("recv", 1, 0, 0), kernel(1, (0,), (1,))), degrees=Degrees(pp=4))


def test_fused_operators_read_and_write_what_others_see():
    chain = [kernel(1, (0,), (1,)), kernel(1, (1,), (2,)), kernel(1, (2,), (3,))]
    product = Operation("aten.mm.default", 1, 0, ((8, 8), (8, 8)), torch.float32, None, ((3, 0),), ((4, 0),))
    fused, same = kernels.fused([*chain, product])
    assert same is product
    assert dict(fused.reads) == {0: 0}
    assert dict(fused.writes) == {3: S}


DEGREES = Degrees(pp=2, dp_shard=4, tp=4)


@pytest.mark.parametrize(
    ("group", "size", "found"),
    [
        ("tp", 4, [4, 5, 6, 7]),
        ("dp_shard", 4, [2, 6, 10, 14]),
        ("dp_cp", 4, [2, 6, 10, 14]),
        ("pp", 2, [6, 22]),
        ("ep", 1, [6]),
    ],
)
def test_ranks_of_a_group(group, size, found):
    assert links.members(group, 6, DEGREES, size) == found


def test_links_between_nodes_are_slower_and_shared_by_the_ranks_of_a_node():
    node = find_device("h100-80gb").node
    size = 1 << 30
    inside = links.seconds("all_gather", size, range(8), node)
    both = links.seconds("all_gather", size, range(16), node)
    alone = links.seconds("all_gather", size, range(0, 128, 8), node)
    assert inside == pytest.approx(size * 7 / 8 / node.inside.rate, rel=0.05)
    assert alone == pytest.approx(size * 15 / 16 / node.between.rate, rel=0.05)
    assert inside < both < alone
    assert links.seconds("all_reduce", size, range(8), node) == pytest.approx(2 * inside, rel=0.05)
    # What is small goes over a tree.
    ring = 2 * (8 * 63 * node.inside.ring_s)
    assert links.seconds("all_reduce", 8, range(512), node) < ring
    assert links.seconds("all_gather", size, [3], node) == 0


@pytest.mark.parametrize("name", devices())
def test_devices_are_whole(name):
    device = find_device(name)
    assert set(device.matmul_efficiency) == set(device.flops) >= {"bfloat16", "float32"}
    assert device.sources
    rates = [device.matmul_rate("bfloat16", size) for size in (1, 64, 128, 1024, 4096, 1 << 20)]
    assert rates == sorted(rates)
    assert rates[-1] <= device.flops["bfloat16"]


def test_many_devices_compute_as_the_slowest_of_them():
    device = DEVICE.model_copy(update={"spread": 0.05})
    assert device.pace(1) == pytest.approx(1.0)
    assert DEVICE.model_copy(update={"spread": 0.0}).pace(512) == pytest.approx(1.0)
    # The mean of the lowest of n normally distributed numbers, in standard deviations, from tables.
    for count, lowest in ((2, 0.564), (8, 1.424), (100, 2.508)):
        assert device.pace(count) == pytest.approx(1 - 0.05 / 2.847 * lowest, abs=5e-4)
    product = Operation("aten.mm.default", 2 * 8192**3, 0, ((8192, 8192), (8192, 8192)), torch.bfloat16, None)
    product = replace(product, writes=((0, 0),))
    one, many = (play([trace(0, product)], Degrees(dp_shard=ranks), device)[0].seconds for ranks in (1, 512))
    assert many / one == pytest.approx(1 / device.pace(512), rel=1e-3)
    # Memory is as fast on all.
    assert seconds(trace(0, kernel(3, writes=(0,)))) == pytest.approx([3.0], abs=1e-6)


def test_products_of_groups_are_counted_by_the_rows_of_each():
    rows, weights = torch.empty(64, 8), torch.empty(4, 8, 16)
    given = torch.empty(64, 16)
    operator = torch.ops.aten._grouped_mm.default
    assert arithmetic(operator, (rows, weights), {}, given) == 2 * 64 * 8 * 16
    assert arithmetic(operator, (rows.t(), given), {}, weights) == 2 * 64 * 8 * 16


def test_a_device_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    text = (DEVICES / "cpu.yaml").read_text()
    path.write_text(text)
    assert find_device(str(path)) == find_device("cpu")
    path.write_text(text.replace("memory_bytes:", "memory_byte:"))
    with pytest.raises(ConfigError, match="memory_byte"):
        find_device(str(path))
    with pytest.raises(ConfigError, match=r"no device 'h100'.*Devices: a100-40gb"):
        find_device("h100")


def test_the_roofline():
    device: Device = find_device("a100-80gb")
    product = functools.partial(Operation, "aten.mm.default", bytes=0, dtype=torch.bfloat16, call=None)
    square, column = (8192, 8192), (8192, 1)
    large = product(flops=2 * 8192**3, shapes=(square, square), reads=((0, 1 << 28),), writes=((1, 1 << 27),))
    narrow = product(flops=2 * 8192**2, shapes=(square, column), reads=((0, 1 << 27),), writes=((1, 1 << 14),))
    assert kernels.seconds(large, device) == pytest.approx(2 * 8192**3 / device.matmul_rate("bfloat16", 8192))
    assert kernels.seconds(narrow, device) >= (1 << 27) / device.bandwidth
    # 16 groups of 512 rows, and the gradient of their weights.
    for shapes in (((8192, 2048), (16, 2048, 4096), (16,)), ((2048, 8192), (8192, 4096), (16,))):
        groups = product(flops=2 * 8192 * 2048 * 4096, shapes=shapes, reads=((0, 1),), writes=((1, 1),))
        expected = 2 * 8192 * 2048 * 4096 / device.matmul_rate("bfloat16", 512)
        assert kernels.seconds(groups, device) == pytest.approx(expected)
