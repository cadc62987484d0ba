"""A machine is measured, and what is found becomes a device file: fits against numbers made up for them."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from meshwright.base.errors import ConfigError, MeshError
from meshwright.launch.open_world import open_world
from meshwright_plan.calibration import measure
from meshwright_plan.calibration.calibrate import (
    MeasuredRates,
    build_device_spec,
    calibrate,
    calibrate_to_file,
    format_device_file,
    merge_passes,
)
from meshwright_plan.calibration.fit import CollectiveSample, fit_node, median_relative_error
from meshwright_plan.calibration.measure import COLLECTIVE_KINDS, CollectiveTimer, MeasurementBudget
from meshwright_plan.config import DeviceSpec, NodeSpec, load_device_spec
from meshwright_plan.timeline import estimate_collective_seconds
from meshwright_testing.workers import pool

TINY = MeasurementBudget(
    0.002,
    2,
    2,
    (64, 128),
    128,
    64,
    stream_bytes=1 << 18,
    num_stream_tensors=3,
    message_bytes=(1 << 10, 1 << 14, 1 << 18),
)
FACTORS = {"reduce_scatter": 1.9, "all_reduce": 1.2, "all_to_all": 0.8, "broadcast": 0.6, "send": 0.7}
CPU = load_device_spec("cpu")


def true_node(device: str, ranks: int, **more: Any) -> NodeSpec:
    return load_device_spec(device).node.model_copy(update={"ranks": ranks, "slowdown_factors": FACTORS, **more})


def fitted(samples: list[CollectiveSample], ranks: int) -> NodeSpec:
    return fit_node(samples, CPU.node.model_copy(update={"ranks": ranks}))


def measured(node: NodeSpec, world: int) -> list[CollectiveSample]:
    """What links of these numbers would take, without any noise."""
    groups = {tuple(range(world)), (0, 1), tuple(range(node.ranks)), tuple(range(0, world, node.ranks))}
    return [
        CollectiveSample(kind, 1 << power, group, estimate_collective_seconds(kind, 1 << power, group, node))
        for group in sorted(each for each in groups if len(each) > 1)
        for kind in COLLECTIVE_KINDS
        for power in range(8, 31, 2)
        if kind != "send" or len(group) == 2
    ]


def numbers(node: NodeSpec, levels: list[str]) -> dict[str, float]:
    fields = ("effective_bandwidth", "ring_step_latency_s", "tree_step_latency_s")
    of_links = {f"{level}.{name}": getattr(getattr(node, level), name) for level in levels for name in fields}
    return {
        **of_links,
        "ring_base_latency_s": node.ring_base_latency_s,
        "tree_base_latency_s": node.tree_base_latency_s,
        **node.slowdown_factors,
    }


@pytest.mark.parametrize(
    ("device", "ranks", "world", "levels"),
    [
        ("h100-80gb", 8, 8, ["intra_node"]),
        pytest.param("h100-80gb", 8, 16, ["intra_node", "inter_node"], marks=pytest.mark.slow),
        pytest.param("h200", 4, 16, ["intra_node", "inter_node"], marks=pytest.mark.slow),
    ],
)
def test_links_are_found_exactly_from_times_without_noise_and_nearly_with_some(device, ranks, world, levels):
    node = true_node(device, ranks)
    samples = measured(node, world)
    found = fitted(samples, ranks)
    assert median_relative_error(samples, found) < 1e-9
    assert numbers(found, levels) == pytest.approx(numbers(node, levels), rel=1e-6)
    if levels == ["intra_node"]:
        assert found.inter_node == CPU.node.inter_node
        drawn = random.Random(0)
        found = fitted([replace(each, seconds=each.seconds * drawn.gauss(1, 0.05)) for each in samples], ranks)
        assert found.intra_node.effective_bandwidth == pytest.approx(node.intra_node.effective_bandwidth, rel=0.05)
        assert median_relative_error(samples, found) < 0.05


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(MeshError, match=r"0 samples of more than one rank.*Measure on at least 2 ranks"):
        fit_node([CollectiveSample("all_reduce", 8, (0,), 1.0)], CPU.node)
    with pytest.raises(MeshError, match="1 of which took no time"):
        fit_node([CollectiveSample("all_reduce", 8, (0, 1), 0.0)], CPU.node)


PRODUCTS = {"bfloat16": {64: 1e11, 128: 4e11}, "float16": {}, "float32": {64: 5e10, 128: 1e11}, "float64": {64: 2e10}}
RATES = MeasuredRates(PRODUCTS, (4e10, 2e10), "float32", {"copy": 1e10, "sqrt": 4e9}, 1e-6, 2e-6, 0.25)


def made_on_ranks(samples: list[CollectiveSample]) -> DeviceSpec:
    return build_device_spec(open_world("cpu"), CPU, "cpu", RATES, samples, 2, TINY)


def test_a_file_says_what_was_measured_and_what_was_not(tmp_path):
    node = true_node("h100-80gb", 2)
    device = pool(2).run(made_on_ranks, measured(node, 2))[0]
    assert device.flops == {"bfloat16": 4e11, "float16": 4e10, "float32": 1e11, "float64": 2e10}
    efficiency = device.matmul_efficiency
    assert (efficiency["bfloat16"], efficiency["float16"]) == ({64: 0.25, 128: 1}, CPU.matmul_efficiency["float16"])
    attention = (device.attention_efficiency, device.attention_backward_efficiency)
    assert (*attention, device.bandwidth) == (0.4, 0.2, 1e10)
    # A byte takes as long as a byte of each operator in turn.
    assert device.bandwidth_efficiency == pytest.approx(2 / (1 / 1e10 + 1 / 4e9) / 1e10, rel=1e-3)
    rest = (device.min_kernel_s, device.launch_overhead_s, device.overlap_speed, device.is_host)
    assert rest == (1e-6, 2e-6, 0.25, True)
    assert device.node.intra_node.effective_bandwidth == pytest.approx(node.intra_node.effective_bandwidth, rel=1e-3)
    assert (device.node.inter_node, device.node.ranks) == (CPU.node.inter_node, CPU.node.ranks)
    over = device.sources["taken over"]
    assert ["products in float16" in over, "links between" in over, "links within" in over] == [True, True, False]
    path = tmp_path / "mine.yaml"
    path.write_text(format_device_file(device))
    assert load_device_spec(str(path)) == device
    alone = pool(2).run(made_on_ranks, [])[0]  # links of a single rank are those of the base
    assert alone.node == CPU.node


def test_the_best_of_all_passes_counts():
    other = replace(RATES, matmul={**RATES.matmul, "float32": {64: 9e10}}, attention=(1e10, 9e10))
    found = merge_passes(
        [RATES, replace(other, min_kernel_s=9e-6, launch_overhead_s=1e-6), replace(RATES, overlap_speed=0.5)]
    )
    assert found.matmul["float32"] == {64: 9e10, 128: 1e11}
    assert found.attention == (4e10, 9e10)
    assert (found.min_kernel_s, found.launch_overhead_s, found.overlap_speed) == (1e-6, 1e-6, 0.25)


def groups_of_four() -> list[tuple[str, tuple[int, ...]]]:
    world, effort = open_world("cpu"), replace(TINY, message_bytes=(1 << 10,))
    return [
        (each.kind, each.ranks)
        for each in measure.measure_collectives(world, CollectiveTimer(world, effort), effort, 2)
    ]


@pytest.mark.slow
def test_groups_lie_inside_of_nodes_and_across_them():
    found = pool(4).run(groups_of_four)
    assert all(rank in ranks for rank, samples in enumerate(found) for _, ranks in samples)
    ranks = {kind: [each for name, each in found[0] if name == kind] for kind in ("all_reduce", "send")}
    assert ranks == {"all_reduce": [(0, 1), (0, 1, 2, 3), (0, 2)], "send": [(0, 1), (0, 2)]}


def uneven(sizes: list[int]) -> str:
    world = open_world("cpu")
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(os.environ, "LOCAL_WORLD_SIZE", str(sizes[world.rank]))
        with pytest.raises(MeshError) as caught:
            calibrate(world, "cpu", TINY)
    return str(caught.value)


def test_nodes_of_different_sizes_are_refused_on_all_ranks():
    for text in pool(2).run(uneven, [1, 2]):
        assert text.startswith("nodes have 1 to 2 ranks each, but in a device file all nodes are alike")


PROGRAM = """
import sys
from meshwright_plan.calibration.calibrate import calibrate_to_file
from meshwright_plan.calibration.measure import MeasurementBudget
if __name__ == "__main__":
    effort = MeasurementBudget(0.001, 1, 1, (64, 128), 64, 64, 1 << 16, 3, (1 << 10, 1 << 16))
    sys.exit(calibrate_to_file(sys.argv[1], ranks=2, device="cpu", effort=effort))
