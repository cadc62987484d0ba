"""A machine is measured, and what is found becomes a device file: fits against numbers made up for them."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.base.errors import ConfigError, MeshError
from meshwright.mesh.sizes import Degrees
from meshwright.mesh.world import open_world
from meshwright.plan import links
from meshwright.plan.calibration.calibrate import Rates, best, calibrate, calibrate_to, device_of, written
from meshwright.plan.calibration.fit import Sample, deviation, fit
from meshwright.plan.calibration.measure_compute import Clock, Effort, products
from meshwright.plan.calibration.measure_links import KINDS
from meshwright.plan.device import Device, Node, devices, find_device
from meshwright.plan.meter import Held
from meshwright.plan.time import play
from meshwright.plan.trace import Operation, Trace
from meshwright.testing.collectives import Collective
from meshwright.testing.pool import pool

TINY = Effort(
    window_s=0.002,
    windows=2,
    passes=2,
    classes=(64, 128),
    widest=128,
    length=64,
    stream_bytes=1 << 18,
    streams=3,
    messages=(1 << 10, 1 << 14, 1 << 18),
)
FACTORS = {"reduce_scatter": 1.9, "all_reduce": 1.2, "all_to_all": 0.8, "broadcast": 0.6, "send": 0.7}


# -- the fit


def true_node(device: str, ranks: int) -> Node:
    return find_device(device).node.model_copy(update={"ranks": ranks, "factors": FACTORS})


def measured(node: Node, world: int) -> list[Sample]:
    """What links of these numbers would take, without any noise."""
    groups = {tuple(range(world)), (0, 1), tuple(range(node.ranks)), tuple(range(0, world, node.ranks))}
    found = []
    for group in sorted(each for each in groups if len(each) > 1):
        for kind in KINDS:
            for power in range(8, 31, 2):
                if kind != "send" or len(group) == 2:
                    took = links.seconds(kind, 1 << power, group, node)
                    found.append(Sample(kind, 1 << power, group, took))
    return found


def numbers(node: Node, *levels: str) -> dict[str, float]:
    of_links = {
        f"{level}.{name}": getattr(getattr(node, level), name)
        for level in levels
        for name in ("rate", "ring_s", "tree_s")
    }
    return {**of_links, "ring_begin_s": node.ring_begin_s, "tree_begin_s": node.tree_begin_s, **node.factors}


@pytest.mark.parametrize(
    ("device", "ranks", "world", "levels"),
    [
        ("h100-80gb", 8, 8, ["inside"]),
        ("h100-80gb", 8, 16, ["inside", "between"]),
        ("h200", 4, 16, ["inside", "between"]),
    ],
)
def test_links_are_found_exactly_from_times_without_noise(device, ranks, world, levels):
    node = true_node(device, ranks)
    samples = measured(node, world)
    found = fit(samples, find_device("cpu").node.model_copy(update={"ranks": ranks}))
    assert deviation(samples, found) < 1e-9
    assert numbers(found, *levels) == pytest.approx(numbers(node, *levels), rel=1e-6)
    if levels == ["inside"]:
        assert found.between == find_device("cpu").node.between


def test_noise_of_a_fit_stays_noise():
    node = true_node("h100-80gb", 8)
    drawn = torch.Generator().manual_seed(0)
    noise = (torch.randn(1000, generator=drawn, dtype=torch.float64) * 0.05).exp().tolist()
    samples = [replace(each, seconds=each.seconds * part) for each, part in zip(measured(node, 8), noise, strict=False)]
    found = fit(samples, find_device("cpu").node.model_copy(update={"ranks": 8}))
    assert found.inside.rate == pytest.approx(node.inside.rate, rel=0.05)
    assert deviation(measured(node, 8), found) < 0.05


def test_a_bandwidth_stays_where_less_is_reached():
    node = true_node("h100-80gb", 8)
    slower = node.model_copy(update={"inside": node.inside.model_copy(update={"efficiency": 0.5})})
    faster = node.model_copy(update={"inside": node.inside.model_copy(update={"bandwidth": 9e11})})
    found = fit(measured(slower, 8), node)
    assert (found.inside.bandwidth, found.inside.efficiency) == pytest.approx((4.5e11, 0.5), rel=1e-6)
    found = fit(measured(faster, 8), node)
    assert (found.inside.bandwidth, found.inside.efficiency) == pytest.approx((9e11 * 0.82, 1.0), rel=1e-6)


def test_what_cannot_be_fitted_is_refused():
    node = find_device("cpu").node
    with pytest.raises(MeshError, match=r"0 samples of more than one rank.*Measure on 2 ranks"):
        fit([Sample("all_reduce", 8, (0,), 1.0)], node)
    with pytest.raises(MeshError, match="1 of which took no time"):
        fit([Sample("all_reduce", 8, (0, 1), 0.0)], node)


def test_a_kind_of_collective_takes_as_many_times_as_long_as_a_file_says():
    node = true_node("h100-80gb", 8).model_copy(update={"factors": {"all_gather": 3.0, "send": 2.0}})
    plain = node.model_copy(update={"factors": {}})
    size = 1 << 32
    for kind, times in (("all_gather", 3), ("reduce_scatter", 1), ("send", 2), ("recv", 2)):
        ranks = range(2) if kind in links.MESSAGES else range(8)
        took, before = (links.seconds(kind, size, ranks, each) for each in (node, plain))
        assert took == pytest.approx(times * before, rel=1e-2)


# -- the time of a host that computes itself


def timed(*steps: Operation, **changes: Any) -> float:
    """Seconds of a step in which a byte takes a second, and which issues operators in no time."""
    device = find_device("cpu")
    link = device.node.inside.model_copy(update={"bandwidth": 1.0, "efficiency": 1.0, "ring_s": 1e-9})
    node = device.node.model_copy(update={"inside": link, "ring_begin_s": 1e-9})
    told = {"bandwidth": 1.0, "bandwidth_efficiency": 1.0, "kernel_s": 1e-9, "cpu_s": 1e-9, "node": node, **changes}
    calls = [Collective("all_gather", "dp_shard", 2, torch.float32, 2 * 4) for each in steps if each.call is not None]
    nothing = Held(0, {}, "")
    found = Trace(0, nothing, nothing, tuple(calls), steps, ())
    return play([found], Degrees(dp_shard=2), device.model_copy(update=told))[0].seconds


def kernel(seconds: int, name: str = "aten.op") -> Operation:
    return Operation(name, 0, 0, (), torch.float32, None, (), ((seconds, seconds),))


GATHER = Operation("c10d.op", 0, 0, (), torch.float32, 0, ((100, 0),), ((100, 0),))
"""Takes four seconds."""


@pytest.mark.parametrize(
    ("speed", "seconds"),
    [
        (1.0, 10),  # hidden
        (0.5, 12),  # half of what is computed in four seconds is lost
        (0.0, 14),
    ],
)
def test_a_device_computes_less_beside_collectives(speed, seconds):
    assert timed(GATHER, kernel(10), speed_beside_communication=speed) == pytest.approx(seconds)


def test_nothing_is_lost_where_nothing_is_carried():
    assert timed(kernel(10), GATHER, kernel(3), speed_beside_communication=0.0, is_host=True) == pytest.approx(17)
    # Of two that overlap in time each second is lost once.
    other = replace(GATHER, reads=((101, 0),), writes=((101, 0),))
    assert timed(GATHER, other, kernel(1), speed_beside_communication=0.0) == pytest.approx(9)


def test_a_host_issues_a_collective_when_it_has_computed():
    assert timed(kernel(10), GATHER, is_host=False) == pytest.approx(10)
    assert timed(kernel(10), GATHER, is_host=True) == pytest.approx(14)


def test_a_host_has_one_stream_of_computing():
    copy_in = kernel(5, "fsdp.all_gather_copy_in.default")
    assert timed(kernel(10), copy_in, is_host=False) == pytest.approx(10)
    assert timed(kernel(10), copy_in, is_host=True) == pytest.approx(15)


# -- the file


RATES = Rates(
    {"bfloat16": {64: 1e11, 128: 4e11}, "float16": {}, "float32": {64: 5e10, 128: 1e11}, "float64": {64: 2e10}},
    (4e10, 2e10),
    "float32",
    {"copy": 1e10, "sqrt": 4e9},
    1e-6,
    2e-6,
    0.25,
)


def made(samples: list[Sample], base: str = "cpu") -> Device:
    world = open_world("cpu")
    return device_of(world, find_device(base), base, RATES, samples, 2, TINY)


def made_on_ranks(samples: list[Sample]) -> Device:
    return made(samples)


def test_a_file_says_what_was_measured_and_what_was_not(tmp_path):
    node = true_node("h100-80gb", 2)
    device = pool(2).run(made_on_ranks, measured(node, 2))[0]
    assert device.flops == {"bfloat16": 4e11, "float16": 4e10, "float32": 1e11, "float64": 2e10}
    assert device.matmul_efficiency["bfloat16"] == {64: 0.25, 128: 1.0}
    assert device.matmul_efficiency["float16"] == find_device("cpu").matmul_efficiency["float16"]
    assert (device.attention_efficiency, device.attention_backward_efficiency) == (0.4, 0.2)
    assert device.bandwidth == 1e10
    # A byte takes as long as a byte of each operator in turn.
    assert device.bandwidth_efficiency == pytest.approx(2 / (1 / 1e10 + 1 / 4e9) / 1e10, rel=1e-3)
    assert (device.kernel_s, device.cpu_s, device.speed_beside_communication) == (1e-6, 2e-6, 0.25)
    assert device.is_host
    assert device.node.inside.rate == pytest.approx(node.inside.rate, rel=1e-3)
    assert device.node.between == find_device("cpu").node.between
    assert device.node.ranks == find_device("cpu").node.ranks
    over = device.sources["taken over"]
    assert "products in float16" in over
    assert "links between nodes" in over
    assert "links inside" not in over
    assert torch.__version__ in device.sources["measured"]
    path = tmp_path / "mine.yaml"
    path.write_text(written(device))
    assert find_device(str(path)) == device
    assert "# Peak of matrix products, by dtype." in path.read_text()


def test_links_of_a_single_rank_are_those_of_the_base():
    device = pool(1).run(made_on_ranks, [])[0]
    assert device.node == find_device("cpu").node
    assert "links inside of a node, links between nodes" in device.sources["taken over"]
    assert "links" not in device.sources


def test_the_best_of_all_passes_counts():
    other = replace(
        RATES, products={**RATES.products, "float32": {64: 9e10}}, attention=(1e10, 9e10), kernel_s=9e-6, cpu_s=1e-6
    )
    found = best([RATES, other, replace(RATES, beside=0.5)])
    assert found.products["float32"] == {64: 9e10, 128: 1e11}
    assert found.attention == (4e10, 9e10)
    assert (found.kernel_s, found.cpu_s, found.beside) == (1e-6, 1e-6, 0.25)


# -- on real ranks


def calibrated() -> Device:
    with open_world("cpu") as world:
        return calibrate(world, "cpu", TINY)


def test_ranks_measure_themselves_and_agree():
    one, other = pool(2).run(calibrated)
    assert one == other
    assert {name: set(table) for name, table in one.matmul_efficiency.items()} == {
        name: {64, 128} for name in ("bfloat16", "float16", "float32", "float64")
    }
    assert all(max(table.values()) == 1.0 for table in one.matmul_efficiency.values())
    assert set(one.node.factors) == set(KINDS) - {"all_gather"}
    assert one.sources["links"].startswith(f"{len(KINDS) * len(TINY.messages)} collectives of 2 ranks, 1024 to 262144")
    assert "2 ranks at the same time with 1 threads each" in one.sources["measured"]
    assert 0 <= one.speed_beside_communication <= 1
    assert all(math.isfinite(each) and each > 0 for each in (one.kernel_s, one.cpu_s, one.bandwidth))


def groups_of_four() -> list[tuple[str, int, tuple[int, ...]]]:
    from meshwright.plan.calibration.measure_links import samples

    world = open_world("cpu")
    effort = replace(TINY, messages=(1 << 10,))
    return [(each.kind, each.bytes, each.ranks) for each in samples(world, Clock(world, effort), effort, 2)]


def test_groups_lie_inside_of_nodes_and_across_them():
    found = pool(4).run(groups_of_four)
    assert all(rank in ranks for rank, samples in enumerate(found) for _, _, ranks in samples)
    ranks = {kind: [each for name, _, each in found[0] if name == kind] for kind in ("all_reduce", "send")}
    assert ranks == {"all_reduce": [(0, 1), (0, 1, 2, 3), (0, 2)], "send": [(0, 1), (0, 2)]}


def classes_within_patience() -> list[int]:
    from meshwright.plan.calibration import measure_compute as measure

    world = open_world("cpu")
    before, measure.PATIENCE_S = measure.PATIENCE_S, 0.0
    try:
        return list(products(Clock(world, TINY), torch.float32, world.device, TINY))
    finally:
        measure.PATIENCE_S = before


def test_what_would_take_too_long_is_left_out():
    assert pool(1).run(classes_within_patience) == [[]]


def uneven_nodes(sizes: list[int]) -> str:
    import os

    world = open_world("cpu")
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(sizes[world.rank])
    try:
        calibrate(world, "cpu", TINY)
    except MeshError as error:
        return str(error)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before
    return ""


def test_nodes_of_different_sizes_are_refused_on_all_ranks():
    found = pool(2).run(uneven_nodes, [1, 2])
    assert set(found) == {
        "nodes have 1 to 2 ranks each, but a device file has nodes that are all alike. Start as many on each."
    }


COMMAND = """
import sys
from meshwright.plan.calibration.calibrate import calibrate_to
from meshwright.plan.calibration.measure_compute import Effort
if __name__ == "__main__":
    effort = Effort(0.001, 1, 1, (64,), 64, 64, 1 << 16, 3, (1 << 10, 1 << 16))
    sys.exit(calibrate_to(sys.argv[1], ranks=int(sys.argv[2]), device="cpu", effort=effort))
