"""A machine is measured, and what is found becomes a device file: fits against numbers made up for them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.base.errors import ConfigError, MeshError
from meshwright.launch.open_world import open_world
from meshwright.mesh.sizes import Degrees
from meshwright.tracing.collectives import Collective
from meshwright_plan.calibration import measure
from meshwright_plan.calibration.calibrate import Rates, best, calibrate, calibrate_to, device_of, written
from meshwright_plan.calibration.fit import Sample, deviation, fit
from meshwright_plan.calibration.measure import KINDS, Clock, Effort, products
from meshwright_plan.config import Device, Node, find_device
from meshwright_plan.meter import Held
from meshwright_plan.time import MESSAGES, collective_seconds, play
from meshwright_plan.trace import Operation, Trace
from meshwright_testing.workers import pool

TINY = Effort(0.002, 2, 2, (64, 128), 128, 64, stream_bytes=1 << 18, streams=3, messages=(1 << 10, 1 << 14, 1 << 18))
FACTORS = {"reduce_scatter": 1.9, "all_reduce": 1.2, "all_to_all": 0.8, "broadcast": 0.6, "send": 0.7}
CPU = find_device("cpu")


# -- the fit


def true_node(device: str, ranks: int, **more: Any) -> Node:
    return find_device(device).node.model_copy(update={"ranks": ranks, "factors": FACTORS, **more})


def fitted(samples: list[Sample], ranks: int) -> Node:
    return fit(samples, CPU.node.model_copy(update={"ranks": ranks}))


def measured(node: Node, world: int) -> list[Sample]:
    """What links of these numbers would take, without any noise."""
    groups = {tuple(range(world)), (0, 1), tuple(range(node.ranks)), tuple(range(0, world, node.ranks))}
    return [
        Sample(kind, 1 << power, group, collective_seconds(kind, 1 << power, group, node))
        for group in sorted(each for each in groups if len(each) > 1)
        for kind in KINDS
        for power in range(8, 31, 2)
        if kind != "send" or len(group) == 2
    ]


def numbers(node: Node, levels: list[str]) -> dict[str, float]:
    names = [(level, name) for level in levels for name in ("rate", "ring_s", "tree_s")]
    of_links = {f"{level}.{name}": getattr(getattr(node, level), name) for level, name in names}
    return {**of_links, "ring_begin_s": node.ring_begin_s, "tree_begin_s": node.tree_begin_s, **node.factors}


@pytest.mark.parametrize(
    ("device", "ranks", "world", "levels"),
    [
        ("h100-80gb", 8, 8, ["inside"]),
        pytest.param("h100-80gb", 8, 16, ["inside", "between"], marks=pytest.mark.slow),
        pytest.param("h200", 4, 16, ["inside", "between"], marks=pytest.mark.slow),
    ],
)
def test_links_are_found_exactly_from_times_without_noise_and_nearly_with_some(device, ranks, world, levels):
    node = true_node(device, ranks)
    samples = measured(node, world)
    found = fitted(samples, ranks)
    assert deviation(samples, found) < 1e-9
    assert numbers(found, levels) == pytest.approx(numbers(node, levels), rel=1e-6)
    if levels == ["inside"]:
        assert found.between == CPU.node.between
        drawn = torch.Generator().manual_seed(0)
        noise = (torch.randn(len(samples), generator=drawn, dtype=torch.float64) * 0.05).exp().tolist()
        noisy = [replace(each, seconds=each.seconds * part) for each, part in zip(samples, noise, strict=True)]
        found = fitted(noisy, ranks)
        assert found.inside.rate == pytest.approx(node.inside.rate, rel=0.05)
        assert deviation(samples, found) < 0.05


@pytest.mark.parametrize(
    ("change", "expected"), [({"efficiency": 0.5}, (4.5e11, 0.5)), ({"bandwidth": 9e11}, (9e11 * 0.82, 1.0))]
)
def test_a_bandwidth_stays_where_less_is_reached(change, expected):
    node = true_node("h100-80gb", 8)
    other = node.model_copy(update={"inside": node.inside.model_copy(update=change)})
    found = fit(measured(other, 8), node).inside
    assert (found.bandwidth, found.efficiency) == pytest.approx(expected, rel=1e-6)


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(MeshError, match=r"0 samples of more than one rank.*Measure on 2 ranks"):
        fit([Sample("all_reduce", 8, (0,), 1.0)], CPU.node)
    with pytest.raises(MeshError, match="1 of which took no time"):
        fit([Sample("all_reduce", 8, (0, 1), 0.0)], CPU.node)


def test_a_kind_of_collective_takes_as_many_times_as_long_as_a_file_says():
    node, plain = (true_node("h100-80gb", 8, factors=each) for each in ({"all_gather": 3.0, "send": 2.0}, {}))
    for kind, times in (("all_gather", 3), ("reduce_scatter", 1), ("send", 2), ("recv", 2)):
        ranks = range(2) if kind in MESSAGES else range(8)
        took, before = (collective_seconds(kind, 1 << 32, ranks, each) for each in (node, plain))
        assert took == pytest.approx(times * before, rel=1e-2)


# -- the time of a host that computes itself


def timed(*steps: Operation, **changes: Any) -> float:
    """Seconds of a step in which a byte takes a second, and which issues operators in no time."""
    link = CPU.node.inside.model_copy(update={"bandwidth": 1.0, "efficiency": 1.0, "ring_s": 1e-9})
    node = CPU.node.model_copy(update={"inside": link, "ring_begin_s": 1e-9})
    told = {"bandwidth": 1.0, "bandwidth_efficiency": 1.0, "kernel_s": 1e-9, "cpu_s": 1e-9, "node": node, **changes}
    calls = [Collective("all_gather", "dp_shard", 2, torch.float32, 2 * 4) for each in steps if each.call is not None]
    found = Trace(0, Held(0, {}, ""), Held(0, {}, ""), tuple(calls), steps, ())
    return play([found], Degrees(dp_shard=2), CPU.model_copy(update=told))[0].seconds


def kernel(seconds: int, name: str = "aten.op") -> Operation:
    return Operation(name, 0, 0, (), torch.float32, None, (), ((seconds, seconds),))


GATHER = Operation("c10d.op", 0, 0, (), torch.float32, 0, ((100, 0),), ((100, 0),))  # Takes four seconds
OTHER = replace(GATHER, reads=((101, 0),), writes=((101, 0),))
COPY_IN = kernel(5, "fsdp.all_gather_copy_in.default")


@pytest.mark.parametrize(
    ("steps", "speed", "is_host", "seconds"),
    [
        # Communication is hidden, or half or all of what is computed in four seconds is lost.
        ([GATHER, kernel(10)], 1.0, True, 10),
        ([GATHER, kernel(10)], 0.5, True, 12),
        ([GATHER, kernel(10)], 0.0, True, 14),
        # Nothing is lost where nothing is carried; of two that overlap in time each second is lost once.
        ([kernel(10), GATHER, kernel(3)], 0.0, True, 17),
        ([GATHER, OTHER, kernel(1)], 0.0, True, 9),
        # A host issues a collective when it has computed, and has one stream of computing.
        ([kernel(10), GATHER], 1.0, False, 10),
        ([kernel(10), GATHER], 1.0, True, 14),
        ([kernel(10), COPY_IN], 1.0, False, 10),
        ([kernel(10), COPY_IN], 1.0, True, 15),
    ],
)
def test_a_host_computes_less_beside_collectives_and_issues_none_meanwhile(steps, speed, is_host, seconds):
    assert timed(*steps, speed_beside_communication=speed, is_host=is_host) == pytest.approx(seconds)


# -- the file


PRODUCTS = {"bfloat16": {64: 1e11, 128: 4e11}, "float16": {}, "float32": {64: 5e10, 128: 1e11}, "float64": {64: 2e10}}
RATES = Rates(PRODUCTS, (4e10, 2e10), "float32", {"copy": 1e10, "sqrt": 4e9}, 1e-6, 2e-6, 0.25)


def made_on_ranks(samples: list[Sample]) -> Device:
    return device_of(open_world("cpu"), CPU, "cpu", RATES, samples, 2, TINY)


def test_a_file_says_what_was_measured_and_what_was_not(tmp_path):
    node = true_node("h100-80gb", 2)
    device = pool(2).run(made_on_ranks, measured(node, 2))[0]
    assert device.flops == {"bfloat16": 4e11, "float16": 4e10, "float32": 1e11, "float64": 2e10}
    assert device.matmul_efficiency["bfloat16"] == {64: 0.25, 128: 1.0}
    assert device.matmul_efficiency["float16"] == CPU.matmul_efficiency["float16"]
    assert (device.attention_efficiency, device.attention_backward_efficiency) == (0.4, 0.2)
    assert device.bandwidth == 1e10
    # A byte takes as long as a byte of each operator in turn.
    assert device.bandwidth_efficiency == pytest.approx(2 / (1 / 1e10 + 1 / 4e9) / 1e10, rel=1e-3)
    assert (device.kernel_s, device.cpu_s, device.speed_beside_communication) == (1e-6, 2e-6, 0.25)
    assert device.is_host
    assert device.node.inside.rate == pytest.approx(node.inside.rate, rel=1e-3)
    assert (device.node.between, device.node.ranks) == (CPU.node.between, CPU.node.ranks)
    over = device.sources["taken over"]
    assert "products in float16" in over
    assert "links between nodes" in over
    assert "links inside" not in over
    assert torch.__version__ in device.sources["measured"]
    path = tmp_path / "mine.yaml"
    path.write_text(written(device))
    assert find_device(str(path)) == device
    assert "# Peak of matrix products, by dtype." in path.read_text()
    alone = pool(2).run(made_on_ranks, [])[0]  # links of a single rank are those of the base
    assert alone.node == CPU.node
    assert "links inside of a node, links between nodes" in alone.sources["taken over"]
    assert "links" not in alone.sources


def test_the_best_of_all_passes_counts():
    other = replace(RATES, products={**RATES.products, "float32": {64: 9e10}}, attention=(1e10, 9e10))
    found = best([RATES, replace(other, kernel_s=9e-6, cpu_s=1e-6), replace(RATES, beside=0.5)])
    assert found.products["float32"] == {64: 9e10, 128: 1e11}
    assert found.attention == (4e10, 9e10)
    assert (found.kernel_s, found.cpu_s, found.beside) == (1e-6, 1e-6, 0.25)


# -- on real ranks


def calibrated() -> Device:
    with open_world("cpu") as world:
        return calibrate(world, "cpu", TINY)


@pytest.mark.slow
def test_ranks_measure_themselves_and_agree():
    one, other = pool(2).run(calibrated)
    assert (one, set(one.matmul_efficiency)) == (other, {"bfloat16", "float16", "float32", "float64"})
    assert all(set(table) == {64, 128} for table in one.matmul_efficiency.values())
    assert all(max(table.values()) == 1.0 for table in one.matmul_efficiency.values())
    assert set(one.node.factors) == set(KINDS) - {"all_gather"}
    assert one.sources["links"].startswith(f"{len(KINDS) * len(TINY.messages)} collectives of 2 ranks, 1024 to 262144")
    assert "2 ranks at the same time with 1 threads each" in one.sources["measured"]
    assert 0 <= one.speed_beside_communication <= 1
    assert all(math.isfinite(each) and each > 0 for each in (one.kernel_s, one.cpu_s, one.bandwidth))


def groups_of_four() -> list[tuple[str, int, tuple[int, ...]]]:
    world, effort = open_world("cpu"), replace(TINY, messages=(1 << 10,))
    return [(each.kind, each.bytes, each.ranks) for each in measure.samples(world, Clock(world, effort), effort, 2)]


@pytest.mark.slow
def test_groups_lie_inside_of_nodes_and_across_them():
    found = pool(4).run(groups_of_four)
    assert all(rank in ranks for rank, samples in enumerate(found) for _, _, ranks in samples)
    ranks = {kind: [each for name, _, each in found[0] if name == kind] for kind in ("all_reduce", "send")}
    assert ranks == {"all_reduce": [(0, 1), (0, 1, 2, 3), (0, 2)], "send": [(0, 1), (0, 2)]}


def uneven_and_impatient(sizes: list[int]) -> tuple[str, list[int]]:
    world = open_world("cpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measure, "PATIENCE_S", 0.0)
        classes = list(products(Clock(world, TINY), torch.float32, world.device, TINY))
        patched.setitem(os.environ, "LOCAL_WORLD_SIZE", str(sizes[world.rank]))
        with pytest.raises(MeshError) as caught:
            calibrate(world, "cpu", TINY)
    return str(caught.value), classes


def test_nodes_of_different_sizes_are_refused_on_all_ranks_and_what_would_take_too_long_is_left_out():
    for text, classes in pool(2).run(uneven_and_impatient, [1, 2]):
        assert text == (
            "nodes have 1 to 2 ranks each, but a device file has nodes that are all alike. Start as many on each."
        )
        assert classes == []


COMMAND = """
import sys
from meshwright_plan.calibration.calibrate import calibrate_to
from meshwright_plan.calibration.measure import Effort
if __name__ == "__main__":
    effort = Effort(0.001, 1, 1, (64,), 64, 64, 1 << 16, 3, (1 << 10, 1 << 16))
    sys.exit(calibrate_to(sys.argv[1], ranks=int(sys.argv[2]), device="cpu", effort=effort))
"""


@pytest.mark.slow
def test_one_call_starts_the_ranks_and_writes_the_file(tmp_path):
    path, program = tmp_path / "here.yaml", tmp_path / "program.py"
    program.write_text(COMMAND)
    command = [sys.executable, program, path, "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
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