"""


@pytest.mark.slow
def test_one_call_starts_ranks_that_measure_themselves_and_writes_the_file(tmp_path):
    path, program = tmp_path / "here.yaml", tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run([sys.executable, program, path], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = load_device_spec(str(path))
    assert set(found.matmul_efficiency) == {"bfloat16", "float16", "float32", "float64"}
    for table in found.matmul_efficiency.values():
        assert (set(table), max(table.values())) == ({64, 128}, 1.0)
    assert set(found.node.slowdown_factors) == set(COLLECTIVE_KINDS) - {"all_gather"}
    assert found.sources["links"].startswith(f"{len(COLLECTIVE_KINDS) * 2} collectives of 2 ranks, 1024 to 65536")
    assert "2 ranks at the same time with 1 threads each" in found.sources["measured"]
    assert 0 <= found.overlap_speed <= 1
    assert all(
        math.isfinite(each) and each > 0 for each in (found.min_kernel_s, found.launch_overhead_s, found.bandwidth)
    )


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path):
    for path, given, kind, said in (
        ("here.yml/x.yaml", {}, ConfigError, r"there is no directory .*here.yml. Create it"),
        ("here.json", {}, ConfigError, r"must end in .yaml or .yml, not '.*here.json'"),
        ("here.yaml", {"ranks": 0}, MeshError, r"ranks=0 cannot be measured here: cpu allows 1 to 64 ranks"),
        ("here.yaml", {"device": "tpu7"}, MeshError, "'tpu7' is not a device name"),
    ):
        with pytest.raises(kind, match=said):
            calibrate_to_file(tmp_path / path, **{"device": "cpu", **given})
    assert not list(tmp_path.iterdir())


def test_a_launcher_says_how_many_ranks_there_are(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match="4 ranks are requested, but a launcher has started 2"):
        calibrate_to_file(tmp_path / "here.yaml", ranks=4, device="cpu")