"""


def test_one_call_starts_the_ranks_and_writes_the_file(tmp_path):
    path, program = tmp_path / "here.yaml", tmp_path / "program.py"
    program.write_text(COMMAND)
    done = subprocess.run(
        [sys.executable, program, path, "2"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks at the same time" in find_device(str(path)).sources["measured"]


@pytest.mark.parametrize(
    ("path", "given", "kind", "said"),
    [
        ("here.yml/x.yaml", {}, ConfigError, r"there is no directory .*here.yml. Make it"),
        ("here.json", {}, ConfigError, r"ends in .yaml or .yml, not as '.*here.json' does"),
        ("here.yaml", {"base": "h100"}, ConfigError, r"no device 'h100'.*Devices: a100-40gb"),
        ("here.yaml", {"ranks": 0}, MeshError, r"ranks=0 cannot be measured here: from 1 to 64"),
        ("here.yaml", {"device": "tpu7"}, MeshError, "'tpu7' is no device name"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path, path, given, kind, said):
    with pytest.raises(kind, match=said):
        calibrate_to(tmp_path / path, **{"device": "cpu", **given})
    assert not list(tmp_path.iterdir())


def test_a_launcher_says_how_many_ranks_there_are(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match="4 ranks are asked for, but a launcher has started 2"):
        calibrate_to(tmp_path / "here.yaml", ranks=4, device="cpu")


def test_devices_that_come_with_the_package_hide_communication_and_take_no_longer_for_any_kind():
    for name in devices():
        if name != "cpu":
            device = find_device(name)
            assert (device.speed_beside_communication, device.is_host, dict(device.node.factors)) == (1.0, False, {})
