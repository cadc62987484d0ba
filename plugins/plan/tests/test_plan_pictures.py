"""Pictures of plans show what the plans say: each byte, span and rank, also where not all of them are drawn."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from support.plan_layouts import PlannedLayout
from support.tiers import mark_mostly_slow

from meshwright.base.errors import ConfigError
from meshwright.mesh.sizes import MeshSizes
from meshwright_plan.allocator import compute_reserved_bytes
from meshwright_plan.config import load_device_spec
from meshwright_plan.planner import plan_job
from meshwright_plan.plots.page import render_page, write_page
from meshwright_plan.plots.plot_data import (
    SEND_PREFIX,
    PlotData,
    choose_ranks,
    collect_plot_data,
    collect_traffic,
    compute_overlap,
    find_pareto_frontier,
    sample_memory,
)
from meshwright_plan.plots.png import write_pngs
from meshwright_plan.timeline import (
    COMPUTE,
    Timeline,
    TimelineSpan,
    compute_bytes_sent,
    estimate_collective_seconds,
    find_group_ranks,
)

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LAYOUTS = {
    "tp": PlannedLayout("fsdp2", 4, {"tp_size": 2}, layers=2),
    "pipeline": PlannedLayout("fsdp2", 4, {"pp_size": 2}, layers=2, microbatches=3),
    "compiled": PlannedLayout("single", 1, layers=2, microbatches=1),
}
"""Of the last one all tests are unmarked; of a single rank, it sends nothing."""


H100 = load_device_spec("h100-80gb")
DEVICE = H100.model_copy(update={"node": H100.node.model_copy(update={"ranks": 2})})


FOUND = [
    {"label": "</script><b>", "step_seconds": seconds, "peak_reserved_bytes": size << 30, "fits": size < 78}
    for seconds, size in ((1.0, 90), (1.5, 70), (2.0, 40), (2.5, 60), (3.0, 30))
]


@functools.cache
def _subject(name: str) -> PlotData:
    job = replace(LAYOUTS[name].build_job(), is_compiled=name == "compiled")
    return collect_plot_data(job, DEVICE, plan_job(job, DEVICE, [0]), FOUND)


@pytest.fixture(params=mark_mostly_slow(LAYOUTS, "compiled"))
def subject(request) -> PlotData:
    return _subject(request.param)


def test_areas_of_memory_sum_to_what_is_held_and_their_peak_is_that_of_the_trace(subject):
    for found, line in zip(subject.traces, subject.timelines, strict=True):
        every, held = sample_memory(found, line, max_moments=10**9), [0]
        for _, change in found.memory_log:
            held.append(held[-1] + change)
        assert every.totals == [held[moment] for moment in sorted({each.log_length for each in found.operations})]
        assert list(every.seconds) == sorted(every.seconds)
        assert every.seconds[-1] <= line.seconds
        for drawn in (sample_memory(found, line, 40), every):
            assert max(drawn.totals) == drawn.totals[drawn.peak_index] == found.peak.bytes
            assert drawn.operators[drawn.peak_index] == found.peak.operator
            at_peak = {
                owner: each[drawn.peak_index] for owner, each in drawn.bytes_by_owner.items() if each[drawn.peak_index]
            }
            assert at_peak == dict(found.peak.bytes_by_owner)


def test_what_is_hidden_is_what_runs_beside_computing():
    spans = [(COMPUTE, 1, 4), (COMPUTE, 6, 9), ("tp", 0, 2), ("tp", 3, 7), ("dp_shard", 0, 9), ("tp", 10, 11)]
    line = Timeline(0, 11.0, tuple(TimelineSpan(stream, "x", float(start), float(end)) for stream, start, end in spans))
    assert (compute_overlap(line, "tp"), compute_overlap(line, "dp_shard")) == (1 + 1 + 1, 6)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast"])
@pytest.mark.parametrize(
    "ranks",
    [range(8), range(32), range(0, 64, 8), (3, 4), (7, 8)],
    ids=["node", "nodes", "one of each node", "two of a node", "two of two nodes"],
)
def test_bytes_over_links_are_those_that_take_the_time(kind, ranks):
    node, size = H100.node, 1 << 34
    both = zip(*(compute_bytes_sent(kind, each, ranks, node) for each in (size, 2 * size)), strict=True)
    near, away = (more - less for less, more in both)
    took = estimate_collective_seconds(kind, 2 * size, ranks, node) - estimate_collective_seconds(
        kind, size, ranks, node
    )
    assert took == pytest.approx(
        max(near / node.intra_node.effective_bandwidth, away / node.inter_node.effective_bandwidth), rel=1e-9
    )


def test_traffic_is_that_of_all_collectives(subject):
    node = subject.device.node
    wanted: Counter[tuple[int, str]] = Counter()
    for found in subject.traces:
        for each in found.operations:
            if (
                each.collective_index is None
                or (call := found.collectives[each.collective_index]).kind.startswith("recv")
                or call.num_ranks == 1
            ):
                continue
            ranks = find_group_ranks(call.group, found.rank, subject.degrees, call.num_ranks)
            name = call.group
            if each.peer is not None:
                name, ranks = f"{SEND_PREFIX}{ranks[each.peer]}", [found.rank, ranks[each.peer]]
            wanted[found.rank, name] += sum(compute_bytes_sent(call.kind, call.nbytes, ranks, node))
    reported = {
        (each.rank, each.stream): each.intra_node_bytes + each.inter_node_bytes for each in collect_traffic(subject)
    }
    assert reported == {key: pytest.approx(size) for key, size in wanted.items()}
    for each in collect_traffic(subject):
        line = next(line for line in subject.timelines if line.rank == each.rank)
        assert each.seconds == pytest.approx(line.busy_seconds(each.stream))
        assert 0 <= each.overlap_fraction <= 1 + 1e-9
    # Of a rank that is not in the plan the trace tells, unless it is of fewer blocks.
    without = replace(subject, plan={**subject.plan, "ranks": []})
    assert [each.stream for each in collect_traffic(without)] == [stream for _, stream in reported]
    assert collect_traffic(replace(without, drawn_layers=1)) == []


def test_the_frontier_has_those_that_no_other_beats():
    assert find_pareto_frontier(FOUND) == [FOUND[1], FOUND[2], FOUND[4]]
    assert find_pareto_frontier([{**each, "fits": False} for each in FOUND]) == []


def test_the_page_is_well_formed_and_escaped_and_refers_to_nothing_outside(subject):
    text = render_page(subject)
    assert "</script><b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;" in text
    outside = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", text)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert not [each for each in ("url(", "@import", "{{") if each in text]
    for image in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        assert ElementTree.fromstring(image).find("{http://www.w3.org/2000/svg}title").text


@pytest.mark.slow
def test_a_deep_model_is_drawn_with_few_blocks_and_says_so():
    job = PlannedLayout("fsdp2", 2, layers=40, microbatches=1).build_deep_job()
    subject = collect_plot_data(job, DEVICE, plan_job(job, DEVICE, [0]))
    assert (subject.drawn_layers, subject.layers) == (10, 40)
    assert "10 of the 40 blocks" in render_page(subject)
    # The trace's own, not that of all blocks.
    assert subject.reserved_bytes == [
        compute_reserved_bytes(found, workspace=DEVICE.library_bytes) for found in subject.traces
    ]
    assert subject.traces[0].peak.bytes < subject.plan["peak_allocated_bytes"]


def test_a_rank_of_each_stage_is_planned_for_pictures():
    sizes = MeshSizes(pp_size=8).resolve(32, frozenset({"dp_shard", "pp"}))
    assert choose_ranks(sizes, None) == [0, 4, 8, 12, 16, 20, 24, 28, 31]
    assert choose_ranks(sizes, [6, 5]) == [2, 5, 6, 10, 14, 18, 22, 26, 30]
    assert choose_ranks(MeshSizes().resolve(8, frozenset({"dp_shard"})), [3]) == [3]


def test_pictures_are_written_or_it_is_said_that_they_cannot_be(subject, tmp_path):
    written = write_pngs(tmp_path / "new", subject)
    # A single rank has no other to send to.
    names = ["memory", "timeline", "mesh", *(["traffic"] if collect_traffic(subject) else []), "layouts"]
    assert [path.stem for path in written] == names
    (tmp_path / "file").touch()
    for write in (lambda path: write_page(path / "page.html", subject), lambda path: write_pngs(path, subject)):
        with pytest.raises(ConfigError, match="cannot be written"):
            write(tmp_path / "file")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
def test_a_browser_opens_the_page_without_errors(tmp_path):
    write_page(path := tmp_path / "page.html", _subject("pipeline"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}"]
    # What is asked for outside of this machine is an error.
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", path.as_uri()]
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert "<canvas" in done.stdout
    assert "CONSOLE" not in done.stderr, done.stderr
